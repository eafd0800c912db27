"""Need tables: which boxes a generator rank loads, and where each lies in its staging arena."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import numpy as np

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.geometry import (
    DTYPE_SIZE_BYTES,
    MAX_EXTENT,
    MAX_RANK,
    Int,
    UInt,
    is_extent,
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
        names, dtypes = [row.name for row in rows], [row.dtype for row in rows]
        offsets, shapes = [row.offset for row in rows], [row.shape for row in rows]
        columns = _columns(dtypes, offsets, shapes)
        if columns is None:
            _refuse_impossible(rows, owner)
        rank, offset, shape = columns
        index: defaultdict[str, int] = defaultdict(count().__next__)  # a new name gets the next number
        tensor = np.fromiter(map(index.__getitem__, names), np.int64, len(rows))
        dtype_of = dict(zip(reversed(names), reversed(dtypes), strict=True))  # of its first need
        if len(set(dtypes)) > 1 and list(map(dtype_of.__getitem__, names)) != dtypes:
            row = next(row for row in rows if row.dtype != dtype_of[row.name])
            raise UsageError(f"tensor {row.name!r}: needed both as {dtype_of[row.name]} and {row.dtype}")
        elsize = np.fromiter(map(DTYPE_SIZE_BYTES.__getitem__, dtypes), np.int64, len(rows))
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
            names=tuple(index),
            dtypes=tuple(map(dtype_of.__getitem__, index)),
            tensor=tensor,
            elsize=elsize,
            rank=rank,
            offset=offset,
            shape=shape,
            local_offset=places,
            arena_bytes=int(ends.max()) if len(rows) else 0,
        )


def _columns(
    dtypes: Sequence[str], offsets: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]
) -> tuple[Int, Int, Int] | None:
    """Ranks, offsets and shapes, looked through all rows at once; None where one is not possible."""
    ranks = list(map(len, shapes))
    width = max(1, max(ranks, default=1))
    if width > MAX_RANK or list(map(len, offsets)) != ranks or not DTYPE_SIZE_BYTES.keys() >= set(dtypes):
        return None
    try:
        offset, shape = padded(offsets, width, 0), padded(shapes, width, 1)
    except (OverflowError, TypeError):
        return None
    if min(offset.min(initial=0), shape.min(initial=0)) < 0:
        return None
    if max(offset.max(initial=0), shape.max(initial=0)) > MAX_EXTENT:
        return None
    return np.array(ranks, np.int64), offset, shape


def _refuse_impossible(rows: Iterable[Need], owner: str) -> NoReturn:
    for row in rows:
        if row.dtype not in DTYPE_SIZE_BYTES:
            raise UsageError(f"tensor {row.name!r}: {owner} needs unknown dtype {row.dtype!r}")
        if len(row.offset) != len(row.shape) or len(row.shape) > MAX_RANK:
            raise UsageError(f"tensor {row.name!r}: offset {row.offset} and shape {row.shape} differ in rank")
        if any(not is_extent(x) for x in (*row.offset, *row.shape)):
            raise UsageError(f"tensor {row.name!r}: box {row.offset} {row.shape} is out of range")
    raise AssertionError("unreachable: every need is possible")


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
