"""Fused QKV against a plain construction of it, for every way in which ranks may cut it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelexpress_rl.train.engines.megatron import HfTensor, MegatronTensorSpec, build_hf_aliases
from tests.train.megatron.support import assemble, numbered, same_bytes, sharded

NAMES = ("q_proj", "k_proj", "v_proj")


def extras(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"qkv_interleave": "by_head", "head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}


def parts_and_fused(
    heads: int, kv_heads: int, head_dim: int, *tail: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v as Hugging Face has them, and Megatron's fused tensor made from them head by head."""
    rows = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    q, k, v = (numbered(n, *tail, start=100_000 * i) for i, n in enumerate(rows))
    fused = []
    for group in range(kv_heads):
        heads_of_group = range(group * heads // kv_heads, (group + 1) * heads // kv_heads)
        fused.extend(q[head * head_dim : (head + 1) * head_dim] for head in heads_of_group)
        fused.append(k[group * head_dim : (group + 1) * head_dim])
        fused.append(v[group * head_dim : (group + 1) * head_dim])
    return [q, k, v], torch.cat(fused)


def ranks_of(fused: torch.Tensor, size: int, extra: dict[str, Any]) -> list[tuple[HfTensor, ...]]:
    return [
        build_hf_aliases([sharded("qkv", "qkv_column", fused, NAMES, 0, size, rank, extra)], f"r{rank}")
        for rank in range(size)
    ]


@pytest.mark.parametrize("tail", [(5,), ()], ids=["weight", "bias"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(8, 8, 4), (8, 2, 4), (8, 4, 4), (16, 1, 8), (64, 2, 8), (24, 8, 2), (40, 8, 4), (6, 2, 4), (12, 4, 2)],
)
def test_all_ranks_together_give_q_k_v(
    heads: int, kv_heads: int, head_dim: int, size: int, tail: tuple[int, ...]
) -> None:
    parts, fused = parts_and_fused(heads, kv_heads, head_dim, *tail)
    assert fused.shape[0] % size == 0
    full = assemble(ranks_of(fused, size, extras(heads, kv_heads, head_dim)))
    for name, part in zip(NAMES, parts, strict=True):
        assert same_bytes(full[name], part)


def test_fewer_kv_heads_than_ranks() -> None:
    """64 query heads, 2 KV heads, TP 8: 1088 rows per rank, so that heads are cut in half."""
    heads, kv_heads, head_dim, size = 64, 2, 128, 8
    parts, fused = parts_and_fused(heads, kv_heads, head_dim, 1)
    ranks = ranks_of(fused, size, extras(heads, kv_heads, head_dim))
    held = [{t.name for t in rank} for rank in ranks]
    assert held == [{"q_proj"}] * 3 + [set(NAMES)] + [{"q_proj"}] * 3 + [set(NAMES)]
    assert [t.shards[0].shard_offset[0] for rank in ranks for t in rank if t.name == "k_proj"] == [0, 128]
    assert ranks[1][0].shards[0].shard_offset[0] % head_dim != 0
    full = assemble(ranks)
    for name, part in zip(NAMES, parts, strict=True):
        assert same_bytes(full[name], part)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_older_local_extras_give_the_same_boxes(size: int) -> None:
    parts, fused = parts_and_fused(8, 4, 4, 3)
    older = {"head_dim": 4, "num_heads_local": 8 // size, "num_kv_heads_local": 4 // size}
    full = assemble(ranks_of(fused, size, older))
    for name, part in zip(NAMES, parts, strict=True):
        assert same_bytes(full[name], part)


def test_older_local_extras_of_a_whole_tensor() -> None:
    parts, fused = parts_and_fused(8, 4, 4, 3)
    older = {"head_dim": 4, "num_heads_local": 8, "num_kv_heads_local": 4}
    spec = MegatronTensorSpec("qkv", fused, "qkv_column", NAMES, tuple(fused.shape), extras=older)
    full = assemble([build_hf_aliases([spec], "agent")])
    assert [same_bytes(full[n], p) for n, p in zip(NAMES, parts, strict=True)] == [True] * 3


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in extras(8, 2, 4).items() if k != key}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, r"missing QKV extras qkv_interleave, head_dim, num_heads, num_kv_heads: .*got none"),
        (without("head_dim"), r"missing QKV extras head_dim: expected .*num_kv_heads_local"),
        (without("num_heads"), r"missing QKV extras num_heads: "),
        (without("num_kv_heads"), r"missing QKV extras num_kv_heads: "),
        (without("qkv_interleave"), r"missing QKV extras qkv_interleave: "),
        (extras(8, 2, 4) | {"qkv_interleave": "blocks"}, r"qkv_interleave must be by_head, got 'blocks'"),
        (extras(8, 2, 4) | {"head_dim": 0}, r"head_dim must be a whole number of at least 1, got 0"),
        (extras(8, 2, 4) | {"num_heads": 7}, r"7 query heads can't be divided among 2 KV heads"),
        (extras(8, 2, 4) | {"num_heads": 6}, r"make 40 fused rows, global_shape is \(48, 3\)"),
        ({"head_dim": 4, "num_heads_local": 3, "num_kv_heads_local": 1}, r"make 40 fused rows"),
        ({"head_dim": 4, "num_heads_local": 4}, r"missing QKV extras"),
    ],
)
def test_refusals_name_the_tensor_and_the_extras(changed: dict[str, Any], problem: str) -> None:
    _, fused = parts_and_fused(8, 2, 4, 3)
    spec = sharded("decoder.layers.3.linear_qkv.weight", "qkv_column", fused, NAMES, 0, 2, 0, changed)
    with pytest.raises(ValueError, match=rf"^decoder\.layers\.3\.linear_qkv\.weight: .*{problem}"):
        build_hf_aliases([spec], "agent")


def test_numbers_may_be_decimal_strings() -> None:
    parts, fused = parts_and_fused(8, 2, 4, 3)
    text = {key: str(value) for key, value in extras(8, 2, 4).items()}
    assert same_bytes(assemble(ranks_of(fused, 2, text))["k_proj"], parts[1])


def test_two_names_are_refused() -> None:
    _, fused = parts_and_fused(8, 2, 4, 3)
    spec = sharded("w", "qkv_column", fused, ("q", "k"), 0, 2, 0, extras(8, 2, 4))
    with pytest.raises(ValueError, match=r"^w: a fused QKV tensor needs the hf_names of q, k and v"):
        build_hf_aliases([spec], "agent")


def test_sharding_on_columns_is_refused() -> None:
    _, fused = parts_and_fused(8, 2, 4, 4)
    spec = sharded("w", "qkv_column", fused, NAMES, 1, 2, 0, extras(8, 2, 4))
    with pytest.raises(ValueError, match=r"^w: a fused QKV tensor is sharded on axis 0, got shard_axis 1"):
        build_hf_aliases([spec], "agent")
