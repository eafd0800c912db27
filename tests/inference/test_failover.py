"""Replicas take over from sources that stall, freeze or die, without what has landed being read again."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
import torch

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.errors import GeometryError, TransferTimeout
from modelexpress_rl.inference import planning, round, sources
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from tests.inference.publisher import Publisher, create_version, whole
from tests.inference.test_faults import pulling, replicas
from tests.inference.world import Model, World, as_bytes, true_soon, weights

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CHUNK_BYTES", 2048)


TENSORS = 16


class Many(torch.nn.Module):
    """A model of many tensors of 2 KiB, so that a source is read in many small reads."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(512) for _ in range(TENSORS))

    def bytes(self) -> dict[str, bytes]:
        return {name: p.detach().numpy().tobytes() for name, p in self.named_parameters()}


def many_weights() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(7)
    return {f"parts.{i}": rng.standard_normal(512, dtype=np.float32) for i in range(TENSORS)}


async def two_of_many(world: World) -> None:
    """Version v1 in one slot that two trainers hold: each is read for half of the tensors."""
    await create_version(world.control, "v1", ["s0"])
    for name in ("t0", "t1"):
        await (await world.trainer(name)).publish("v1", "s0", whole(many_weights()))


async def test_a_source_that_stalls_in_the_middle_is_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a source's reads land, then it hangs; only what had not landed comes from the replica."""
    monkeypatch.setattr(round, "MIN_BYTES_PER_S", 1 << 40)
    await two_of_many(world)
    model = Many()
    client = await world.generator(model, max_in_flight_bytes=4096, stall_timeout_seconds=0.3)
    post, peers, held = client._parts.agent.post, [], []

    async def hang_after_some(prepared):  # type: ignore[no-untyped-def]
        peers.append(prepared.peer)
        if not held and peers.count(prepared.peer) == 4:
            held.append(prepared.peer)
            world.hub.hold(prepared.peer)
        return await post(prepared)

    monkeypatch.setattr(client._parts.agent, "post", hang_after_some)
    with anyio.fail_after(5):
        staged = await client.stage_weight("v1")
    assert staged.metrics["transfer_attempts"] == 2
    assert len(set(peers)) == 2
    assert staged.metrics["needed_bytes"] < staged.metrics["bytes"]
    assert staged.metrics["bytes"] <= staged.metrics["needed_bytes"] + 4096  # what was in flight
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(many_weights())
    world.hub.resume(held[0])
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)
    assert model.bytes() == as_bytes(many_weights())


async def test_a_stall_without_a_replica_is_told_by_name_and_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round, "MIN_BYTES_PER_S", 1 << 40)
    trainer = await world.trainer()
    client = await world.generator(Model(), stall_timeout_seconds=0.2)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    world.hub.hold("agent-t0")
    told = r"worker 't0'.*nothing landed for 0\.\d s, with \d+ bytes in flight; 0\.2 s are allowed"
    with anyio.fail_after(5), pytest.raises(TransferTimeout, match=told):
        await client.stage_weight("v1")
    world.hub.resume("agent-t0")


async def test_a_slow_source_that_moves_is_no_stall(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "MIN_BYTES_PER_S", 1 << 40)
    model = Many()
    trainer = await world.trainer()
    client = await world.generator(model, max_in_flight_bytes=8192, stall_timeout_seconds=0.4)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(many_weights()))
    world.hub.delay("agent-t0", 0.15)
    started = anyio.current_time()
    staged = await client.stage_weight("v1")
    assert anyio.current_time() - started > 0.5  # longer than a stall may last
    assert staged.metrics["transfer_attempts"] == 1
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(many_weights())


async def test_no_more_is_in_flight_than_was_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await two_of_many(world)
    model = Many()
    client = await world.generator(model, max_in_flight_bytes=6000)
    agent, peers, most = client._parts.agent, [], 0
    post, reads = agent.post, []

    async def count(prepared):  # type: ignore[no-untyped-def]
        nonlocal most
        read = await post(prepared)
        peers.append(prepared.peer)
        reads.append((read, prepared.total_bytes))
        most = max(most, sum(size for each, size in reads if not each.settled))
        return read

    monkeypatch.setattr(agent, "post", count)
    for name in ("t0", "t1"):
        world.hub.delay(f"agent-{name}", 0.01)
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(many_weights())
    assert 2048 < most <= 6000
    sources_read = len(set(peers))
    assert len(set(peers[:sources_read])) == sources_read  # each was posted before any came again


async def test_a_replica_that_is_frozen_does_not_hold_a_stage_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "REPLICA_GRACE_S", 0.2)
    trainers = await replicas(world)
    trainers[1].answering = anyio.Event()
    model = Model()
    client = await world.generator(model)  # an RPC may take 30 s
    with anyio.fail_after(5):
        await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))
    trainers[1].answering.set()


async def test_a_source_that_froze_before_its_digests_is_given_up_for_a_replica(world: World) -> None:
    """Its bytes can still be read: one-sided reads need no living process."""
    trainers = await replicas(world)
    model = Model()
    client = await world.generator(model, stall_timeout_seconds=0.2, rpc_timeout_seconds=0.2)
    trainers[0].digests_answered = anyio.Event()
    with anyio.fail_after(5):
        await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))
    assert "digests" in trainers[0].calls
    trainers[0].digests_answered.set()


async def test_digests_of_a_source_that_lives_are_waited_for(world: World) -> None:
    trainers = await replicas(world)
    model = Model()
    client = await world.generator(model, stall_timeout_seconds=0.1, rpc_timeout_seconds=5)
    for trainer in trainers:
        trainer.digests_made = anyio.Event()
    staged = []

    async def stage() -> None:
        staged.append(await client.stage_weight("v1"))

    async with anyio.create_task_group() as group:
        group.start_soon(stage)
        # Asked whether it is there, several times.
        await true_soon(lambda: max(trainer.calls.count("digests") for trainer in trainers) > 4)
        assert not staged
        for trainer in trainers:
            trainer.digests_made.set()
    assert staged[0].metrics["transfer_attempts"] == 1
    await client.apply_weight(staged[0])
    assert model.bytes() == as_bytes(weights(1))


async def test_a_source_that_froze_without_a_replica_is_told_by_name(world: World) -> None:
    trainer = await world.trainer()
    client = await world.generator(Model(), stall_timeout_seconds=0.1, rpc_timeout_seconds=0.1)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    trainer.digests_answered = anyio.Event()
    told = r"version v1: .*worker 't0'.*no digests for 0.1 s, and then no answer whether it is there"
    with anyio.fail_after(10), pytest.raises(TransferTimeout, match=told):
        await client.stage_weight("v1")
    trainer.digests_answered.set()


async def fetching(client: AsyncModelExpressGeneratorClient, *publishers: Publisher) -> None:
    await true_soon(lambda: all("manifest" in publisher.calls for publisher in publishers))


async def test_a_dead_worker_s_manifest_is_not_waited_for_where_a_replica_has_it(world: World) -> None:
    trainers = await replicas(world)
    late = trainers[1]
    for each in trainers:
        each.answering = anyio.Event()
    model = Model()
    client = await world.generator(model, lease_ttl_seconds=2)
    async with anyio.create_task_group() as group:

        async def refit() -> None:
            with anyio.fail_after(5):
                await client.apply_weight(await client.stage_weight("v1"))

        group.start_soon(refit)
        await fetching(client, *trainers)
        await world.control.unregister_worker(v1.UnregisterWorkerRequest(worker_id=trainers[0].worker_id))
        await true_soon(lambda: bool(client._installation.work.departed.workers))  # type: ignore[union-attr]
        late.answering.set()
    assert model.bytes() == as_bytes(weights(1))
    trainers[0].answering.set()


async def test_a_stage_that_reads_may_still_be_closed(world: World) -> None:
    await two_of_many(world)
    client = await world.generator(Many(), max_in_flight_bytes=2048)
    for name in ("t0", "t1"):
        world.hub.hold(f"agent-{name}")
    async with anyio.create_task_group() as group:
        group.start_soon(client.stage_weight, "v1")
        await pulling(client)
        group.cancel_scope.cancel()
    for name in ("t0", "t1"):
        world.hub.resume(f"agent-{name}")
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)


@pytest.mark.parametrize("dies", [False, True], ids=["both are read", "one takes over"])
async def test_replicas_of_different_contents_are_not_mixed(
    world: World, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Each would pass against its own digests; the version would be neither's."""
    await create_version(world.control, "v1", ["s0"])
    for name in ("t0", "t1"):
        held = many_weights()
        held["parts.7"][0] += name == "t1"  # of another step, or another run
        await (await world.trainer(name)).publish("v1", "s0", whole(held))
    model = Many()
    before = model.bytes()
    client = await world.generator(model, max_in_flight_bytes=4096)
    if dies:
        monkeypatch.setattr(client._parts.planning._nearness, "distances", _only_the_first_is_near)
        post, posts = client._parts.agent.post, 0

        async def fail_the_fifth(prepared):  # type: ignore[no-untyped-def]
            nonlocal posts
            posts += 1
            if posts == 5:
                world.hub.fail_next(prepared.peer)
            return await post(prepared)

        monkeypatch.setattr(client._parts.agent, "post", fail_the_fifth)
    told = r"tensor 'parts\.7': replicas of offset \(0,\) shape \(512,\) differ, worker 't0'.*worker 't1'"
    with pytest.raises(GeometryError, match=told):
        await client.stage_weight("v1")
    assert model.bytes() == before
    await world.no_lease("v1")


def _only_the_first_is_near(fetched):  # type: ignore[no-untyped-def]
    return {each.manifest.source: number for number, each in enumerate(fetched)}
