"""Commands of one version are committed together, and each still has its own answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl.server import commands
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import Rejected, StoreUnavailable
from statemachines.kernel import Refused
from statemachines.version import VersionState
from statemachines.version_records import Publication
from statemachines.worker import WorkerRole
from tests.server.api import READY, Api, Server, eventually, server_on
from tests.store.faulty import FaultyStore
from tests.store.harness import Harness
from tests.store.records import spec
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio

RANKS = 256


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def any_server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    harness = Harness.make(request.param, tmp_path, request)
    store = harness.open()
    async with server_on(store, harness.clock) as running:
        yield running
    await store.close()


async def test_a_burst_of_publications_costs_tens_of_commits(any_server: Server) -> None:
    api = any_server.api
    await api.create(slots=[f"s{n}" for n in range(RANKS)])
    async with anyio.create_task_group() as tasks:
        for n in range(RANKS):
            tasks.start_soon(api.register, f"t{n}")
    counts = any_server.running.registry.lanes.counts
    before = counts.commits
    states: list[int] = []

    async def publish(n: int) -> None:
        states.append((await api.publish(f"s{n}", f"t{n}")).version.state)

    async with anyio.create_task_group() as tasks:
        for n in range(RANKS):
            tasks.start_soon(publish, n)
    assert (await api.get()).state == READY
    assert READY in states
    assert len(await api.shards()) == RANKS
    assert counts.commits - before < 60


async def test_each_command_of_a_group_has_its_own_answer(any_server: Server) -> None:
    api: Api = any_server.api
    await api.create(slots=[f"s{n}" for n in range(20)])
    await api.register("t")
    outcomes: Counter[grpc.StatusCode | None] = Counter()

    async def publish(slot: str, digest: str, worker: str) -> None:
        try:
            await api.publish(slot, worker, digest=digest)
            outcomes[None] += 1
        except grpc.aio.AioRpcError as error:
            outcomes[error.code()] += 1

    async with anyio.create_task_group() as tasks:
        for n in range(20):
            tasks.start_soon(publish, f"s{n}", "d", "t")
            tasks.start_soon(publish, f"s{n}", "d", "t")
            tasks.start_soon(publish, f"odd{n}", "d", "t")
            tasks.start_soon(publish, f"s{n}", "d", "nobody")
    assert outcomes == {
        None: 40,
        grpc.StatusCode.INVALID_ARGUMENT: 20,
        grpc.StatusCode.FAILED_PRECONDITION: 20,
    }
    assert (await api.get()).state == READY


# The registry by itself, on stores that race, stall and fail.


def shard(n: int, worker: str = "t") -> Publication:
    return Publication(f"s{n}", worker, 1, 1, "d", "h:1")


class RacingStore(FaultyStore):
    """Another server commits first, or the clock moves on, just before the first commits."""

    def __init__(self, store: MemoryStore, clock: VirtualClock) -> None:
        super().__init__(store)
        self.clock = clock
        self.conflicts = 0
        self.pause_ms = 0

    async def _commit(self, commit: object, *arguments: object, **named: object) -> object:
        if self.conflicts:
            self.conflicts -= 1
            return Rejected.CONFLICT
        if self.pause_ms:
            self.clock.advance(self.pause_ms)
            self.pause_ms = 0
        return await super()._commit(commit, *arguments, **named)


@pytest.fixture
async def racing() -> AsyncIterator[tuple[RacingStore, Registry]]:
    clock = VirtualClock()
    store = RacingStore(MemoryStore(clock), clock)
    async with Registry.running(store, Settings(command_timeout_s=2.0)) as registry:
        await registry.create("v", spec("k", slots=("s0", "s1")))
        await registry.workers.register("t", WorkerRole.TRAINER, "model", 10_000)
        await registry.workers.register("g", WorkerRole.GENERATOR, "model", 60_000)
        yield store, registry


async def test_a_conflict_is_decided_again(racing: tuple[RacingStore, Registry]) -> None:
    store, registry = racing
    store.conflicts = 5
    outcome = await registry.command("v", commands.publish(shard(0)))
    assert outcome.after.publications.keys() == {("s0", "t")}
    assert registry.lanes.counts.conflicts == 5


async def test_endless_conflicts_end_at_the_deadline(racing: tuple[RacingStore, Registry]) -> None:
    store, registry = racing
    store.conflicts = 10**9
    with pytest.raises(StoreUnavailable, match="within 2 s"):
        await registry.command("v", commands.publish(shard(0)))


async def test_ready_is_never_committed_after_a_publisher_lapsed(
    racing: tuple[RacingStore, Registry],
) -> None:
    store, registry = racing
    await registry.command("v", commands.publish(shard(0)))
    store.pause_ms = 10_000  # between the decision and its commit, the registration runs out
    with pytest.raises(Refused, match="expired"):
        await registry.command("v", commands.publish(shard(1)))
    assert (await registry.view("v")).record.state is VersionState.STAGING


async def test_a_lease_is_never_granted_after_the_publisher_lapsed(
    racing: tuple[RacingStore, Registry],
) -> None:
    store, registry = racing
    for n in (0, 1):
        await registry.command("v", commands.publish(shard(n)))
    store.pause_ms = 10_000
    with pytest.raises(Refused, match="DEGRADED"):
        await registry.command("v", commands.lease_for("g", 5_000))


async def test_a_lease_that_lapses_on_the_way_is_not_revived(
    racing: tuple[RacingStore, Registry],
) -> None:
    store, registry = racing
    for n in (0, 1):
        await registry.command("v", commands.publish(shard(n)))
    granted = await registry.command("v", commands.lease_for("g", 1_000))
    (lease_id,) = granted.after.leases
    store.pause_ms = 1_000
    with pytest.raises(Refused, match="no live lease"):
        await registry.command("v", commands.renew(lease_id, "g", 5_000))


async def test_a_registration_that_lapses_on_the_way_is_a_new_life(
    racing: tuple[RacingStore, Registry],
) -> None:
    store, registry = racing
    for n in (0, 1):
        await registry.command("v", commands.publish(shard(n)))
    before = (await registry.registrations(None))[1]
    store.clock.advance(1)
    store.pause_ms = 9_999
    renewed = await registry.workers.register("t", WorkerRole.TRAINER, "model", 10_000)
    assert renewed.life > next(one.life for one in before if one.worker_id == "t")
    assert (await registry.view("v")).record.state is VersionState.DEGRADED


async def test_a_failing_store_is_said_to_each_and_the_lane_goes_on(
    racing: tuple[RacingStore, Registry],
) -> None:
    store, registry = racing
    store.fail_before = 1
    with pytest.raises(StoreUnavailable, match="cut the store off"):
        await registry.command("v", commands.publish(shard(0)))
    await registry.command("v", commands.publish(shard(0)))


async def test_a_store_that_hangs_is_unavailable_within_the_bound(
    racing: tuple[RacingStore, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, registry = racing

    async def hang(uid: str, worker_ids: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(store, "read_version_and_workers", hang, raising=False)
    with pytest.raises(StoreUnavailable, match="within 2 s"):
        await registry.view("v")
    with pytest.raises(StoreUnavailable, match="within 2 s"):
        await registry.command("v", commands.publish(shard(0)))


async def test_a_caller_that_went_away_while_waiting_is_not_carried_out(
    racing: tuple[RacingStore, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, registry = racing
    gate, read = anyio.Event(), store.read_version_and_workers

    async def gated(uid: str, worker_ids: Collection[str]) -> object:
        await gate.wait()
        return await read(uid, worker_ids)

    monkeypatch.setattr(store, "read_version_and_workers", gated, raising=False)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(registry.command, "v", commands.publish(shard(0)))
        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as impatient:
            impatient.start_soon(registry.command, "v", commands.publish(shard(1)))
            await anyio.wait_all_tasks_blocked()
            impatient.cancel_scope.cancel()
        gate.set()
    assert (await registry.view("v")).record.publications.keys() == {("s0", "t")}


async def test_two_servers_on_one_store_lose_nothing() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    slots = tuple(f"s{n}" for n in range(60))
    async with Registry.running(store) as one, Registry.running(store) as two:
        await one.create("v", spec("k", slots=slots))
        await two.workers.register("t", WorkerRole.TRAINER, "model", 10_000)
        async with anyio.create_task_group() as tasks:
            for n in range(60):
                tasks.start_soon((one, two)[n % 2].command, "v", commands.publish(shard(n)))
        found = await two.view("v")
        assert found.record.state is VersionState.READY
        assert len(found.record.publications) == 60


async def test_concurrent_creations_under_one_key_make_one_version() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock)
    async with Registry.running(store) as one, Registry.running(store) as two:
        uids: list[str] = []

        async def create(registry: Registry) -> None:
            uids.append((await registry.create(None, spec("k"))).record.uid)

        async with anyio.create_task_group() as tasks:
            for n in range(20):
                tasks.start_soon(create, (one, two)[n % 2])
        assert len(set(uids)) == 1
        assert len(await store.list_versions(None, after=None, limit=10)) == 1


async def test_a_crash_between_claim_and_creation_is_healed_by_the_repeat() -> None:
    clock = VirtualClock()
    store = FaultyStore(MemoryStore(clock))
    async with Registry.running(store) as registry:
        store.fail_before = 1
        with pytest.raises(StoreUnavailable):
            await registry.create(None, spec("k"))
        claimed = await store.read_key("k")
        assert claimed is not None
        assert (await registry.create(None, spec("k"))).record.uid == claimed.uid


async def test_idle_lanes_are_forgotten(racing: tuple[RacingStore, Registry]) -> None:
    _, registry = racing
    await registry.command("v", commands.publish(shard(0)))

    async def idle() -> bool:
        return not registry.lanes.busy

    await eventually(idle)
