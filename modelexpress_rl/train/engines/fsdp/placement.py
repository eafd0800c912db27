"""Which elements of a DTensor one rank holds, as runs of global indices along each dimension.

A placement per mesh dimension cuts what is left of a dimension as `torch.chunk` does: pieces of the
rounded-up size, the last ones shorter or empty. They are applied from the first to the last, unless the
tensor says another order. A split factor (FSDP over tensor parallel) cuts into so many pieces first,
and takes its part of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

from modelexpress_rl.errors import UsageError

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Global indices [first, end) in the order in which they lie in the local tensor; none is empty."""


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the global tensor that the local one holds, at `local` in its own coordinates."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is cut over a mesh, and which part one rank holds.

    `order` are the mesh dimensions in the order in which their placements cut; `coordinate` is the
    rank's place in the mesh, None where it has none.
    """

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh_shape: tuple[int, ...]
    order: tuple[int, ...]
    coordinate: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds: the shape of its local tensor, and the boxes in it."""

    extents: tuple[int, ...]
    blocks: tuple[Block, ...]


@lru_cache(maxsize=1 << 12)
def part_of(layout: Layout) -> Part:
    """What the rank at the layout's coordinate holds.

    Raises:
        UsageError: a placement has no elements of its own (partial), or is of an unknown kind.
    """
    if layout.coordinate is None:
        return Part((), ())
    runs = held_runs(layout)
    return Part(tuple(_length(one) for one in runs), blocks_of(runs))


def held_runs(layout: Layout) -> tuple[Runs, ...]:
    """The runs of each dimension that the rank holds, which has a coordinate; raises as `part_of`."""
    assert layout.coordinate is not None
    runs: list[Runs] = [((0, extent),) if extent else () for extent in layout.shape]
    for mesh_dim in layout.order:
        placement = layout.placements[mesh_dim]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise UsageError(
                f"is placed as {placement!r}, each rank holds a summand and none the values; redistribute it "
                "to Shard or Replicate before it is published"
            )
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int) or not -len(runs) <= dim < len(runs):
            raise UsageError(f"placement {placement!r} is of an unknown kind")
        size, at = layout.mesh_shape[mesh_dim], layout.coordinate[mesh_dim]
        pieces = int(getattr(placement, "split_factor", 1))
        runs[dim] = _joined(_chunk(piece, size, at) for piece in _chunks(runs[dim], pieces))
    return tuple(runs)


def blocks_of(runs: Sequence[Runs]) -> tuple[Block, ...]:
    """The boxes that these runs make: one, where each dimension has one run; none, where one has none."""
    placed: list[list[tuple[int, int, int]]] = []
    for one in runs:
        at, of_dim = 0, []
        for first, end in one:
            of_dim.append((first, end - first, at))
            at += end - first
        placed.append(of_dim)
    return tuple(
        Block(
            offset=tuple(first for first, _, _ in chosen),
            shape=tuple(length for _, length, _ in chosen),
            local=tuple(at for _, _, at in chosen),
        )
        for chosen in product(*placed)
    )


def _length(runs: Runs) -> int:
    return sum(end - first for first, end in runs)


def _chunks(runs: Runs, count: int) -> list[Runs]:
    return [_chunk(runs, count, index) for index in range(count)]


def _chunk(runs: Runs, count: int, index: int) -> Runs:
    size = -(-_length(runs) // count)
    return _cut(runs, index * size, (index + 1) * size)


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """Positions [begin, end) of these runs."""
    found, at = [], 0
    for first, stop in runs:
        low, high = max(begin - at, 0), min(end - at, stop - first)
        if low < high:
            found.append((first + low, first + high))
        at += stop - first
    return tuple(found)


def _joined(parts: Iterable[Runs]) -> Runs:
    found: list[tuple[int, int]] = []
    for part in parts:
        for first, end in part:
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], end)
            else:
                found.append((first, end))
    return tuple(found)
