"""Staging and applying versions end to end: a real control plane, real manifests, memory that moves."""

from __future__ import annotations

import anyio
import pytest
import torch

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import (
    DeadlineExceeded,
    EngineUncertain,
    IncompleteVersionError,
    ManifestError,
    StateError,
    VersionGone,
)
from modelexpress_rl.inference.client import ModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.version import WeightVersionRef
from tests.inference.publisher import Held, create_version, whole
from tests.inference.world import Model, World, as_bytes, halves, until, weights

pytestmark = pytest.mark.anyio


async def test_a_version_is_staged_beside_the_live_weights_and_then_applied(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    before, tensors = model.bytes(), weights(1)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(tensors))
    staged = await client.stage_weight(WeightVersionRef("v1"))
    assert model.bytes() == before
    assert (client.serving_version_id, staged.applied) == (None, False)
    await world.no_lease("v1")  # the trainer is free before the install
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(tensors)
    assert (client.serving_version_id, client.uncertain, staged.applied) == ("v1", False, True)
    size = sum(data.nbytes for data in tensors.values())
    metrics = staged.metrics
    assert metrics["bytes"] == metrics["needed_bytes"] == metrics["verified_bytes"] == size
    assert metrics["amplification"] == 1.0
    assert {"wire_transfer_s", "installation_s", "generator_refit_e2e_s"} <= metrics.keys()
    assert client.pop_metrics() == metrics
    assert client.pop_metrics() == {}


async def test_a_version_comes_in_halves_of_two_ranks(world: World) -> None:
    model, tensors = Model(), weights(2)
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0", "s1"])
    held = [halves(tensors, part) for part in (0, 1)]
    for part in (0, 1):
        trainer = await world.trainer(f"t{part}")
        await trainer.publish("v1", f"s{part}", held[part])
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(tensors)


async def test_a_warm_refit_reuses_arena_plan_manifest_and_prepared_reads(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    held = whole(weights(0))
    for step in range(1, 5):
        for shard, data in zip(held, weights(step).values(), strict=True):
            shard.data[...] = data
        await create_version(world.control, f"v{step}", ["s0"])
        await trainer.publish(f"v{step}", "s0", held)
        await client.apply_weight(await client.stage_weight(f"v{step}"))
        assert model.bytes() == as_bytes(weights(step))
        assert client.serving_version_id == f"v{step}"
    parts = client._parts
    assert (parts.pool.allocations, parts.planning.plans_made, parts.cache.prepared_reads) == (1, 1, 1)
    assert trainer.calls.count("manifest") == 1


async def test_a_trainer_that_alternates_between_arenas_is_warm_in_each(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    arenas = [whole(weights(0)), whole(weights(0))]
    for held in arenas:  # both are registered before v1, so that the transport's metadata stays the same
        await trainer.serve("warm-up", "s0", held)
    for step in range(1, 9):
        held = arenas[step % 2]
        for shard, data in zip(held, weights(step).values(), strict=True):
            shard.data[...] = data
        await create_version(world.control, f"v{step}", ["s0"])
        await trainer.publish(f"v{step}", "s0", held)
        await client.apply_weight(await client.stage_weight(f"v{step}"))
        assert model.bytes() == as_bytes(weights(step))
    parts = client._parts
    assert (parts.pool.allocations, parts.planning.plans_made, parts.cache.prepared_reads) == (1, 2, 2)


async def test_the_same_version_twice_is_the_same_handle_and_another_is_refused(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    for version in ("v1", "v2"):
        await create_version(world.control, version, ["s0"])
        await trainer.publish(version, "s0", whole(weights(1)))
    staged = await client.stage_weight("v1")
    assert await client.stage_weight("v1") is staged
    with pytest.raises(StateError, match=r"v2.*v1 is staged"):
        await client.stage_weight("v2")
    await staged.release()
    await staged.release()
    with pytest.raises(StateError, match="given up"):
        await client.apply_weight(staged)
    await client.apply_weight(await client.stage_weight("v2"))
    assert client.serving_version_id == "v2"


async def test_two_tasks_that_stage_the_same_version_share_one_transfer(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    handles = []

    async def stage() -> None:
        handles.append(await client.stage_weight("v1"))

    async with anyio.create_task_group() as group:
        group.start_soon(stage)
        group.start_soon(stage)
    assert handles[0] is handles[1]
    assert trainer.calls.count("manifest") == 1


async def test_staging_the_served_version_moves_nothing(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    await client.apply_weight(await client.stage_weight("v1"))
    posts = client._parts.cache.prepared_reads
    again = await client.stage_weight("v1")
    assert again.applied
    await client.apply_weight(again)  # a repeat is harmless
    assert client._parts.cache.prepared_reads == posts
    await world.no_lease("v1")
    await world.control.delete_weight_version(refit.DeleteWeightVersionRequest(uid="v1"))
    assert (await client.stage_weight("v1")).applied


async def test_staging_before_ready_waits_and_then_goes_on(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0"])
    tensors = weights(1)
    async with anyio.create_task_group() as group:

        async def refit() -> None:
            await client.apply_weight(await client.stage_weight("v1"))

        group.start_soon(refit)
        await anyio.wait_all_tasks_blocked()
        await trainer.publish("v1", "s0", whole(tensors))
    assert model.bytes() == as_bytes(tensors)


async def test_a_version_that_is_never_ready_is_an_error_that_names_the_slot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "0.3")
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["slot-a"])
    with pytest.raises(DeadlineExceeded, match=r"v1.*slot-a"):
        await client.stage_weight("v1")


async def test_a_version_that_does_not_exist_is_gone_after_a_grace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelexpress_rl.inference.readiness.GRACE_S", 0.2)
    client = await world.generator(Model())
    with pytest.raises(VersionGone, match="v9"):
        await client.stage_weight("v9")


async def test_a_released_version_is_gone(world: World) -> None:
    trainer = await world.trainer()
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    await world.control.delete_weight_version(refit.DeleteWeightVersionRequest(uid="v1"))
    with pytest.raises(VersionGone, match=r"v1 RELEASING"):
        await client.stage_weight("v1")


async def test_a_half_published_tensor_fails_by_name_and_leaves_everything(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    before = model.bytes()
    tensors = weights(1)
    held = [halves(tensors, 0)[0], Held.whole("linear.bias", tensors["linear.bias"])]
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", held)
    with pytest.raises(IncompleteVersionError, match=r"'linear.weight'.*g0"):
        await client.stage_weight("v1")
    assert model.bytes() == before
    await world.no_lease("v1")
    assert client.pop_metrics()["generator_refit_e2e_s"] > 0


async def test_a_manifest_that_was_not_announced_is_refused_by_name(world: World) -> None:
    trainer = await world.trainer()
    client = await world.generator(Model())
    await create_version(world.control, "v1", ["s0"])
    await trainer.serve("v1", "s0", whole(weights(1)))
    await trainer.announce("v1", "s0", digest="0" * 64)
    with pytest.raises(ManifestError, match=r"version v1.*t0.*s0.*was announced"):
        await client.stage_weight("v1")
    await world.no_lease("v1")


async def test_an_install_that_fails_half_way_is_uncertain_and_the_same_version_installs_again(
    world: World,
) -> None:
    class Breaks(Model):
        breaks = True

        def load_weights(self, named: object) -> None:
            for name, tensor in named:  # type: ignore[attr-defined]
                self.get_parameter(name).copy_(tensor)
                if self.breaks:
                    raise OSError("the device fell off the bus")

    trainer, model = await world.trainer(), Breaks()
    client = await world.generator(model, context=TorchGeneratorContext(model, load_weights_whole=True))
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    staged = await client.stage_weight("v1")
    with pytest.raises(EngineUncertain, match="fell off the bus"):
        await client.apply_weight(staged)
    assert (client.serving_version_id, client.uncertain) == (None, True)

    async def reported() -> bool:
        workers = (await world.control.list_workers(v1.ListWorkersRequest())).workers
        return any(worker.serving_uncertain for worker in workers if worker.worker_id == "g0")

    await until(reported)
    model.breaks = False
    again = await client.stage_weight("v1")
    assert again is not staged
    assert not again.applied
    await client.apply_weight(again)
    assert model.bytes() == as_bytes(weights(1))
    assert (client.serving_version_id, client.uncertain) == ("v1", False)
    assert client._parts.pool.allocations == 1


async def test_a_check_before_the_install_leaves_the_version_staged(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    staged = await client.stage_weight("v1")
    kept, model.linear.bias = model.linear.bias, torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(StateError, match=r"'linear.bias' was .*64.*now .*3"):
        await client.apply_weight(staged)
    assert not client.uncertain
    model.linear.bias = kept
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(weights(1))


async def test_what_is_served_is_reported(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    client = await world.generator(model, initial_serving_version_id="v0")
    assert client.serving_version_id == "v0"

    async def serving(version: str) -> bool:
        workers = (await world.control.list_workers(v1.ListWorkersRequest())).workers
        return any(worker.serving_version_id == version for worker in workers)

    await until(lambda: serving("v0"))
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    await client.apply_weight(await client.stage_weight("v1"))
    await until(lambda: serving("v1"))


async def test_a_closed_client_says_so_and_leaves(world: World) -> None:
    client = await world.generator(Model())
    await client.close()
    await client.close()
    with pytest.raises(StateError, match="closed"):
        await client.stage_weight("v1")
    workers = (await world.control.list_workers(v1.ListWorkersRequest())).workers
    assert "g0" not in [worker.worker_id for worker in workers]


async def test_the_blocking_client_does_the_same(world: World) -> None:
    trainer, model = await world.trainer(), Model()
    await create_version(world.control, "v1", ["s0"])
    tensors = weights(1)
    await trainer.publish("v1", "s0", whole(tensors))
    config = ModelExpressGeneratorConfig(
        engine_context=TorchGeneratorContext(model), model_name="m", server_url=world.address
    )

    def refit() -> None:
        with ModelExpressGeneratorClient.initialize(config, agent=world.hub.agent("blocking")) as client:
            staged = client.stage_weight(WeightVersionRef("v1"))
            assert client.stage_weight(WeightVersionRef("v1")) is staged
            client.apply_weight(staged)
            assert staged.applied
            assert client.serving_version_id == "v1"
            staged.release()
            pid, client._portal._pid = client._portal._pid, -1  # as in a forked child
            client.close()
            client._portal._pid = pid
            assert not client._portal.closed

    await anyio.to_thread.run_sync(refit)
    assert model.bytes() == as_bytes(tensors)
