"""Need tables: which boxes a generator rank loads, and where each lies in its staging arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.geometry import (
    DTYPE_SIZE_BYTES,
    MAX_EXTENT,
    MAX_RANK,
    Int,
    UInt,
    padded,
    unpadded,
    volume_estimates,
    volumes,
)


@dataclass(frozen=True, slots=True)
class Need:
    """One box of one tensor that a generator rank loads, packed row-major in its staging arena."""

    name: str
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NeedTable:
    """What one generator rank loads, and where in its staging arena each box goes.

    Need i is the box (`offset[i]`, `shape[i]`) of tensor `names[tensor[i]]`, of `dtypes[tensor[i]]`;
    it lies row-major at `local_offset[i]` bytes from the start of the arena. `owner` names the rank
    in errors.
    """

    owner: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    tensor: Int
    elsize: Int
    rank: Int
    offset: Int
    shape: Int
    local_offset: UInt
    arena_bytes: int

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def width(self) -> int:
        """The column width of every box of this table."""
        return int(self.offset.shape[1])

    @property
    def size_bytes(self) -> Int:
        """Bytes of each need."""
        return volumes(self.shape) * self.elsize

    def name(self, need: int) -> str:
        """The tensor's name of one need."""
        return self.names[int(self.tensor[need])]

    def box(self, need: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of one need, unpadded."""
        rank = int(self.rank[need])
        return unpadded(self.offset[need], rank), unpadded(self.shape[need], rank)

    @classmethod
    def build(
        cls,
        needs: Iterable[Need],
        *,
        owner: str = "this rank",
        align_bytes: int = 64,
        local_offsets: Sequence[int] | None = None,
    ) -> NeedTable:
        """Lay the needs out in an arena, in order, each at a multiple of `align_bytes`.

        `local_offsets` gives the places instead; they must not overlap.

        Raises:
            UsageError: a need is not possible, two needs of one tensor differ in dtype, or places
                overlap; the message names the tensor.
        """
        rows = list(needs)
        dtype_of: dict[str, str] = {}
        for row in rows:
            if row.dtype not in DTYPE_SIZE_BYTES:
                raise UsageError(f"tensor {row.name!r}: {owner} needs unknown dtype {row.dtype!r}")
            if dtype_of.setdefault(row.name, row.dtype) != row.dtype:
                raise UsageError(f"tensor {row.name!r}: needed both as {dtype_of[row.name]} and {row.dtype}")
            if len(row.offset) != len(row.shape) or len(row.shape) > MAX_RANK:
                raise UsageError(
                    f"tensor {row.name!r}: offset {row.offset} and shape {row.shape} differ in rank"
                )
            if any(not 0 <= x <= MAX_EXTENT for x in (*row.offset, *row.shape)):
                raise UsageError(f"tensor {row.name!r}: box {row.offset} {row.shape} is out of range")
        index = {name: i for i, name in enumerate(dtype_of)}
        width = max([1, *(len(row.shape) for row in rows)])
        shape = padded([row.shape for row in rows], width, 1)
        elsize = np.array([DTYPE_SIZE_BYTES[row.dtype] for row in rows], np.int64)
        if (too_big := volume_estimates(shape) * elsize > MAX_EXTENT).any():
            row = rows[int(np.argmax(too_big))]
            raise UsageError(f"tensor {row.name!r}: box {row.shape} is too big for an arena")
        sizes = volumes(shape) * elsize
        if local_offsets is None:
            places = _packed(sizes, align_bytes)
        else:
            places = np.array(local_offsets, np.uint64)
            _refuse_overlaps(rows, places, sizes)
        ends = places + sizes.astype(np.uint64)
        return cls(
            owner=owner,
            names=tuple(dtype_of),
            dtypes=tuple(dtype_of.values()),
            tensor=np.array([index[row.name] for row in rows], np.int64),
            elsize=elsize,
            rank=np.array([len(row.shape) for row in rows], np.int64),
            offset=padded([row.offset for row in rows], width, 0),
            shape=shape,
            local_offset=places,
            arena_bytes=int(ends.max()) if len(rows) else 0,
        )


def _packed(sizes: Int, align_bytes: int) -> UInt:
    strides = (sizes + align_bytes - 1) // align_bytes * align_bytes
    places = np.zeros(len(sizes), np.uint64)
    np.cumsum(strides[:-1], out=places[1:], dtype=np.uint64)
    return places


def _refuse_overlaps(rows: Sequence[Need], places: UInt, sizes: Int) -> None:
    if len(places) != len(rows):
        raise UsageError(f"local_offsets: expected {len(rows)} places, got {len(places)}")
    held = np.flatnonzero(sizes > 0)
    order = held[np.argsort(places[held], kind="stable")]
    ends = places[order] + sizes[order].astype(np.uint64)
    clash = np.flatnonzero(ends[:-1] > places[order][1:])
    if len(clash):
        a, b = rows[order[clash[0]]], rows[order[clash[0] + 1]]
        raise UsageError(f"tensor {b.name!r}: its place in the arena overlaps the place of {a.name!r}")
