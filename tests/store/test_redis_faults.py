"""What a real Redis can do to its store: end, stall, refuse, forget, fail over; and lost replies."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("redis", reason="the extra 'redis' is not installed")

from modelexpress_rl.server.stores.port import Change, Committed, Rejected, Resync, StoreUnavailable
from modelexpress_rl.server.stores.redis import RedisStore, link, node, scripts
from modelexpress_rl.server.stores.redis import changes as changes_module
from tests.store.records import entry, published, retired, worker
from tests.store.redis_server import RedisServer, free_port, until
from tests.store.tcp_proxy import Proxy
from tests.store.test_contract import put, put_worker

pytestmark = pytest.mark.anyio

Start = Callable[..., RedisServer]
REMEMBERED = scripts.VERSION_REMEMBERS


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's patience, made short: what it is patient with lasts as long as a test wants."""
    monkeypatch.setattr(link, "PATIENCE_S", 1.5)
    monkeypatch.setattr(node, "ANSWER_S", 1.0)
    monkeypatch.setattr(node, "CONNECT_S", 1.0)


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(address)
    try:
        yield store
    finally:
        await store.close()


async def in_thread(work: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(work)


class TestTime:
    async def test_it_is_the_stores(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            seconds, micros = server.client.time()
            now_ms = await store.now_ms()
            assert seconds * 1000 + micros // 1000 <= now_ms <= time.time() * 1000 + 1
            made = await put(store, entry("v", 1), valid_until_ms=now_ms + 60_000)
            late = await put(store, entry("v", 1), expected=made.revision, valid_until_ms=now_ms)
            assert late is Rejected.LATE
            assert (await store.read_version("v")).now_ms >= now_ms

    async def test_a_clock_that_is_behind_does_not_take_it_back(self, start_redis: Start) -> None:
        """As when a replica whose clock is behind takes over, and every server restarts besides."""
        server = start_redis()
        ahead_ms = int(time.time() * 1000) + 3_600_000
        async with opened(server.address) as first:
            await first.now_ms()
            server.client.hset("{mx-rl}:meta", "clock", ahead_ms)
            assert await first.now_ms() >= ahead_ms
            made = await put(first, entry("v", 1))
        async with opened(server.address) as second:
            assert await second.now_ms() >= ahead_ms
            late = await put(second, entry("v", 1), expected=made.revision, valid_until_ms=ahead_ms)
            assert late is Rejected.LATE
            assert (await second.read_workers(["w"])).now_ms >= ahead_ms


class TestRestarts:
    async def test_a_flush_is_another_store_whose_numbers_go_on(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            await store.now_ms()
            before, sequence = store.store_id, await store.next_sequence()
            made = await put(store, entry("v", sequence))
            async with store.changes() as changes:
                await in_thread(server.client.flushall)
                with anyio.fail_after(5):
                    assert await anext(changes) == Resync()
            assert (await store.read_version("v")).stored is None
            assert await put(store, retired("v", 1), expected=made.revision) is Rejected.CONFLICT
            assert await store.next_sequence() > sequence
            assert store.store_id not in ("", before)
            again = await put(store, entry("v", 1))
            assert again.revision > made.revision

    async def test_a_kill_is_outlived_with_what_was_on_disk(self, start_redis: Start) -> None:
        server = start_redis("--appendonly", "yes", "--appendfsync", "always")
        async with opened(server.address) as store:
            made = await put(store, entry("v", 1), wake_at_ms=5)
            await put_worker(store, "w", wake_at_ms=6)
            store_id = store.store_id
            await in_thread(server.kill)
            restarted = threading.Timer(0.3, server.start)
            restarted.start()
            stored = (await store.read_version("v")).stored  # waits for it
            restarted.join()
            assert (stored.entry, stored.revision) == (entry("v", 1), made.revision)
            assert (await store.read_workers(["w"])).workers["w"].record == worker("w")
            assert (await store.due_versions(10, 5), await store.due_workers(10, 5)) == (["v"], ["w"])
            await store.now_ms()
            assert store_id in ("", store.store_id)

    async def test_one_that_stays_away_is_said(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            await store.now_ms()
            await in_thread(server.kill)
            began = time.monotonic()
            with pytest.raises(
                StoreUnavailable, match=rf"redis://127\.0\.0\.1:{server.port}/0 can't be reached"
            ):
                await store.read_version("v")
            assert time.monotonic() - began < 3
            with anyio.fail_after(0.6), pytest.raises(StoreUnavailable):  # within the caller's deadline
                await put(store, entry("v", 1))

    async def test_watchers_resume_after_it(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store, store.changes() as changes:
            await put(store, entry("v", 1))
            assert (await anext(changes)).uid == "v"
            await in_thread(server.kill)
            await in_thread(server.start)
            with anyio.fail_after(10):
                assert await anext(changes) == Resync()
            await put(store, entry("w", 1))
            with anyio.fail_after(5):
                while (change := await anext(changes)) == Resync():
                    pass
            assert change.uid == "w"


class TestStalls:
    async def test_a_stopped_process_is_said_and_not_waited_for(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            made = await put(store, entry("v", 1))
            server.send(signal.SIGSTOP)
            try:
                with pytest.raises(StoreUnavailable, match=r"did not answer within 1 s|can't be reached"):
                    await put(store, retired("v", 1), expected=made.revision)
            finally:
                server.send(signal.SIGCONT)
            stored = (await store.read_version("v")).stored
            assert stored.entry in (entry("v", 1), retired("v", 1))
            assert isinstance(await put(store, entry("v", 1), expected=stored.revision), Committed)

    async def test_a_pause_is_waited_for(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            await store.now_ms()
            server.client.client_pause(500)
            assert isinstance(await put(store, entry("v", 1)), Committed)

    async def test_an_endless_script_is_named(self, start_redis: Start) -> None:
        server = start_redis("--lua-time-limit", "50")
        async with opened(server.address) as store:
            await store.now_ms()
            busy = threading.Thread(target=_endless, args=(server,))
            busy.start()
            await in_thread(lambda: until(lambda: _is_busy(server), "the script"))
            with pytest.raises(StoreUnavailable, match=r"\(BUSY\).*SCRIPT KILL"):
                await put(store, entry("v", 1))
            await in_thread(server.client.script_kill)
            busy.join()
            assert isinstance(await put(store, entry("v", 1)), Committed)


def _endless(server: RedisServer) -> None:
    import redis

    with redis.Redis(port=server.port, socket_timeout=30) as client, pytest.raises(redis.ResponseError):
        client.eval("while true do end", 0)


def _is_busy(server: RedisServer) -> bool:
    import redis

    try:
        server.client.get("x")
    except redis.RedisError as error:
        return "BUSY" in str(error)
    return False


class TestRefusals:
    async def test_lost_scripts_are_sent_again(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            made = await put(store, entry("v", 1))
            server.client.script_flush()
            assert isinstance(await put(store, retired("v", 1), expected=made.revision), Committed)

    async def test_out_of_memory_refuses_what_grows_only(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            made = await put(store, published("v", "t0", "t1"))
            known = await put_worker(store, "w", deadline_ms=10_000)
            sequence = await store.next_sequence()
            server.client.config_set("maxmemory", "100kb")
            with pytest.raises(StoreUnavailable, match=r"out of memory \(maxmemory\).*nothing was stored"):
                await put(store, entry("new", 2))
            with pytest.raises(StoreUnavailable, match="out of memory"):
                await put_worker(store, "another")
            with pytest.raises(StoreUnavailable, match="out of memory"):
                await put(store, published("v", "t0", "t1", "t2"), expected=made.revision)
            # What exists is renewed, released, retired and forgotten.
            assert await store.now_ms() > 0
            known = await put_worker(store, "w", expected=known.revision, deadline_ms=20_000, wake_at_ms=7)
            assert await store.due_workers(10, 10) == ["w"]
            made = await put(store, published("v", "t0"), expected=made.revision, wake_at_ms=9)
            await store.rearm("v", expected_revision=made.revision, wake_at_ms=11)
            made = await put(store, retired("v", 1), expected=made.revision, wake_at_ms=13)
            assert await store.due_versions(13, 10) == ["v"]
            assert isinstance(await put(store, None, uid="v", expected=made.revision), Committed)
            server.client.config_set("maxmemory", "0")
            assert await store.next_sequence() > sequence
            assert isinstance(await put(store, entry("new", 2)), Committed)
            assert (await store.read_workers(["w"])).workers["w"].record.deadline_ms == 20_000

    async def test_a_replica_is_not_written_to(self, start_redis: Start) -> None:
        primary, replica = start_redis(), start_redis()
        replica.client.replicaof("127.0.0.1", primary.port)
        async with opened(replica.address) as store:
            with pytest.raises(StoreUnavailable, match="read-only replica: is the primary elsewhere"):
                await store.now_ms()

    async def test_passwords(self, start_redis: Start, tmp_path: Path) -> None:
        server = start_redis("--requirepass", "s3cret")
        (tmp_path / "password").write_text("s3cret\n")
        place = f"127.0.0.1:{server.port}/0"
        for address in (f"redis://{place}", f"redis://:wr0ng@{place}"):
            async with opened(address) as store:
                with pytest.raises(StoreUnavailable) as raised:
                    await store.now_ms()
                assert "wr0ng" not in str(raised.value)
                assert "refuses" in str(raised.value) or "password" in str(raised.value)
        for address in (f"redis://:s3cret@{place}", f"redis://{place}?password_file={tmp_path / 'password'}"):
            async with opened(address) as store:
                assert await store.now_ms() > 0

    async def test_a_cluster_is_not_taken_for_one_redis(self, start_redis: Start) -> None:
        server = start_redis("--cluster-enabled", "yes")
        async with opened(server.address) as store:
            with pytest.raises(StoreUnavailable, match=r"cluster"):
                await store.now_ms()

    async def test_other_peoples_data_under_its_keys_is_named(self, start_redis: Start) -> None:
        server = start_redis()
        server.client.set("{mx-rl}:meta", "something else")
        async with opened(server.address) as store:
            with pytest.raises(StoreUnavailable, match="another prefix"):
                await store.now_ms()

    async def test_too_few_replicas_to_write(self, start_redis: Start) -> None:
        server = start_redis("--min-replicas-to-write", "1")
        async with opened(server.address) as store:
            with pytest.raises(StoreUnavailable, match="fewer replicas than it needs"):
                await store.now_ms()


class TestLoading:
    async def test_it_is_waited_for_or_said(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            for n in range(100):
                await put(store, entry(f"v{n}", n))
            server.client.save()
            await in_thread(server.kill)
            delays = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
            slow = RedisServer(server.folder, *delays)
            slow.port, slow.client = server.port, server.client
            slow.start_unready()
            try:
                await in_thread(lambda: until(lambda: _is_loading(slow), "the loading"))
                with pytest.raises(StoreUnavailable, match="is loading its data set"):
                    await store.read_version("v1")
            finally:
                slow.kill()


def _is_loading(server: RedisServer) -> bool:
    import redis

    try:
        server.client.get("x")
    except redis.BusyLoadingError:
        return True
    except redis.RedisError:
        return False
    return False


class TestFailover:
    async def test_a_promoted_replica_is_found_and_nothing_confirmed_is_lost(
        self, start_redis: Start
    ) -> None:
        primary, replica = start_redis(), start_redis()
        replica.client.replicaof("127.0.0.1", primary.port)
        link_up = lambda: replica.client.info("replication").get("master_link_status") == "up"  # noqa: E731
        await in_thread(lambda: until(link_up, "the replication"))
        address = f"redis://127.0.0.1:{primary.port},127.0.0.1:{replica.port}/0?replicas=1"
        async with opened(address) as store, store.changes() as changes:
            sequence = await store.next_sequence()
            made = await put(store, entry("v", sequence), wake_at_ms=5)
            await put_worker(store, "w")
            store_id = store.store_id
            assert (await anext(changes)).uid == "v"

            await in_thread(primary.kill)
            with pytest.raises(StoreUnavailable, match=r"no primary among its nodes|can't be reached"):
                await put(store, retired("v", sequence), expected=made.revision)
            replica.client.replicaof("NO", "ONE")
            with pytest.raises(StoreUnavailable, match="0 of 1 replicas have confirmed"):
                await put(store, retired("v", sequence), expected=made.revision)

        async with opened(address.replace("replicas=1", "replicas=0")) as store, store.changes() as changes:
            await store.now_ms()
            assert store.store_id == store_id
            assert await store.next_sequence() > sequence
            stored = (await store.read_version("v")).stored
            assert stored.entry == retired("v", sequence)  # it was made, and said to be uncertain
            assert stored.revision > made.revision
            assert (await store.read_workers(["w"])).workers["w"].record == worker("w")
            await put(store, entry("u", sequence + 1))
            with anyio.fail_after(5):
                assert (await anext(changes)).uid == "u"

    async def test_a_replica_that_is_still_empty_is_not_believed(
        self, start_redis: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a primary that was demoted and waits for its data."""
        monkeypatch.setattr(link, "PATIENCE_S", 0.1)
        demoted = start_redis()
        demoted.client.replicaof("127.0.0.1", 1)
        async with opened(demoted.address) as store:
            for ask in (
                lambda: store.read_version("v"),
                lambda: store.read_version_and_workers("v", ["w"]),
                lambda: store.read_workers(["w"]),
                lambda: put(store, entry("v", 1), expected=7),
                lambda: store.read_key("k"),
                lambda: store.active_versions("model"),
                lambda: store.list_versions(None, after=None, limit=10),
                lambda: store.due_versions(10**13, 10),
                lambda: store.next_wake_ms(),
                lambda: store.purge_keys(10**13),
            ):
                with pytest.raises(StoreUnavailable, match="replica"):
                    await ask()

    async def test_an_open_store_moves_on_by_itself(self, start_redis: Start) -> None:
        primary, replica = start_redis(), start_redis()
        replica.client.replicaof("127.0.0.1", primary.port)
        link_up = lambda: replica.client.info("replication").get("master_link_status") == "up"  # noqa: E731
        await in_thread(lambda: until(link_up, "the replication"))
        address = f"redis://127.0.0.1:{primary.port},127.0.0.1:{replica.port}/0"
        async with opened(address) as store, store.changes() as changes:
            made = await put(store, entry("v", 1))
            assert await anext(changes) == Change("v", "model")
            has = lambda: replica.client.hget("{mx-rl}:version:v", "revision")  # noqa: E731
            await in_thread(lambda: until(has, "the replication of the version"))
            replica.client.replicaof("NO", "ONE")
            primary.client.replicaof("127.0.0.1", replica.port)  # demoted, and alive: READONLY
            made = await put(store, retired("v", 1), expected=made.revision)
            assert isinstance(made, Committed)
            assert int(has()) == made.revision
            with anyio.fail_after(5):
                assert await anext(changes) in (Resync(), Change("v", "model"))


class TestLostReplies:
    async def test_a_commit_whose_reply_was_lost_is_made_once_and_known(self, start_redis: Start) -> None:
        server = start_redis()
        async with Proxy.to(server.port) as proxy, opened(f"redis://127.0.0.1:{proxy.port}/0") as store:
            await store.now_ms()
            made = await put(store, entry("v", 1))
            for n, new in enumerate([retired("v", 1), entry("v", 1)] * 3):
                proxy.lose_replies = 1
                before, made = made, await put(store, new, expected=made.revision, wake_at_ms=n)
                assert proxy.lose_replies == 0
                assert isinstance(made, Committed)
                stored = (await store.read_version("v")).stored
                assert (stored.entry, stored.revision) == (new, made.revision)
                assert stored.revision > before.revision
            proxy.lose_replies = 1
            gone = await put(store, None, uid="v", expected=made.revision)
            assert gone.revision > made.revision
            proxy.lose_replies = 1
            assert isinstance(await put(store, entry("w", 1)), Committed)
            proxy.lose_replies = 1
            assert isinstance(await put_worker(store, "w"), Committed)
            proxy.lose_replies = 1
            assert await put(store, entry("w", 1)) is Rejected.CONFLICT

    @pytest.mark.parametrize(("others", "known"), [(3, True), (REMEMBERED - 1, True), (REMEMBERED, False)])
    async def test_others_commit_before_it_can_ask_again(
        self, start_redis: Start, others: int, known: bool
    ) -> None:
        server = start_redis()
        async with (
            Proxy.to(server.port) as proxy,
            opened(server.address) as other,
            opened(f"redis://127.0.0.1:{proxy.port}/0") as store,
        ):
            first = await put(other, entry("v", 1))
            await store.now_ms()
            proxy.before_losing = asyncio.Event()
            proxy.lose_replies = 1
            outcome: list[object] = []

            async def commit() -> None:
                try:
                    outcome.append(await put(store, retired("v", 1), expected=first.revision))
                except StoreUnavailable as error:
                    outcome.append(str(error))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(commit)
                stored = (await other.read_version("v")).stored
                while stored.revision == first.revision:
                    await anyio.sleep(0.001)
                    stored = (await other.read_version("v")).stored
                mine = stored.revision
                for _ in range(others):
                    result = await put(other, entry("v", 1), expected=stored.revision)
                    stored = (await other.read_version("v")).stored
                    assert result.revision == stored.revision
                proxy.before_losing.set()
            if known:
                assert outcome == [Committed(mine)]
            else:
                assert "to know whether it was made" in str(outcome[0])

    async def test_one_that_was_not_made_is_a_conflict(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store, opened(server.address) as other:
            first = await put(other, entry("v", 1))
            for _ in range(REMEMBERED + 4):
                await put(other, entry("v", 1), expected=(await other.read_version("v")).stored.revision)
            assert await put(store, retired("v", 1), expected=first.revision) is Rejected.CONFLICT

    async def test_a_cut_in_a_burst_loses_and_doubles_nothing(
        self, start_redis: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "PATIENCE_S", 20.0)
        server = start_redis()
        async with Proxy.to(server.port) as proxy, opened(f"redis://127.0.0.1:{proxy.port}/0") as store:
            await store.now_ms()
            done = unknown = 0

            async def increment() -> None:
                nonlocal done, unknown
                while True:
                    stored = (await store.read_version("v")).stored
                    ready_at_ms = stored.entry.ready_at_ms
                    more = type(stored.entry)(stored.entry.record, ready_at_ms + 1, "")
                    try:
                        result = await put(store, more, expected=stored.revision)
                    except StoreUnavailable:
                        unknown += 1
                        return
                    if isinstance(result, Committed):
                        done += 1
                        return

            await put(store, entry("v", 1))
            async with anyio.create_task_group() as tasks:
                for _ in range(60):
                    tasks.start_soon(increment)
                for _ in range(10):
                    await anyio.sleep(0.02)
                    proxy.cut()
            assert done + unknown == 60
            assert done > 30
            assert done <= (await store.read_version("v")).stored.entry.ready_at_ms <= 60


class TestSharing:
    async def test_a_burst_is_sent_together_over_a_few_connections(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store:
            await store.now_ms()
            received = server.client.info("stats")["total_connections_received"]
            async with anyio.create_task_group() as tasks:
                for n in range(500):
                    tasks.start_soon(put_worker, store, f"w{n}")
            assert len((await store.list_workers(None)).workers) == 500
            assert server.client.info("stats")["total_connections_received"] - received <= node.CONNECTIONS

    async def test_whoever_gives_up_takes_no_reply_of_another(self, start_redis: Start) -> None:
        server = start_redis()
        rng = random.Random(5)
        async with opened(server.address) as store:
            for n in range(20):
                await put(store, entry(f"v{n}", n))
            answered = 0

            async def read(n: int) -> None:
                nonlocal answered
                with anyio.move_on_after(rng.random() * 0.02), suppress(StoreUnavailable):
                    assert (await store.read_version(f"v{n % 20}")).stored.entry == entry(
                        f"v{n % 20}", n % 20
                    )
                    answered += 1

            for _ in range(15):
                async with anyio.create_task_group() as tasks:
                    for n in range(60):
                        tasks.start_soon(read, n)
            assert 0 < answered < 900
            assert (await store.read_version("v7")).stored.entry == entry("v7", 7)


class TestTls:
    async def test_both_sides_prove_who_they_are(
        self, start_redis: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node, "CONNECT_S", 10.0)
        monkeypatch.setattr(changes_module, "CONNECT_S", 10.0)
        trustme = pytest.importorskip("trustme")
        authority, stranger = trustme.CA(), trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca"))
        stranger.cert_pem.write_to_path(str(tmp_path / "strangers"))
        for name in ("server", "client"):
            made = authority.issue_cert("127.0.0.1")
            made.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
            made.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.crt"))
        port = free_port()
        files = {"ca-cert": "ca", "cert": "server.crt", "key": "server.key"}
        options = [
            word for name, file in files.items() for word in (f"--tls-{name}-file", str(tmp_path / file))
        ]
        start_redis("--tls-port", str(port), *options)
        place = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}"
        mine = f"ssl_certfile={tmp_path}/client.crt&ssl_keyfile={tmp_path}/client.key"
        async with opened(f"{place}/ca&{mine}") as store, store.changes() as changes:
            await put(store, entry("v", 1))
            assert (await anext(changes)).uid == "v"
        for address in (f"{place}/strangers&{mine}", f"{place}/ca"):
            async with opened(address) as store:
                with pytest.raises(StoreUnavailable, match=r"can't be reached|broke the connection"):
                    await store.now_ms()  # a stranger's certificate; none of one's own


class TestEviction:
    async def test_a_store_that_may_evict_is_warned_of(
        self, start_redis: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        for policy, warned in (("noeviction", False), ("allkeys-lru", True)):
            server = start_redis("--maxmemory", "100mb", "--maxmemory-policy", policy)
            async with opened(server.address) as store, store.changes():
                assert ("may evict" in caplog.text) is warned


class TestChanges:
    async def test_a_subscription_that_is_cut_begins_anew_with_a_resync(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store, store.changes() as changes:
            server.client.client_kill_filter(_type="pubsub")
            await put(store, entry("v", 1))
            with anyio.fail_after(5):
                assert await anext(changes) == Resync()

    async def test_what_no_message_told_of_is_noticed(self, start_redis: Start) -> None:
        server = start_redis()
        async with opened(server.address) as store, store.changes() as changes:
            await put(store, entry("v", 1))
            assert (await anext(changes)).uid == "v"
            server.client.incrby("{mx-rl}:revision", 1)  # a commit whose message was lost
            with anyio.fail_after(5):
                assert await anext(changes) == Resync()
            server.client.incrby("{mx-rl}:revision", 1)
            await put(store, entry("w", 2))  # the next message shows the gap
            with anyio.fail_after(5):
                assert await anext(changes) == Resync()

    async def test_one_who_subscribes_while_the_store_is_away_hears_of_it_later(
        self, start_redis: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(changes_module, "SUBSCRIBE_S", 0.2)
        server = start_redis()
        await in_thread(server.kill)
        async with opened(server.address) as store, store.changes() as changes:
            await in_thread(server.start)
            with anyio.fail_after(10):
                assert await anext(changes) == Resync()
            await put(store, entry("v", 1))
            with anyio.fail_after(5):
                assert (await anext(changes)).uid == "v"
