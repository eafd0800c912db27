"""Putting aliases of several ranks together again, and specs that are shorter to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from modelexpress_rl.train.engines.megatron import HfTensor, MegatronTensorSpec, build_hf_aliases


def to_dicts(tensors: Iterable[HfTensor]) -> list[dict[str, Any]]:
    """The facts of `tests/data/megatron_aliases.json`: no addresses, no agent."""
    return [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "elsize": tensor.elsize,
            "full_shape": list(tensor.full_shape),
            "shards": [
                {"shard_offset": list(shard.shard_offset), "shape": list(shard.shape)}
                for shard in tensor.shards
            ],
        }
        for tensor in tensors
    ]


def assemble(ranks: Iterable[Iterable[HfTensor]]) -> dict[str, torch.Tensor]:
    """Full tensors from the boxes of all ranks; every element must be covered exactly once."""
    full: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for tensors in ranks:
        for tensor in tensors:
            for shard in tensor.shards:
                assert shard.view.is_contiguous()
                assert shard.view.data_ptr() == shard.addr
                assert tuple(shard.view.shape) == shard.shape
                out = full.setdefault(tensor.name, torch.zeros(tensor.full_shape, dtype=shard.view.dtype))
                seen = covered.setdefault(tensor.name, torch.zeros(tensor.full_shape, dtype=torch.int32))
                assert tuple(out.shape) == tensor.full_shape
                box = tuple(slice(o, o + n) for o, n in zip(shard.shard_offset, shard.shape, strict=True))
                out[box] = shard.view
                seen[box] += 1
    for name, seen in covered.items():
        assert bool((seen == 1).all()), f"{name} is not covered exactly once"
    return full


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(
            left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
        )
    )


def numbered(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """A tensor whose elements all differ, in any dtype: their bit patterns count up."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    size = torch.empty((), dtype=dtype).element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return torch.arange(start, start + count).to(integer).view(dtype).reshape(shape)


def sharded(
    name: str,
    role: str,
    full: torch.Tensor,
    hf_names: Sequence[str],
    axis: int,
    size: int,
    rank: int,
    extras: Mapping[str, Any] | None = None,
) -> MegatronTensorSpec:
    """Rank `rank` of `size` holds its equal part of `axis`, as a tensor of its own."""
    extent = full.shape[axis] // size
    return MegatronTensorSpec(
        name=name,
        tensor=full.narrow(axis, rank * extent, extent).clone(),
        role=role,
        hf_names=tuple(hf_names),
        global_shape=tuple(full.shape),
        placement_kind="SHARD",
        shard_axis=axis,
        local_shard_range=(rank * extent, (rank + 1) * extent),
        extras=extras or {},
    )


def aliases(*specs: MegatronTensorSpec) -> tuple[HfTensor, ...]:
    return build_hf_aliases(specs, "agent")
