"""Arithmetic on columns of boxes: intersection, overlap, subtraction. Pure numpy, any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from modelexpress_rl.reshard.geometry import Bool, Int, volumes

PAIRS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Non-empty intersections of targets with boxes, in target order: indices, `lo` and `hi` corners."""

    target: Int
    box: Int
    lo: Int
    hi: Int

    def __len__(self) -> int:
        return len(self.target)

    @property
    def volume(self) -> Int:
        """Elements of each piece."""
        return volumes(self.hi - self.lo)

    def take(self, rows: Int | Bool) -> Pieces:
        """The pieces at `rows`."""
        return Pieces(self.target[rows], self.box[rows], self.lo[rows], self.hi[rows])


def concatenated(parts: Sequence[Pieces], width: int) -> Pieces:
    """Pieces of several tables as one."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return Pieces(empty, empty, np.zeros((0, width), np.int64), np.zeros((0, width), np.int64))
    if len(parts) == 1:
        return parts[0]
    return Pieces(
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.box for part in parts]),
        np.concatenate([part.lo for part in parts]),
        np.concatenate([part.hi for part in parts]),
    )


def expand(starts: Int, counts: Int) -> tuple[Int, Int]:
    """For each i, the indices starts[i] .. starts[i] + counts[i] - 1: (i repeated, the indices)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner] + starts[owner]


def _blocks(counts: Int, at_once: int) -> Iterator[slice]:
    """Cut rows into slices whose counts sum to about `at_once`, at least one row each."""
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + at_once, side="right")))
        yield slice(begin, end)
        begin = end


def intersect(
    target_lo: Int, target_hi: Int, first_box: Int, box_count: Int, box_lo: Int, box_hi: Int
) -> Pieces:
    """Intersect target i with the boxes first_box[i] .. first_box[i] + box_count[i] - 1.

    Empty intersections are left out. Memory is bounded by `PAIRS_AT_ONCE` pairs and the result.
    """
    found = []
    for rows in _blocks(box_count, PAIRS_AT_ONCE):
        target, box = expand(first_box[rows], box_count[rows])
        target += rows.start
        lo = np.maximum(target_lo[target], box_lo[box])
        hi = np.minimum(target_hi[target], box_hi[box])
        pieces = Pieces(target, box, lo, hi)
        meets: Bool = np.logical_and.reduce(lo < hi, axis=1)
        found.append(pieces if meets.all() else pieces.take(meets))
    return concatenated(found, target_lo.shape[1])


def overlapping_targets(pieces: Pieces, targets: int) -> Bool:
    """Say for each target whether any two of its pieces share an element.

    A sweep: along the axis in which a target is cut most often, only pieces whose intervals meet are
    compared in full, so a target cut into n slices costs n comparisons, not n squared.
    """
    flagged = np.zeros(targets, np.bool_)
    several = pieces.take(np.bincount(pieces.target, minlength=targets)[pieces.target] > 1)
    if not len(several):
        return flagged
    axis = _sweep_axis(several, targets)[several.target]
    rows = np.arange(len(several))
    lo, hi = several.lo[rows, axis], several.hi[rows, axis]
    # Ranks instead of coordinates, so that (target, coordinate) fits one integer whatever the extents.
    values, ranks = np.unique(np.concatenate([lo, hi]), return_inverse=True)
    begin = several.target * len(values) + ranks[: len(lo)]
    end = several.target * len(values) + ranks[len(lo) :]
    order = np.argsort(begin, kind="stable")
    begin, end, sorted_pieces = begin[order], end[order], several.take(order)
    after = np.searchsorted(begin, end, side="left")  # the first piece that begins at or past my end
    counts = after - rows - 1
    for block in _blocks(counts, PAIRS_AT_ONCE):
        a, b = expand(rows[block] + 1, counts[block])
        a += block.start
        meets = (
            (sorted_pieces.lo[a] < sorted_pieces.hi[b]) & (sorted_pieces.lo[b] < sorted_pieces.hi[a])
        ).all(axis=1)
        flagged[sorted_pieces.target[a[meets]]] = True
    return flagged


def _sweep_axis(pieces: Pieces, targets: int) -> Int:
    """For each target, the axis along which its pieces begin at the most distinct places."""
    distinct = np.zeros((targets, pieces.lo.shape[1]), np.int64)
    for axis in range(pieces.lo.shape[1]):
        order = np.lexsort((pieces.lo[:, axis], pieces.target))
        target, lo = pieces.target[order], pieces.lo[order, axis]
        fresh = np.ones(len(order), np.bool_)
        fresh[1:] = (target[1:] != target[:-1]) | (lo[1:] != lo[:-1])
        distinct[:, axis] = np.bincount(target[fresh], minlength=targets)
    out: Int = distinct.argmax(axis=1)
    return out


def covered_volume(pieces: Pieces, targets: int) -> Int:
    """Elements of all pieces of each target; counts an element as often as pieces hold it."""
    out = np.zeros(targets, np.int64)
    np.add.at(out, pieces.target, pieces.volume)
    return out


Corner = tuple[int, ...]
CornerBox = tuple[Corner, Corner]


def subtract(box: CornerBox, hole: CornerBox) -> list[CornerBox]:
    """Return disjoint boxes that cover `box` without `hole`; corners are (lo, hi)."""
    (lo, hi), (hole_lo, hole_hi) = box, hole
    if any(a >= d or c >= b for a, b, c, d in zip(lo, hi, hole_lo, hole_hi, strict=True)):
        return [box]
    rest: list[CornerBox] = []
    for axis in range(len(lo)):
        if lo[axis] < hole_lo[axis]:
            rest.append((lo, (*hi[:axis], hole_lo[axis], *hi[axis + 1 :])))
            lo = (*lo[:axis], hole_lo[axis], *lo[axis + 1 :])
        if hole_hi[axis] < hi[axis]:
            rest.append(((*lo[:axis], hole_hi[axis], *lo[axis + 1 :]), hi))
            hi = (*hi[:axis], hole_hi[axis], *hi[axis + 1 :])
    return rest
