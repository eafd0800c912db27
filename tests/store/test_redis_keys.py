"""Nothing is for ever: what a Redis holds after many versions, and what Redis itself lets go of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import pytest

pytest.importorskip("redis", reason="the extra 'redis' is not installed")

from modelexpress_rl.server import commands
from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import KeyHolder
from modelexpress_rl.server.stores.redis import RedisStore
from modelexpress_rl.server.stores.redis.space import GRACE_MS, KEPT_MS, OTHERS_LATER_MS
from statemachines.ids import lease_id_of
from statemachines.version import VersionState
from statemachines.version_records import Publication
from statemachines.worker import WorkerRole
from tests.store.records import entry, retired, spec
from tests.store.redis_server import RedisServer
from tests.store.test_contract import put, put_worker
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio

Start = Callable[..., RedisServer]
SETTINGS = Settings(drain_deadline_ms=1_000, retention_ms=10_000)


@pytest.fixture
def server(start_redis: Start) -> RedisServer:
    return start_redis()


@pytest.fixture
async def store(server: RedisServer, clock: VirtualClock) -> AsyncIterator[RedisStore]:
    opened = RedisStore(server.address, clock)
    yield opened
    await opened.close()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def lifetimes(server: RedisServer) -> dict[str, int]:
    keys = sorted(key.decode() for key in server.client.scan_iter(count=1_000))
    return {key: server.client.pttl(key) for key in keys}


async def test_a_days_worth_of_versions_leaves_a_bounded_number_of_keys(
    server: RedisServer, store: RedisStore, clock: VirtualClock
) -> None:
    """A version each five minutes: made, published, read, released, retired, forgotten."""
    most = 0
    async with Registry.running(store, SETTINGS) as registry:
        expiry = Expiry(registry, clock)

        async def one_version(n: int) -> None:
            uid = f"step-{n}"
            await registry.create(uid, spec(uid))
            for slot in ("s0", "s1"):
                shard = Publication(slot, "t", 1, 1, "d", "h:1")
                await registry.command(uid, commands.publish(shard))
            await registry.command(uid, commands.lease_for("g", 5_000))
            if n % 3:
                await registry.command(uid, commands.give_back(lease_id_of(uid, "g"), "g"))
            await registry.command(uid, commands.release(1_000, 10_000))
            if n % 3 == 1:
                for slot in ("s0", "s1"):
                    await registry.command(uid, commands.withdraw(slot, "t"))

        for n in range(0, 288, 24):
            await registry.workers.register("t", WorkerRole.TRAINER, "model", 30_000)
            await registry.workers.register("g", WorkerRole.GENERATOR, "model", 30_000)
            await store.claim_key(f"orphan {n}", KeyHolder(f"never made {n}", spec(f"orphan {n}")))
            async with anyio.create_task_group() as tasks:
                for one in range(n, n + 24):
                    tasks.start_soon(one_version, one)
            clock.advance(7_200_000)
            await expiry.run_once()
            await expiry.run_once()
            most = max(most, server.client.dbsize())
        for _ in range(20):
            clock.advance(600_000)
            await expiry.run_once()
    assert await store.list_versions(None, after=None, limit=10) == []
    found = lifetimes(server)
    tombstones = {key for key in found if "version:" in key or "worker:" in key}
    assert max(found[key] for key in tombstones) <= 60_000
    left = found.keys() - tombstones
    assert left <= {f"{{mx-rl}}:{name}" for name in ("meta", "sweeper", "revision", "worker-revision")}
    assert most < 10 + 288 + 24  # the tombstones and claims of this minute, which was a day


async def test_every_key_has_a_lifetime_also_after_a_crash_between_two_steps(
    server: RedisServer, store: RedisStore, clock: VirtualClock
) -> None:
    now_ms = clock.now_ms()
    await store.now_ms()
    await store.next_sequence()
    await store.claim_key("k", KeyHolder("never made", spec("k")))
    await put(store, entry("staging", 1), wake_at_ms=now_ms + 5)
    ends = retired("over", 2).record
    over = type(retired("over", 2))(type(ends)(*_with_end(ends, now_ms + 50_000)))
    await put(store, over, wake_at_ms=now_ms + 50_000)
    await put_worker(store, "w", wake_at_ms=now_ms + 70_000)
    gone = await put(store, entry("gone", 3))
    await put(store, None, uid="gone", expected=gone.revision)
    found = lifetimes(server)
    assert all(0 < left_ms <= KEPT_MS for left_ms in found.values()), found
    assert abs(found["{mx-rl}:version:over"] - 50_000 - GRACE_MS) < 5_000
    assert abs(found["{mx-rl}:worker:w"] - 70_000 - GRACE_MS) < 5_000
    assert found["{mx-rl}:version:gone"] <= 60_000
    assert found["{mx-rl}:version:staging"] > KEPT_MS - 60_000


def _with_end(record: object, forget_at_ms: int) -> tuple[object, ...]:
    phase = type(record.phase)(forget_at_ms)
    return record.uid, record.spec, record.created_at_ms, record.sequence, phase


async def test_what_is_in_use_is_kept_as_long_as_a_server_runs(
    server: RedisServer, store: RedisStore, clock: VirtualClock
) -> None:
    await store.claim_key("k", KeyHolder("v", spec("k")))
    await put(store, entry("v", 1, key="k"))
    await put(store, retired("over", 2))
    await put_worker(store, "w")
    for key in lifetimes(server):
        server.client.pexpire(key, 100_000)
    clock.advance(86_400_000)
    assert await store.purge_keys(clock.now_ms()) == 0
    found = lifetimes(server)
    kept = {key for key, left_ms in found.items() if left_ms > 100_000}
    named = ("meta", "versions", "active", "revision", "workers", "worker-revision", "claims")
    assert kept == {f"{{mx-rl}}:{name}" for name in (*named, "version:v", "key:k")}
    for key in found:
        server.client.pexpire(key, 100_000)
    await store.purge_keys(clock.now_ms())  # not each time
    assert max(lifetimes(server).values()) <= 100_000


async def test_what_redis_let_go_of_leaves_the_indexes(server: RedisServer, store: RedisStore) -> None:
    for n in range(5):
        await put(store, entry(f"v{n}", n), wake_at_ms=n)
        await put_worker(store, f"w{n}", wake_at_ms=n)
    for key in ("version:v0", "version:v1", "version:v3", "worker:w0", "worker:w3"):
        server.client.delete(f"{{mx-rl}}:{key}")
    assert await store.due_versions(2, 10) == ["v2"]
    assert await store.due_workers(2, 10) == ["w1", "w2"]
    assert await store.next_wake_ms() == 1
    page = await store.list_versions(None, after=None, limit=2)  # full, although some are gone
    assert [one.entry.record.uid for one in page] == ["v2", "v4"]
    assert set((await store.list_workers("model")).workers) == {"w1", "w2", "w4"}
    assert await store.active_versions("model") == ["v2", "v4"]
    assert await store.list_versions(None, after=None, limit=10) == page
    assert await store.due_versions(10, 10) == ["v2", "v4"]
    sizes = [server.client.zcard(f"{{mx-rl}}:{name}") for name in ("versions", "active", "versions-due")]
    assert sizes == [2, 2, 2]
    assert server.client.zcard("{mx-rl}:workers") == server.client.zcard("{mx-rl}:workers-due") == 3


async def test_an_erasure_that_could_not_free_its_key_is_made_up_for(
    server: RedisServer, store: RedisStore, clock: VirtualClock
) -> None:
    await store.claim_key("k", KeyHolder("v", spec("k")))
    await put(store, entry("v", 1, key="k"))
    server.client.delete("{mx-rl}:version:v")  # as where the server died before the second step
    clock.advance(1_000)
    assert await store.purge_keys(clock.now_ms()) == 1
    assert await store.read_key("k") is None


async def test_one_server_sweeps_and_the_others_come_later(server: RedisServer, clock: VirtualClock) -> None:
    first, second = (RedisStore(server.address, clock) for _ in range(2))
    await first.now_ms()
    await second.now_ms()
    due_ms = clock.now_ms()
    await put(second, entry("v", 1), wake_at_ms=due_ms)
    assert await first.due_versions(due_ms, 10) == ["v"]
    assert await first.next_wake_ms() == due_ms
    assert await second.due_versions(due_ms, 10) == []
    assert await second.next_wake_ms() == due_ms + OTHERS_LATER_MS
    assert await second.due_versions(due_ms + OTHERS_LATER_MS, 10) == ["v"]
    await first.close()  # and resigns
    await second.now_ms()
    assert await second.due_versions(due_ms, 10) == ["v"]
    await second.close()


async def test_a_restarted_registry_finds_everything(server: RedisServer, clock: VirtualClock) -> None:
    for _ in range(2):
        store = RedisStore(server.address, clock)
        async with Registry.running(store, SETTINGS) as registry:
            await registry.workers.register("t", WorkerRole.TRAINER, "model", 60_000)
            await registry.create("v", spec("k"))
            for slot in ("s0", "s1"):
                await registry.command("v", commands.publish(Publication(slot, "t", 1, 1, "d", "h:1")))
            assert (await registry.view("v")).record.state is VersionState.READY
        assert await store.active_versions("model") == ["v"]
        await store.close()
