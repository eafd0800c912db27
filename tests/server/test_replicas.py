"""Several servers on one Redis: each may be asked, watched and killed; what is due is done once."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import grpc
import grpc.aio
import pytest

pytest.importorskip("redis", reason="the extra 'redis' is not installed")

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.server import commands
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores import open_store
from modelexpress_rl.server.stores.port import VersionEntry
from statemachines.version import VersionState
from statemachines.version_records import Publication
from statemachines.worker import WorkerRole
from tests.server.api import READY, STAGING, Api, eventually, refused
from tests.server.process import failed, serve
from tests.store.records import spec
from tests.store.redis_server import RedisServer, free_port

pytestmark = pytest.mark.anyio

Start = Callable[..., RedisServer]


@asynccontextmanager
async def replicas(
    address: str, count: int, settings: Settings | None = None
) -> AsyncIterator[list[Running]]:
    """Servers in this process, each with its own way to the store."""
    async with AsyncExitStack() as stack:
        running: list[Running] = []
        for _ in range(count):
            store = open_store(address)
            stack.push_async_callback(store.close)
            running.append(await stack.enter_async_context(serving(store, settings=settings)))
        yield running


@asynccontextmanager
async def api_of(address: str) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Api(channel)


async def watch(api: Api, uid: str, **more: object) -> AsyncIterator[v1.VersionStatus]:
    async for response in api.control.WatchVersion(v1.WatchVersionRequest(version_id=uid, **more)):
        if response.HasField("status"):
            yield response.status


class TestWatches:
    async def test_a_watch_at_one_hears_of_what_others_commit(self, start_redis: Start) -> None:
        async with (
            replicas(start_redis().address, 3) as running,
            api_of(running[0].address) as one,
            api_of(running[1].address) as two,
            api_of(running[2].address) as three,
        ):
            await two.create()
            statuses = watch(one, "v")
            assert (await anext(statuses)).state == v1.VERSION_STATE_STAGING
            for slot, worker_id, api in (("s0", "t0", two), ("s1", "t1", three)):
                await api.register(worker_id)
                await api.publish(slot, worker_id)
            with anyio.fail_after(5):
                while (status := await anext(statuses)).state != v1.VERSION_STATE_READY:
                    assert status.covered_slots == 1
            await three.delete()
            with anyio.fail_after(5):
                assert (await anext(statuses)).state == v1.VERSION_STATE_RELEASING
            revisions = {(await api.status()).revision for api in (one, two, three)}
            assert len(revisions) == 1

    async def test_a_flush_is_told_within_seconds_and_everything_can_be_made_again(
        self, start_redis: Start
    ) -> None:
        redis = start_redis()
        async with replicas(redis.address, 2) as running, api_of(running[0].address) as one:
            await one.make_ready()
            before = (await one.control.GetServerInfo(v1.GetServerInfoRequest())).store_id
            first = await one.status()
            statuses = watch(one, "v")
            assert (await anext(statuses)).state == v1.VERSION_STATE_READY
            await anyio.to_thread.run_sync(redis.client.flushall)
            with anyio.fail_after(5):
                assert (await anext(statuses)).state == v1.VERSION_STATE_FORGOTTEN
            await refused(one.get(), grpc.StatusCode.NOT_FOUND, "version v is not known")
            await refused(one.lease("g"), grpc.StatusCode.NOT_FOUND)
            async with api_of(running[1].address) as two:
                await two.make_ready()  # its trainers register and publish again
                assert (await one.get()).state == READY
                again = await two.status()
                assert again.sequence > first.sequence
                assert again.revision > first.revision
            infos = [await one.control.GetServerInfo(v1.GetServerInfoRequest()) for _ in range(2)]
            assert infos[1].store_id not in ("", before)

    async def test_an_outage_ends_no_watch(self, start_redis: Start) -> None:
        redis = start_redis("--appendonly", "yes", "--appendfsync", "always")
        async with replicas(redis.address, 1) as running, api_of(running[0].address) as api:
            await api.make_ready()
            statuses = watch(api, "v")
            assert (await anext(statuses)).state == v1.VERSION_STATE_READY
            await anyio.to_thread.run_sync(redis.kill)
            await anyio.to_thread.run_sync(redis.start)
            await api.delete()
            with anyio.fail_after(10):
                assert (await anext(statuses)).state == v1.VERSION_STATE_RELEASING


class TestTrouble:
    async def test_whoever_waits_for_little_is_told_what_is_wrong(self, start_redis: Start) -> None:
        """Also a command of a version, which waits in a lane behind others that gave up."""
        store = start_redis()
        async with replicas(store.address, 1) as running, api_of(running[0].address) as api:
            await api.create()
            calls = (
                lambda: api.control.GetServerInfo(v1.GetServerInfoRequest(), timeout=1.5),
                lambda: api.control.ListWorkers(v1.ListWorkersRequest(), timeout=1.5),
                lambda: api.control.EvictVersion(v1.EvictVersionRequest(version_id="v"), timeout=1.5),
                lambda: api.control.EvictVersion(v1.EvictVersionRequest(version_id="v"), timeout=2.5),
            )
            store.client.replicaof("127.0.0.1", free_port())
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError, match="read-only replica") as refusal:
                    await call()
                assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            store.client.replicaof("NO", "ONE")
            store.send(signal.SIGSTOP)
            try:
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError, match="did not answer within") as refusal:
                        await call()
                    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            finally:
                store.send(signal.SIGCONT)


class TestExpiry:
    async def test_what_is_due_is_committed_once_whoever_does_it(self, start_redis: Start) -> None:
        settings = Settings(drain_deadline_ms=100, retention_ms=400)
        async with replicas(start_redis().address, 3, settings) as running:
            registry = running[0].registry
            for n in range(30):
                await registry.create(f"v{n}", spec(f"k{n}", slots=("s0",)))
            await registry.workers.register("t", WorkerRole.TRAINER, "model", 2_000)
            for n in range(30):
                shard = Publication("s0", "t", 1, 1, "d", "h:1")
                await running[n % 3].registry.command(f"v{n}", commands.publish(shard))
            counts = [one.registry.lanes.counts for one in running]
            assert sum(count.commits for count in counts) == 30

            async def degraded() -> bool:
                entries = await stored_entries(running[0])
                return all(one.record.state is VersionState.DEGRADED for one in entries)

            await eventually(degraded)
            assert sum(count.commits for count in counts) == 60
            assert sum(count.conflicts for count in counts) <= 10
            # One server did nearly all of it, and the others had nearly nothing to do.
            assert max(count.commits for count in counts) >= 10 + 25

            for n in range(30):
                await running[n % 3].registry.command(f"v{n}", commands.release(100, 400))

            async def forgotten() -> bool:
                return not await stored_entries(running[0])

            await eventually(forgotten)
            assert sum(count.commits for count in counts) <= 60 + 60

    async def test_another_takes_over_where_the_sweeper_is_killed(self, start_redis: Start) -> None:
        redis = start_redis()
        async with AsyncExitStack() as stack:
            options = ("--store", redis.address, "--retention", "200ms", "--drain-deadline", "100ms")
            first = await stack.enter_async_context(serve(*options))
            second = await stack.enter_async_context(serve(*options))
            one = await stack.enter_async_context(api_of(first.address))
            two = await stack.enter_async_context(api_of(second.address))
            await one.create()
            await first.end(signal.SIGKILL)
            await two.delete()

            async def forgotten() -> bool:
                return not redis.client.hexists("{mx-rl}:version:v", "revision")

            await eventually(forgotten)


async def stored_entries(running: Running) -> list[VersionEntry]:
    """What is committed, not what a read would settle."""
    stored = await running.registry.store.list_versions(None, after=None, limit=100)
    return [one.entry for one in stored]


class TestProcesses:
    async def test_one_dies_and_the_others_know_everything(self, start_redis: Start) -> None:
        redis = start_redis()
        async with AsyncExitStack() as stack:
            servers = [await stack.enter_async_context(serve("--store", redis.address)) for _ in range(3)]
            apis = [await stack.enter_async_context(api_of(one.address)) for one in servers]
            await apis[0].make_ready()
            revision = (await apis[0].status()).revision
            statuses = watch(apis[1], "v", from_revision=revision)
            await servers[0].end(signal.SIGKILL)
            assert (await apis[1].get()).state == READY
            await apis[2].delete()
            with anyio.fail_after(5):
                assert (await anext(statuses)).state == v1.VERSION_STATE_RELEASING
            assert await servers[1].end() == 0
            assert await servers[2].end() == 0

    async def test_it_starts_before_its_store_and_says_what_is_missing(self, start_redis: Start) -> None:
        redis = start_redis()
        await anyio.to_thread.run_sync(redis.kill)
        async with serve("--store", redis.address) as server, api_of(server.address) as api:
            await refused(
                api.get(),
                grpc.StatusCode.UNAVAILABLE,
                f"redis://127.0.0.1:{redis.port}/0",
                "can't be reached",
            )
            await anyio.to_thread.run_sync(redis.start)
            assert (await api.create()).state == STAGING

    async def test_a_password_is_not_told(self, start_redis: Start) -> None:
        redis = start_redis("--requirepass", "s3cret")
        store = f"redis://:s3cret@127.0.0.1:{redis.port}/0"
        async with serve("--store", store) as server:
            async with api_of(server.address) as api:
                await api.create()
            server.process.send_signal(signal.SIGTERM)
            out, err = await server.process.communicate()
            assert b"s3cret" not in out + err
        status, out, err = await failed("--store", f"{store}?nonsense=1")
        assert (status, "no option 'nonsense'" in err) == (2, True)
        assert "s3cret" not in out + err
