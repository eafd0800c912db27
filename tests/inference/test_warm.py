"""A warm refit does no work in Python for each shard: staging takes the same calls however many there are."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import modelexpress_rl
from tests.inference.publisher import create_version, whole
from tests.inference.world import World, as_bytes

pytestmark = pytest.mark.anyio

PACKAGE = Path(modelexpress_rl.__file__).parent
# The publisher of these tests runs in the same thread; what it does is no work of the generator.
GENERATOR = ("inference/", "transport/", "reshard/verify", "reshard/plan", "reshard/merge", "background")
TOTAL = 1 << 16


def model_of(tensors: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.parts = torch.nn.ParameterList(torch.zeros(TOTAL // tensors) for _ in range(tensors))
    return module


def weights_of(tensors: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(step)
    return {f"parts.{i}": rng.standard_normal(TOTAL // tensors, dtype=np.float32) for i in range(tensors)}


async def calls_of_a_warm_stage(world: World, tensors: int) -> Counter[str]:
    """Calls of Python functions while a third version is staged, by function."""
    trainer = await world.trainer(f"t{tensors}")
    model = model_of(tensors)
    client = await world.generator(model, worker_id=f"g{tensors}")
    held = whole(weights_of(tensors, 0))
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
        if event == "call" and name.startswith(GENERATOR):
            calls[f"{name}:{frame.f_code.co_qualname}"] += 1

    for step in (1, 2, 3):
        version = f"{tensors}-v{step}"
        for shard, data in zip(held, weights_of(tensors, step).values(), strict=True):
            shard.data[...] = data
        await create_version(world.control, version, ["s0"])
        await trainer.publish(version, "s0", held)
        if step == 3:
            sys.setprofile(count)
        try:
            staged = await client.stage_weight(version)
        finally:
            sys.setprofile(None)
        await client.apply_weight(staged)
        held_now = {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}
        assert held_now == as_bytes(weights_of(tensors, step))
    assert client._parts.planning.plans_made == 1
    return calls


async def test_staging_a_warm_version_costs_the_same_calls_for_any_number_of_shards(world: World) -> None:
    few = await calls_of_a_warm_stage(world, 16)
    many = await calls_of_a_warm_stage(world, 1024)
    assert few.total() > 50
    # Waiting takes a few calls more or less; a loop over the shards would take a thousand more.
    grown = {name: (few[name], count) for name, count in many.items() if count > few[name] + 20}
    assert not grown
