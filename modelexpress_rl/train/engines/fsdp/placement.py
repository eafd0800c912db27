"""Which elements of a DTensor one rank holds, as runs of global indices along each dimension.

A placement per mesh dimension, applied from the first to the last, cuts what is left of a dimension as
`torch.chunk` does: pieces of the rounded-up size, the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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


def held_runs(
    name: str,
    shape: Sequence[int],
    placements: Iterable[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[Runs, ...]:
    """The runs of each dimension that the rank at `coordinate` of the mesh holds.

    Raises:
        UsageError: a placement has no elements of its own (partial), or is of an unknown kind; the
            message names the tensor.
    """
    runs: list[Runs] = [((0, extent),) if extent else () for extent in shape]
    for placement, size, at in zip(placements, mesh_shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise UsageError(
                f"tensor {name!r}: is placed as {placement!r}, each rank holds a summand and none the "
                "values; redistribute it to Shard or Replicate before it is published"
            )
        dim = getattr(placement, "dim", None)
        if not isinstance(dim, int) or not -len(runs) <= dim < len(runs):
            raise UsageError(f"tensor {name!r}: placement {placement!r} is of an unknown kind")
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


def extents_of(runs: Iterable[Runs]) -> tuple[int, ...]:
    """The local shape that these runs make."""
    return tuple(_length(one) for one in runs)


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
