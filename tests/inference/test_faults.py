"""What may go wrong while a version is read, and what must hold then."""

from __future__ import annotations

import hashlib

import anyio
import anyio.lowlevel
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.errors import (
    DeadlineExceeded,
    DigestMismatch,
    LeaseLost,
    ManifestError,
    StateError,
    TransferError,
    TransferTimeout,
    Unavailable,
)
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.reshard import grid, verify_parts
from tests.inference.publisher import Published, Publisher, create_version, whole
from tests.inference.world import Model, World, as_bytes, halves, true_soon, weights

pytestmark = pytest.mark.anyio


async def one_source(world: World, model: Model, **config: object) -> AsyncModelExpressGeneratorClient:
    """A version v1 of one slot of one trainer, and a generator."""
    trainer = await world.trainer()
    client = await world.generator(model, **config)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    return client


async def replicas(world: World) -> list[Publisher]:
    """A version v1 of one slot that two trainers hold."""
    await create_version(world.control, "v1", ["s0"])
    trainers = [await world.trainer("t0"), await world.trainer("t1")]
    for trainer in trainers:
        await trainer.publish("v1", "s0", whole(weights(1)))
    return trainers


async def pulling(client: AsyncModelExpressGeneratorClient) -> None:
    """Wait until reads are under way."""

    def posted() -> bool:
        work = client._installation.work
        return work is not None and work.pull is not None and bool(work.pull.unsettled)

    await true_soon(posted)


async def test_a_trainer_killed_while_it_is_read_fails_by_name(world: World) -> None:
    model = Model()
    client = await one_source(world, model)
    before = model.bytes()
    world.hub.hold("agent-t0")
    async with anyio.create_task_group() as group:

        async def stage() -> None:
            with pytest.raises(TransferError, match=r"version v1: worker 't0' \(slot 's0'"):
                await client.stage_weight("v1")

        group.start_soon(stage)
        await pulling(client)
        world.hub.kill("agent-t0")
    assert model.bytes() == before
    assert not client.uncertain
    await world.no_lease("v1")
    assert client._parts.pool.quarantined_bytes == 0


async def test_a_trainer_that_stops_is_a_timeout_and_its_arena_is_quarantined(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "1")
    model = Model()
    client = await one_source(world, model)
    world.hub.hold("agent-t0")
    with pytest.raises(TransferTimeout, match=r"version v1: worker 't0'"):
        await client.stage_weight("v1")
    pool = client._parts.pool
    assert pool.quarantined_bytes > 0
    with pytest.raises(StateError, match="still in flight"):
        await client.stage_weight("v1")
    # Another version comes meanwhile, through another arena.
    other = await world.trainer("t1")
    await create_version(world.control, "v2", ["s0"])
    await other.publish("v2", "s0", whole(weights(2)))
    await client.apply_weight(await client.stage_weight("v2"))
    assert model.bytes() == as_bytes(weights(2))
    world.hub.resume("agent-t0")
    await true_soon(lambda: pool.quarantined_bytes == 0)
    assert model.bytes() == as_bytes(weights(2))
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_replica_takes_over_what_a_killed_trainer_had(world: World, lost: int) -> None:
    model, tensors = Model(), weights(1)
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0", "s1"])
    for name, part in (("t0", 0), ("t1", 1), ("t2", 0), ("t3", 1)):
        trainer = await world.trainer(name)
        await trainer.publish("v1", f"s{part}", halves(tensors, part))
    for name in (f"agent-t{lost}", f"agent-t{lost + 2}"):
        world.hub.fail_next(name)
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(tensors)
    assert client.serving_version_id == "v1"


async def test_a_stopped_trainer_is_replaced_and_its_late_bytes_harm_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "1.5")
    trainers = await replicas(world)
    model = Model()
    client = await world.generator(model)
    read_first = await chosen(world, client, trainers)
    world.hub.hold(read_first.agent.name)
    staged = await client.stage_weight("v1")
    assert staged.metrics["transfer_attempts"] == 2
    for shard in read_first.lent[-1]:
        shard.data[...] = 0  # what lands late is not what was published
    world.hub.resume(read_first.agent.name)
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(weights(1))


async def chosen(
    world: World, client: AsyncModelExpressGeneratorClient, trainers: list[Publisher]
) -> Publisher:
    """Which of two replicas of everything a generator reads first; each tensor goes to one of them."""
    staged = await client.stage_weight("v1")
    planned = client._parts.planning._planned
    (workers,) = [planned._kept[key].reads.workers for key in planned]
    await staged.release()
    return next(trainer for trainer in trainers if trainer.worker_id in workers)


async def test_a_byte_damaged_in_flight_is_read_again(world: World) -> None:
    model = Model()
    client = await one_source(world, model)
    world.hub.corrupt_next("agent-t0")
    staged = await client.stage_weight("v1")
    assert staged.metrics["transfer_attempts"] == 2
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(weights(1))


async def test_bytes_that_stay_damaged_are_refused_by_name(world: World) -> None:
    model = Model()
    client = await one_source(world, model, max_transfer_attempts=2)
    before = model.bytes()
    world.hub.corrupt_next("agent-t0", 5)
    with pytest.raises(DigestMismatch, match=r"v1.*t0.*linear\..*not what"):
        await client.stage_weight("v1")
    assert model.bytes() == before
    await world.no_lease("v1")


async def test_bytes_without_digests_are_counted_as_unverified(world: World) -> None:
    model = Model()
    trainer = await world.trainer()
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)), digests=False)
    staged = await client.stage_weight("v1")
    assert staged.metrics["verified_bytes"] == 0
    assert staged.metrics["unverified_bytes"] == staged.metrics["bytes"]


async def test_a_lost_lease_ends_the_pull(world: World) -> None:
    model = Model()
    client = await one_source(world, model, lease_ttl_seconds=1)
    before = model.bytes()
    world.hub.hold("agent-t0")
    async with anyio.create_task_group() as group:

        async def stage() -> None:
            with anyio.fail_after(3), pytest.raises(LeaseLost, match="v1"):
                await client.stage_weight("v1")

        group.start_soon(stage)
        await pulling(client)
        # No renewal any more: the lease runs out, and the pull must end by then.
        await world.control.release_version(v1.ReleaseVersionRequest(version_id="v1", drain_deadline_ms=0))
    assert model.bytes() == before
    assert client._parts.pool.quarantined_bytes > 0
    world.hub.resume("agent-t0")
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)
    assert model.bytes() == before


async def test_a_lease_is_renewed_for_as_long_as_the_pull_lasts(world: World) -> None:
    model = Model()
    client = await one_source(world, model, lease_ttl_seconds=2)
    world.hub.delay("agent-t0", 2.5)
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))


async def test_a_source_that_is_no_longer_live_is_replaced(world: World) -> None:
    trainers = await replicas(world)
    model = Model()
    client = await world.generator(model, lease_ttl_seconds=2)
    read_first = await chosen(world, client, trainers)
    world.hub.hold(read_first.agent.name)
    async with anyio.create_task_group() as group:

        async def refit() -> None:
            await client.apply_weight(await client.stage_weight("v1"))

        group.start_soon(refit)
        await pulling(client)
        # Cut off: the control plane ends its registration while a read from it hangs.
        await world.control.unregister_worker(v1.UnregisterWorkerRequest(worker_id=read_first.worker_id))
    assert model.bytes() == as_bytes(weights(1))
    world.hub.resume(read_first.agent.name)


async def test_a_worker_that_does_not_serve_its_manifest_is_replaced_or_named(world: World) -> None:
    trainers = await replicas(world)
    model = Model()
    client = await world.generator(model)
    await trainers[0].stop_serving()
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))
    await create_version(world.control, "v2", ["s0"])
    await trainers[0].publish("v2", "s0", whole(weights(2)))
    with pytest.raises(Unavailable, match=r"version v2: worker 't0' \(slot 's0'"):
        await client.stage_weight("v2")


async def test_a_worker_that_never_answers_is_named_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "0.5")
    trainer = await world.trainer()
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    trainer.answering = anyio.Event()
    with anyio.fail_after(3), pytest.raises(DeadlineExceeded, match=r"version v1: worker 't0' \(slot 's0'"):
        await client.stage_weight("v1")
    await world.no_lease("v1")


@pytest.mark.parametrize("served", [b"", b"{}", b"\xff" * 100, b"[" * 5000])
async def test_a_hostile_manifest_is_refused_by_name(world: World, served: bytes) -> None:
    trainer = await world.trainer()
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["s0"])
    trainer.served["v1", "s0"] = Published(served, hashlib.sha256(served).hexdigest(), None)
    await trainer.announce("v1", "s0")
    with pytest.raises(ManifestError, match=r"version v1: worker 't0'"):
        await client.stage_weight("v1")


@pytest.mark.parametrize("digests_are", ["selected", "whole", "other grid"])
async def test_bytes_are_verified_whatever_the_publisher_answers(world: World, digests_are: str) -> None:
    trainer = await world.trainer()
    trainer.digests_are = digests_are
    client = await world.generator(Model(), max_transfer_attempts=1)
    for version in ("v1", "v2"):
        await create_version(world.control, version, ["s0"])
        await trainer.publish(version, "s0", whole(weights(int(version[1:]))))
        staged = await client.stage_weight(version)
        assert staged.metrics["verified_bytes"] == staged.metrics["bytes"] > 0
        assert staged.metrics["unverified_bytes"] == 0
        await staged.release()
    await create_version(world.control, "v3", ["s0"])
    held = whole(weights(3))
    await trainer.publish("v3", "s0", held)
    held[0].data.reshape(-1)[0] += 1  # lent, and written all the same
    with pytest.raises(DigestMismatch, match=r"v3.*t0.*not what"):
        await client.stage_weight("v3")


async def test_digests_come_in_the_order_of_the_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "GROUPED_BYTES", 0)  # each by itself: together they would be one group
    monkeypatch.setattr(verify_parts, "ASK_BYTES", 1024)
    monkeypatch.setattr(verify_parts, "MAX_ASK_BYTES", 1024)
    trainer = await world.trainer()
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    staged = await client.stage_weight("v1")
    assert staged.metrics["unverified_bytes"] == 0
    assert trainer.calls.count("digests") > 1


@pytest.mark.parametrize("digests_are", ["selected", "whole"])
async def test_damaged_digests_are_refused_by_name(world: World, digests_are: str) -> None:
    trainer = await world.trainer()
    trainer.digests_are = digests_are
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["s0"])
    trainer.damages_digests = True
    await trainer.publish("v1", "s0", whole(weights(1)))
    with pytest.raises(ManifestError, match=r"version v1: worker 't0'.*digests"):
        await client.stage_weight("v1")


async def test_a_cancelled_stage_returns_its_lease_and_keeps_the_live_weights(world: World) -> None:
    model = Model()
    client = await one_source(world, model)
    before = model.bytes()
    world.hub.hold("agent-t0")
    async with anyio.create_task_group() as group:
        group.start_soon(client.stage_weight, "v1")
        await pulling(client)
        group.cancel_scope.cancel()
    assert model.bytes() == before
    assert client._parts.pool.quarantined_bytes > 0
    world.hub.resume("agent-t0")
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))


async def test_a_registration_that_was_lost_is_made_again(world: World) -> None:
    model = Model()
    client = await one_source(world, model)
    await world.control.unregister_worker(v1.UnregisterWorkerRequest(worker_id="g0"))
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))


async def test_closing_ends_a_stage_under_way(world: World) -> None:
    client = await one_source(world, Model())
    world.hub.hold("agent-t0")
    async with anyio.create_task_group() as group:

        async def stage() -> None:
            with pytest.raises(StateError, match="closed while it was staged"):
                await client.stage_weight("v1")

        group.start_soon(stage)
        await pulling(client)
        await client.close()
    world.hub.resume("agent-t0")


async def test_a_stage_may_be_cancelled_at_any_moment(world: World) -> None:
    """After each cancellation nothing is held, nothing was written, and the next stage works."""
    model = Model()
    client = await one_source(world, model)
    before = model.bytes()
    cancelled = finished = 0
    for moment in range(0, 5000, 3):
        if finished >= 5:
            break
        async with anyio.create_task_group() as group:

            async def stage() -> None:
                nonlocal finished
                handle = await client.stage_weight("v1")
                await handle.release()
                finished += 1

            group.start_soon(stage)
            for _ in range(moment):
                await anyio.lowlevel.checkpoint()
            cancelled += client._staging is not None
            group.cancel_scope.cancel()
        assert client._installation.work is None or client._active is None
        assert client._installation.state.value == "IDLE"
        assert client._parts.pool.quarantined_bytes == 0
    assert cancelled > 10
    assert client._parts.pool.allocations == 1
    assert model.bytes() == before
    await world.no_lease("v1")
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))
