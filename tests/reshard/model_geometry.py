#!/usr/bin/env python3
"""Shard tables of real model shapes, for planner benchmarks and tests. Standard library only.

    python geometry.py qwen3-30b-a3b --trainer-tp 4 --trainer-ep 16 --generator-tp 4 > table.json

`tensors`: name, shape. `shards[rank]`: [tensor index, offset, shape] that a trainer rank publishes.
`needs[rank]`: [tensor index, offset, shape] that a generator rank loads. Boxes are in the tensor's
global coordinates; dtype is bfloat16 throughout. A Megatron trainer shards attention and dense
layers by TP (column: axis 0, row: axis 1), keeps whole experts by EP, and publishes replicated
tensors from TP rank 0. A generator with `--generator-ep` keeps whole experts; without it every
expert is sliced by TP.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass

Box = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0


MODELS = {
    "tiny-moe": Shape(2, 64, 8, 2, 8, 128, experts=8, expert_ffn=32),
    "tiny-dense": Shape(2, 64, 8, 2, 8, 128, dense_layers=2, dense_ffn=128),
    "llama-8b": Shape(32, 4096, 32, 8, 128, 128256, dense_layers=32, dense_ffn=14336),
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 151936, experts=128, expert_ffn=768),
    "moe-671b": Shape(
        61, 7168, 128, 128, 128, 129280, experts=256, expert_ffn=2048, dense_layers=3, dense_ffn=18432
    ),
}


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    axis: int | None  # the axis that TP shards, None where it is replicated
    expert: int | None = None


def tensors(model: Shape) -> Iterator[Tensor]:
    """Yield every tensor of `model` under its Hugging Face name."""
    hidden, q, kv = model.hidden, model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    yield Tensor("model.embed_tokens.weight", (model.vocab, hidden), 0)
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        yield Tensor(at + "input_layernorm.weight", (hidden,), None)
        yield Tensor(at + "self_attn.q_proj.weight", (q, hidden), 0)
        yield Tensor(at + "self_attn.k_proj.weight", (kv, hidden), 0)
        yield Tensor(at + "self_attn.v_proj.weight", (kv, hidden), 0)
        yield Tensor(at + "self_attn.o_proj.weight", (hidden, q), 1)
        yield Tensor(at + "post_attention_layernorm.weight", (hidden,), None)
        if layer < model.dense_layers:
            groups = [("mlp.", model.dense_ffn, None)]
        else:
            yield Tensor(at + "mlp.gate.weight", (model.experts, hidden), None)
            groups = [(f"mlp.experts.{e}.", model.expert_ffn, e) for e in range(model.experts)]
        for prefix, ffn, expert in groups:
            yield Tensor(at + prefix + "gate_proj.weight", (ffn, hidden), 0, expert)
            yield Tensor(at + prefix + "up_proj.weight", (ffn, hidden), 0, expert)
            yield Tensor(at + prefix + "down_proj.weight", (hidden, ffn), 1, expert)
    yield Tensor("model.norm.weight", (hidden,), None)
    yield Tensor("lm_head.weight", (model.vocab, hidden), 0)


def _slice(tensor: Tensor, size: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert tensor.axis is not None
    if tensor.shape[tensor.axis] < size:  # fewer rows than ranks: owners repeat
        return (0,) * len(tensor.shape), tensor.shape
    if tensor.shape[tensor.axis] % size:
        raise ValueError(f"{tensor.name}: {tensor.shape} does not divide by {size}")
    extent = tensor.shape[tensor.axis] // size
    offset, shape = [0] * len(tensor.shape), list(tensor.shape)
    offset[tensor.axis], shape[tensor.axis] = rank * extent, extent
    return tuple(offset), tuple(shape)


def trainer_shards(all_tensors: list[Tensor], experts: int, tp: int, ep: int) -> list[list[Box]]:
    """Return, for each of max(tp, ep) trainer ranks, the boxes that it publishes."""
    ranks: list[list[Box]] = []
    for rank in range(max(tp, ep)):
        boxes: list[Box] = []
        for index, t in enumerate(all_tensors):
            if t.expert is not None:
                if t.expert * ep // experts == rank % ep:
                    boxes.append((index, (0,) * len(t.shape), t.shape))
            elif t.axis is None:
                if rank == 0:
                    boxes.append((index, (0,) * len(t.shape), t.shape))
            else:
                boxes.append((index, *_slice(t, tp, rank % tp)))
        ranks.append(boxes)
    return ranks


def generator_needs(all_tensors: list[Tensor], experts: int, tp: int, ep: int) -> list[list[Box]]:
    """Return, for each of max(tp, ep) generator ranks, the boxes that it loads."""
    ranks: list[list[Box]] = []
    for rank in range(max(tp, ep)):
        boxes: list[Box] = []
        for index, t in enumerate(all_tensors):
            whole = (index, (0,) * len(t.shape), t.shape)
            if t.expert is not None and ep > 1:
                if t.expert * ep // experts == rank % ep:
                    boxes.append(whole)
            elif t.axis is None:
                boxes.append(whole)
            else:
                boxes.append((index, *_slice(t, tp, rank % tp)))
        ranks.append(boxes)
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--trainer-tp", type=int, default=1)
    parser.add_argument("--trainer-ep", type=int, default=1)
    parser.add_argument("--generator-tp", type=int, default=1)
    parser.add_argument("--generator-ep", type=int, default=1)
    args = parser.parse_args()
    model = MODELS[args.model]
    table = list(tensors(model))
    json.dump(
        {
            "model": args.model,
            "dtype": "bfloat16",
            "tensors": [[t.name, t.shape] for t in table],
            "shards": trainer_shards(table, model.experts, args.trainer_tp, args.trainer_ep),
            "needs": generator_needs(table, model.experts, args.generator_tp, args.generator_ep),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
