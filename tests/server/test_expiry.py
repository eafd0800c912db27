"""What time does by itself: lapses, drains, retirement, forgetting; and nothing is kept for ever."""

from __future__ import annotations

import anyio
import grpc
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.server import commands
from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import KeyHolder
from statemachines.version import VersionState
from statemachines.version_records import Publication
from statemachines.worker import WorkerRole
from tests.server.api import GENERATOR, READY, RELEASING, STAGING, Api, Server, eventually, refused
from tests.store.faulty import FaultyStore
from tests.store.records import spec
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio


async def stored_state(server: Server, uid: str = "v") -> VersionState | None:
    """What is committed, not what a read would settle."""
    stored = (await server.running.registry.store.read_version(uid)).stored
    return stored.entry.record.state if stored else None


class TestLiveness:
    async def test_ready_ends_with_the_last_publisher_of_a_slot(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        await api.register("replica", ttl_s=60)
        await api.publish("s0", "replica")
        await server.pass_time(10)
        assert await stored_state(server) is VersionState.DEGRADED
        assert (await api.get()).state == STAGING
        await api.publish("s1", "replica")
        assert (await api.get()).state == READY

    async def test_reads_are_true_before_anything_was_processed(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        server.clock.advance(10_000)
        assert (await api.get()).state == STAGING
        assert await api.shards() == []

    async def test_renewed_registrations_only_move_the_wake(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        revision = (await api.status()).revision
        for _ in range(5):
            await server.pass_time(5)
            await api.register("t0", ttl_s=10)
            await api.register("t1", ttl_s=10)
        assert (await api.status()).revision == revision
        store = server.running.registry.store
        assert await store.due_versions(server.clock.now_ms(), 10) == []
        await server.pass_time(10)
        assert await stored_state(server) is VersionState.DEGRADED


class TestRelease:
    async def test_a_released_version_of_dead_workers_ends_by_itself(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        await api.register("g", GENERATOR, ttl_s=60)
        await api.lease("g", ttl_s=30)
        await api.delete()
        await server.pass_time(10)
        assert await stored_state(server) is VersionState.RELEASING
        await server.pass_time(20)
        assert await stored_state(server) is VersionState.RETIRED
        assert (await api.get()).state == RELEASING

    async def test_a_publisher_that_never_withdraws_is_given_up(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=86_400)
        await api.delete()
        await server.pass_time(300 + 3_599)
        assert await stored_state(server) is VersionState.RELEASING
        await server.pass_time(1)
        assert await stored_state(server) is VersionState.RETIRED
        await server.pass_time(3_600)
        assert await stored_state(server) is None

    async def test_forgetting_takes_all_of_it(self, server: Server, api: Api) -> None:
        await api.create(key="k")
        await api.delete()
        await server.pass_time(3_599)
        assert (await api.create(key="k")).state == RELEASING
        await server.pass_time(1)
        await refused(api.get(), grpc.StatusCode.NOT_FOUND, "forgotten")
        made = await api.create(key="k", slots=("other",))
        assert made.state == STAGING
        assert (await api.create("w", key="l")).uid == "w"

    async def test_a_forgotten_version_is_gone_before_anybody_erased_it(
        self, server: Server, api: Api
    ) -> None:
        await api.create()
        await api.delete()
        server.clock.advance(3_600_000)
        await refused(api.get(), grpc.StatusCode.NOT_FOUND)
        assert not (await api.control.ListVersions(v1.ListVersionsRequest())).versions

    async def test_its_uid_and_key_are_free_then(self, server: Server, api: Api) -> None:
        first = await api.create(key="k")
        await api.delete()
        server.clock.advance(3_600_000)
        again = await api.create(key="k", slots=("other",))
        assert (again.state, list(again.expected_source_slots)) == (STAGING, ["other"])
        assert again.created_at_unix_ms > first.created_at_unix_ms

    async def test_an_endless_run_keeps_a_bounded_number_of_records(self, server: Server, api: Api) -> None:
        store = server.running.registry.store
        for n in range(200):  # each step under new ids, as restarted workers and orchestrators bring them
            await api.register(f"t{n}", ttl_s=600)
            await api.create(f"v{n}", slots=("s",))
            await api.publish("s", f"t{n}", uid=f"v{n}")
            await api.delete(f"v{n}")
            await server.pass_time(600)
            kept = await store.list_versions(None, after=None, limit=1_000)
            assert len(kept) <= 9
            assert len((await store.list_workers(None)).workers) <= 9
        assert await store.read_key("key of v0") is None


class TestWorkers:
    async def test_the_dead_are_forgotten_after_retention(self, server: Server, api: Api) -> None:
        await api.register("w", ttl_s=10)
        request = v1.ListWorkersRequest(include_expired=True)
        await server.pass_time(10 + 3_599)
        assert len((await api.control.ListWorkers(request)).workers) == 1
        await server.pass_time(1)
        assert not (await api.control.ListWorkers(request)).workers

    async def test_a_worker_that_registers_again_stays(self, server: Server, api: Api) -> None:
        await api.register("w", ttl_s=10)
        await server.pass_time(3_000)
        await api.register("w", ttl_s=10)
        await server.pass_time(1_000)
        request = v1.ListWorkersRequest(include_expired=True)
        assert len((await api.control.ListWorkers(request)).workers) == 1


def shard(slot: str) -> Publication:
    return Publication(slot, "t", 1, 1, "d", "h:1")


class TestLoop:
    async def test_it_wakes_when_something_is_due(self) -> None:
        clock = VirtualClock()
        store = MemoryStore(clock)
        async with Registry.running(store) as registry, anyio.create_task_group() as tasks:
            tasks.start_soon(Expiry(registry, clock).run)
            await registry.create("v", spec("k"))
            await registry.workers.register("t", WorkerRole.TRAINER, "model", 100)
            for slot in ("s0", "s1"):
                await registry.command("v", commands.publish(shard(slot)))

            async def degraded() -> bool:
                clock.advance(10)
                stored = (await store.read_version("v")).stored
                return stored.entry.record.state is VersionState.DEGRADED

            await eventually(degraded)
            assert clock.now_ms() - 1_700_000_000_000 < 5_000
            tasks.cancel_scope.cancel()

    async def test_it_survives_a_store_that_is_away(self) -> None:
        clock = VirtualClock()
        store = FaultyStore(MemoryStore(clock))
        async with Registry.running(store) as registry, anyio.create_task_group() as tasks:
            await registry.create("v", spec("k"))
            await registry.command("v", commands.release(0, 1_000))
            store.fail_before = 3
            tasks.start_soon(Expiry(registry, clock).run)

            async def gone() -> bool:
                clock.advance(500)
                return (await store.read_version("v")).stored is None

            await eventually(gone)
            assert store.fail_before == 0
            tasks.cancel_scope.cancel()

    async def test_several_servers_do_it_once(self) -> None:
        clock = VirtualClock()
        store = MemoryStore(clock)
        async with Registry.running(store) as one, Registry.running(store) as two:
            for n in range(50):
                await one.create(f"v{n}", spec(f"k{n}"))
                await one.command(f"v{n}", commands.release(0, 1_000))
            clock.advance(1_000)
            async with anyio.create_task_group() as tasks:
                for registry in (one, two):
                    tasks.start_soon(Expiry(registry, clock).run_once)
            assert await store.list_versions(None, after=None, limit=100) == []
            assert await store.next_wake_ms() is None

    async def test_claims_of_versions_that_never_came_are_freed(self) -> None:
        clock = VirtualClock()
        store = MemoryStore(clock)
        async with Registry.running(store) as registry:
            expiry = Expiry(registry, clock)
            await expiry.run_once()
            await store.claim_key("k", KeyHolder("v", spec("k")))
            clock.advance(7_200_000)
            await expiry.run_once()
            assert await store.read_key("k") is None

    async def test_old_versions_cost_nothing(self) -> None:
        """Among hundreds of retired versions an expiry, a publication and a loss touch one version."""
        clock = VirtualClock()
        store = MemoryStore(clock)
        settings = Settings(retention_ms=86_400_000, keep_last=1)
        async with Registry.running(store, settings) as registry:
            for n in range(300):
                await registry.create(f"old{n}", spec(f"k{n}"))
                await registry.command(f"old{n}", commands.release(0, 86_400_000))
            await registry.create("v", spec("k"))
            await registry.workers.register("t", WorkerRole.TRAINER, "model", 10_000)
            reads = 0
            read_version = store.read_version

            async def counted(uid: str) -> object:
                nonlocal reads
                reads += 1
                return await read_version(uid)

            store.read_version = counted  # type: ignore[method-assign]
            for slot in ("s0", "s1"):
                await registry.command("v", commands.publish(shard(slot)))
            clock.advance(10_000)
            await Expiry(registry, clock).run_once()
            await registry.workers.register("t", WorkerRole.TRAINER, "model", 10_000)
            await anyio.wait_all_tasks_blocked()
            assert reads < 10
