"""Versions that come by whole rows through scratch: bytes, checks, and failures half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelexpress_rl.errors import DigestMismatch, TransferTimeout
from modelexpress_rl.inference import checks, explanations
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.reshard import row_staging, row_staging_wire
from modelexpress_rl.reshard.explain import PlanSummary
from tests.inference.publisher import Held, create_version
from tests.inference.world import World, as_bytes, true_soon

pytestmark = pytest.mark.anyio

ROWS, COLUMNS = 1024, 512
PART_BYTES = 128 << 10  # a slab of each half


class Wide(torch.nn.Module):
    """One tensor that trainers hold in column halves of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.down = torch.nn.Linear(COLUMNS, ROWS, bias=False)

    def bytes(self) -> dict[str, bytes]:
        return {name: p.detach().numpy().tobytes() for name, p in self.named_parameters()}


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(step)
    return {"down.weight": rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)}


def columns(tensors: dict[str, np.ndarray[Any, Any]], part: int) -> list[Held]:
    half = COLUMNS // 2
    return [
        Held(name, np.ascontiguousarray(data[:, part * half :][:, :half]), (0, part * half), data.shape)
        for name, data in tensors.items()
    ]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what was measured here changes no choice
    monkeypatch.setattr(row_staging, "SCRATCH_BYTES", PART_BYTES)
    monkeypatch.setattr(row_staging_wire, "SCRATCH_BYTES", PART_BYTES)


async def published(world: World, version: str, step: int, *, replicas: int = 1) -> list[list[Held]]:
    await create_version(world.control, version, ["s0", "s1"])
    held = []
    for number in range(2 * replicas):
        trainer = await world.trainer(f"t{number}")
        held.append(columns(weights(step), number % 2))
        await trainer.publish(version, f"s{number % 2}", held[-1])
    return held


def batches(client: AsyncModelExpressGeneratorClient) -> int:
    return client._parts.cache.prepared_reads


async def test_column_halves_come_through_few_parts_of_scratch(world: World) -> None:
    model = Wide()
    client = await world.generator(model)
    await published(world, "v1", 1)
    staged = await client.stage_weight("v1")
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(weights(1))
    assert staged.metrics["amplification"] == 1.0
    assert staged.metrics["unverified_bytes"] == 0
    assert staged.metrics["reads"] == batches(client) == 16
    assert staged.metrics["descriptors"] == 16  # and not 2 x 1024
    assert staged.metrics["staged_bytes"] == staged.metrics["bytes"] == ROWS * COLUMNS * 4


async def test_a_warm_version_prepares_nothing_anew(world: World) -> None:
    model = Wide()
    client = await world.generator(model)
    await create_version(world.control, "v1", ["s0", "s1"])
    await create_version(world.control, "v2", ["s0", "s1"])
    trainers = [await world.trainer("t0"), await world.trainer("t1")]
    held = [columns(weights(1), part) for part in (0, 1)]
    for part, trainer in enumerate(trainers):
        await trainer.publish("v1", f"s{part}", held[part])
    await client.apply_weight(await client.stage_weight("v1"))
    prepared = batches(client)
    for part, trainer in enumerate(trainers):
        held[part][0].data[...] = columns(weights(2), part)[0].data
        await trainer.publish("v2", f"s{part}", held[part])
    await client.apply_weight(await client.stage_weight("v2"))
    assert model.bytes() == as_bytes(weights(2))
    assert batches(client) == prepared
    assert client._parts.pool.allocations == 1


@pytest.mark.parametrize("in_threads", [False, True])
async def test_a_byte_that_changed_is_found_in_scratch(
    world: World, monkeypatch: pytest.MonkeyPatch, in_threads: bool
) -> None:
    """Small parts are checked where they are, big ones in a thread while they are copied out."""
    if in_threads:
        monkeypatch.setattr(checks, "_INLINE_BYTES", 0)
    model = Wide()
    before = model.bytes()
    client = await world.generator(model, max_transfer_attempts=1)
    held = await published(world, "v1", 1)
    held[1][0].data[700, 3] += 1
    with pytest.raises(
        DigestMismatch, match=r"tensor 'down\.weight': offset \(640, 256\) shape \(128, 256\)"
    ):
        await client.stage_weight("v1")
    assert model.bytes() == before


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_replica_brings_what_a_failed_source_did_not(world: World, lost: int) -> None:
    model = Wide()
    client = await world.generator(model)
    await published(world, "v1", 1, replicas=2)
    for number in (lost, lost + 2):
        world.hub.fail_next(f"agent-t{number}")
    staged = await client.stage_weight("v1")
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(weights(1))


async def test_nothing_is_read_into_a_part_that_a_stopped_trainer_may_write_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "3")
    model = Wide()
    client = await world.generator(model)
    await published(world, "v1", 1, replicas=2)
    for number in (0, 2):
        world.hub.hold(f"agent-t{number}")
    with pytest.raises(TransferTimeout, match=r"version v1: worker 't[02]'"):
        await client.stage_weight("v1")
    for number in (0, 2):
        world.hub.resume(f"agent-t{number}")
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))


async def test_a_stopped_trainer_is_replaced_in_another_arena(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "3")
    model = Wide()
    client = await world.generator(model)
    await published(world, "v1", 1, replicas=2)
    world.hub.hold("agent-t0")
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))
    world.hub.resume("agent-t0")
    await true_soon(lambda: client._parts.pool.quarantined_bytes == 0)
    assert model.bytes() == as_bytes(weights(1))


async def test_the_plan_explains_itself_and_is_left_for_pictures(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MX_EXPLAIN_DIR", str(tmp_path))
    model = Wide()
    client = await world.generator(model)
    await published(world, "v1", 1)
    staged = await client.stage_weight("v1")
    assert staged.explain().startswith("generator g0 reads 2.0 MiB for 2.0 MiB needed (1.00x)")
    assert "by whole rows" in staged.explain()
    assert staged.plan is not None
    assert PlanSummary.from_json((tmp_path / "generator-g0.json").read_bytes()) == staged.plan
    await client.apply_weight(staged)
    again = await client.stage_weight("v1")
    assert again.plan is None
    assert again.explain() == "version v1 is served already: nothing is read"

    monkeypatch.setenv("MX_EXPLAIN_DIR", str(tmp_path / "made" / "for it"))
    explanations.write(staged.plan, "g")
    assert (tmp_path / "made" / "for it" / "g.json").exists()
    monkeypatch.setenv("MX_EXPLAIN_DIR", str(tmp_path / "generator-g0.json"))
    explanations.write(staged.plan, "g")
    assert "MX_EXPLAIN_DIR: the plan of g can't be written" in caplog.text
