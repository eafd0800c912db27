"""Ranks of an engine refit through their own `load_weights`: what is read, what is installed, what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from modelexpress_rl.errors import IncompleteVersionError
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.inference.engines.torch.capture import CaptureRefused
from tests.inference.capture.models import Engine, Parallel, Shape, checkpoint
from tests.inference.capture.support import Loads, parameter, raw, state
from tests.inference.publisher import create_version, whole
from tests.inference.world import World, halves

pytestmark = pytest.mark.anyio

SHAPE = Shape()


def step(number: int) -> dict[str, torch.Tensor]:
    """The weights after a step: another value in every element."""
    return {name: tensor + 0.25 * number for name, tensor in checkpoint(SHAPE).items()}


def rows(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return tensor.chunk(parts)[part]


def columns(tensor: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return tensor.chunk(parts, dim=1)[part]


def gathered_and_sliced(t: dict[str, torch.Tensor], p: Parallel) -> dict[str, torch.Tensor]:
    """What each parameter of a rank must hold, without any `load_weights`."""
    padded = torch.zeros(24 if p.size == 1 else 32, SHAPE.hidden)
    padded[: SHAPE.vocabulary] = t["embed_tokens.weight"]
    out = {"embed_tokens.weight": rows(padded, p.rank, p.size)}
    kv_parts = min(p.size, SHAPE.kv_heads)
    kv = p.rank * kv_parts // p.size
    own = SHAPE.experts // p.expert_size
    experts = range(p.expert_rank * own, (p.expert_rank + 1) * own)
    for i in range(SHAPE.layers):
        at = f"layers.{i}"
        q = rows(t[f"{at}.q_proj.weight"], p.rank, p.size)
        k, v = (rows(t[f"{at}.{name}_proj.weight"], kv, kv_parts) for name in "kv")
        out[f"{at}.qkv_proj.weight"] = torch.cat([q, k, v])
        out[f"{at}.o_proj.weight"] = columns(t[f"{at}.o_proj.weight"], p.rank, p.size)
        gate, up = (rows(t[f"{at}.{name}_proj.weight"], p.rank, p.size) for name in ("gate", "up"))
        out[f"{at}.gate_up_proj.weight"] = torch.cat([gate, up])
        out[f"{at}.down_proj.weight"] = columns(t[f"{at}.down_proj.weight"], p.rank, p.size)
        out[f"{at}.norm.weight"] = t[f"{at}.norm.weight"].to(torch.bfloat16)
        named = [f"{at}.experts.{e}" for e in experts]
        out[f"{at}.experts.w13"] = torch.stack(
            [torch.cat([rows(t[f"{n}.{x}.weight"], p.rank, p.size) for x in ("gate", "up")]) for n in named]
        )
        out[f"{at}.experts.w2"] = torch.stack([columns(t[f"{n}.down.weight"], p.rank, p.size) for n in named])
    return out


def held(tensors: dict[str, torch.Tensor], part: int) -> Any:
    return halves({name: tensor.numpy() for name, tensor in tensors.items()}, part)


@pytest.mark.parametrize("parallel", [Parallel(1, 2), Parallel(3, 4, 1, 2), Parallel()], ids=str)
async def test_a_rank_reads_its_bytes_and_holds_them(world: World, parallel: Parallel) -> None:
    model = Engine(SHAPE, parallel)
    client = await world.generator(model)  # by capture: the module has a load_weights
    trainers = [await world.trainer(f"t{part}") for part in (0, 1)]
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    loaders = set()
    for number in (1, 2):
        tensors = step(number)
        await create_version(world.control, f"v{number}", ["s0", "s1"])
        for part, trainer in enumerate(trainers):
            await trainer.publish(f"v{number}", f"s{part}", held(tensors, part))
        before = state(model)
        staged = await client.stage_weight(f"v{number}")
        assert state(model) == before
        loaders.add(client._parts.planning._loader)
        await client.apply_weight(staged)
        expected = gathered_and_sliced(tensors, parallel)
        assert set(expected) == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            assert raw(p) == raw(expected[name]), name
        # Each element that is loaded, once, as it is published (float32); zeros of the padding are made here.
        loaded = sum(t.numel() for t in expected.values()) - int((expected["embed_tokens.weight"] == 0).sum())
        assert staged.metrics["needed_bytes"] == 4 * loaded
        # What is read beyond that are rows of which the planner wanted columns, because they cost less.
        assert staged.metrics["bytes"] == 4 * loaded or parallel.size > 1
        assert model.lm_head.weight is model.embed_tokens.weight
    assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert len(loaders) == 1


async def test_a_refusal_comes_before_a_byte_moves_and_leaves_the_rank_serving(world: World) -> None:
    module = Loads(lambda self, named: self.p.data.copy_(named["p"] * 2), p=parameter(4, 2))
    client = await world.generator(module, initial_serving_version_id="v0")
    trainer = await world.trainer()
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole({"p": np.ones((4, 2), np.float32)}))
    before = state(module)
    with pytest.raises(CaptureRefused, match=r"'p' gets the result of aten.mul.Tensor on tensor 'p'"):
        await client.stage_weight("v1")
    await world.no_lease("v1")
    assert state(module) == before
    assert (client.serving_version_id, client.uncertain) == ("v0", False)
    assert client._parts.pool.allocations == 0


async def test_a_version_without_a_tensor_of_the_engine_is_refused_by_name(world: World) -> None:
    model = Engine(SHAPE, Parallel())
    client = await world.generator(model)
    trainer = await world.trainer()
    tensors = {n: t.numpy() for n, t in step(1).items() if n != "layers.1.experts.2.up.weight"}
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(tensors))
    with pytest.raises(IncompleteVersionError, match=r"384 of 3072 .*'layers.1.experts.w13'"):
        await client.stage_weight("v1")


async def test_the_whole_way_reads_everything_and_installs_the_same(world: World) -> None:
    model, tensors = Engine(SHAPE, Parallel(0, 2)), step(1)
    client = await world.generator(model, context=TorchGeneratorContext(model, load_weights_whole=True))
    trainer = await world.trainer()
    await create_version(world.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole({name: t.numpy() for name, t in tensors.items()}))
    staged = await client.stage_weight("v1")
    await client.apply_weight(staged)
    expected = gathered_and_sliced(tensors, Parallel(0, 2))
    assert {name: raw(p) for name, p in model.named_parameters()} == {n: raw(t) for n, t in expected.items()}
    assert staged.metrics["bytes"] == sum(t.nbytes for t in tensors.values())
