"""Ranks without their processes, what an adapter publishes, and putting the ranks' boxes together."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.timing import RefitTimings
from modelexpress_rl.train.adapter import SourceBox, StagedWeightVersionShardData
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.engines.fsdp.adapter import FSDPAdapter
from modelexpress_rl.train.staging import OneStaging, Stager
from modelexpress_rl.version import WeightVersionRef


@contextlib.contextmanager
def rank_of(world_size: int, rank: int) -> Iterator[None]:
    """This process as one rank of a group that never communicates."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(full: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """This rank's part of a tensor that every rank knows: torch itself cuts it, nothing is sent."""
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def read(dtype: str, addr: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A copy of what lies at an address of this process."""
    out = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    ctypes.memmove(out.data_ptr(), addr, out.nbytes) if out.nbytes else None
    return out


class Part:
    """A box of a published tensor, with its bytes as they were when it was looked at."""

    def __init__(self, name: str, dtype: str, full_shape: Any, offset: Any, shape: Any, addr: int) -> None:
        self.name, self.full_shape, self.offset, self.shape = name, full_shape, offset, shape
        self.values = read(dtype, addr, shape)


def parts_of_boxes(boxes: Iterable[SourceBox]) -> list[Part]:
    return [Part(b.name, b.dtype, b.full_shape, b.offset, b.shape, b.addr) for b in boxes]


def parts_of_manifest(data: StagedWeightVersionShardData) -> list[Part]:
    """What a reader of the manifest finds."""
    table = manifests.decode(data.manifest.data).table
    found = []
    for row in range(len(table)):
        tensor = int(table.tensor[row])
        names = table.tensors
        offset, shape = table.box(row)
        found.append(
            Part(
                names.names[tensor],
                names.dtypes[tensor],
                names.shape(tensor),
                offset,
                shape,
                int(table.addr[row]),
            )
        )
    return found


def assemble(ranks: Iterable[Iterable[Part]]) -> dict[str, torch.Tensor]:
    """Full tensors from the boxes of all ranks; each element is covered, and replicas agree."""
    full: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for part in parts:
            out = full.setdefault(part.name, torch.zeros(part.full_shape, dtype=part.values.dtype))
            seen = covered.setdefault(part.name, torch.zeros(part.full_shape, dtype=torch.bool))
            assert (tuple(out.shape), out.dtype) == (part.full_shape, part.values.dtype)
            box = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
            where = seen[box]
            assert torch.equal(as_bytes(out[box][where]), as_bytes(part.values[where])), part.name
            out[box] = part.values
            seen[box] = True
    for name, seen in covered.items():
        assert bool(seen.all()), f"{name} is not covered"
    return full


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def differing(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not the same, byte for byte, dtype and shape included."""
    names = [*left, *(name for name in right if name not in left)]
    return [
        name
        for name in names
        if name not in left
        or name not in right
        or (left[name].dtype, left[name].shape) != (right[name].dtype, right[name].shape)
        or not torch.equal(as_bytes(left[name]), as_bytes(right[name]))
    ]


async def staged(
    adapter: FSDPAdapter,
    stager: Stager,
    mode: TrainerStagingMode = TrainerStagingMode.COPY_TO_HOST,
    version: str = "v1",
) -> StagedWeightVersionShardData:
    """Stage as the client does."""
    record = RefitTimings("trainer").begin(version)
    one = OneStaging(stager, mode, version_id=version, timeout_s=5.0, record=record)
    return await adapter.stage_shard(WeightVersionRef(version), one)


def numbered(*shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    """Values that all differ in float32, and that rounding to bfloat16 changes."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(start, start + count, dtype=torch.float64) * 1.0078125).to(dtype).reshape(shape)
