"""How much of a parameter a set of copies fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modelexpress_rl.inference.engines.torch.capture.strided import Aligned
from modelexpress_rl.reshard.geometry import Bool, Int


def unfilled(shape: Sequence[int], pieces: Sequence[Aligned]) -> int:
    """Elements of a tensor of `shape` that none of the pieces, aligned with it, reads or writes.

    Coordinates are compressed: memory grows with the cuts that the pieces make, not with the tensor.
    """
    if not shape:
        return 0 if pieces else 1
    coordinates = [[_coordinates(piece, axis) for piece in pieces] for axis in range(len(shape))]
    cuts = [_cuts(extent, own) for extent, own in zip(shape, coordinates, strict=True)]
    filled: Bool = np.zeros([len(own) - 1 for own in cuts], np.bool_)
    for number in range(len(pieces)):
        index = [_cells(cuts[axis], *coordinates[axis][number]) for axis in range(len(shape))]
        filled[np.ix_(*index)] = True
    left = (~filled).astype(np.int64)
    for own in reversed(cuts):
        left = left @ np.diff(own)
    return int(left)


def _coordinates(piece: Aligned, axis: int) -> tuple[Int, Int]:
    """The runs of coordinates that a piece has along one axis: where they begin and end."""
    runs, width = np.array([piece.begin[axis]], np.int64), 1
    for i in piece.along(axis):
        step, size = piece.step[i], piece.transfer.dims[i].size
        if step <= width:
            width += step * (size - 1)
        else:
            runs = (runs[None, :] + (np.arange(size, dtype=np.int64) * step)[:, None]).reshape(-1)
    return runs, runs + width


def _cuts(extent: int, runs: Sequence[tuple[Int, Int]]) -> Int:
    ends = np.array([0, extent], np.int64)
    return np.unique(np.concatenate([ends, *(each for pair in runs for each in pair)]))


def _cells(cuts: Int, begin: Int, end: Int) -> Int:
    """The numbers of the cells between cuts that runs cover."""
    first, last = np.searchsorted(cuts, begin), np.searchsorted(cuts, end)
    if len(first) == 1:
        return np.arange(int(first[0]), int(last[0]))
    return np.unique(np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]))
