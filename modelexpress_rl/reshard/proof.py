"""Proof that a plan is whole: every needed element is covered exactly once, before a byte moves."""

from __future__ import annotations

from itertools import repeat
from operator import eq

import numpy as np

from modelexpress_rl.errors import GeometryError, IncompleteVersionError
from modelexpress_rl.reshard.boxes import (
    Corner,
    CornerBox,
    Pieces,
    covered_volume,
    overlapping_targets,
    subtract,
)
from modelexpress_rl.reshard.geometry import Bool, Int, unpadded, volumes, widened
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import Plan


def prove_needs(needs: NeedTable, merged: Merged, rows: Int) -> Int:
    """Return the tensor number in `merged` of each need in `rows`, having checked that it fits.

    Raises:
        IncompleteVersionError: nobody publishes a tensor.
        GeometryError: dtype or rank differ, or the box lies outside the global shape.
    """
    index = merged.tensors.index
    tensors = merged.tensors
    numbers = list(map(index.get, needs.names, repeat(-1)))
    number_of = np.array(numbers, np.int64)
    number = number_of[needs.tensor[rows]]
    if (unknown := number < 0).any():
        raise IncompleteVersionError(
            f"{_wanted(needs, int(rows[np.argmax(unknown)]))}, but none of the {len(merged.sources)} sources "
            f"has the tensor"
        )
    published = map((*tensors.dtypes, "").__getitem__, numbers)
    same_dtype = np.fromiter(map(eq, published, needs.dtypes), np.bool_, len(numbers)) | (number_of < 0)
    if (differs := ~same_dtype[needs.tensor[rows]]).any():
        need, tensor = int(rows[np.argmax(differs)]), int(number[np.argmax(differs)])
        raise GeometryError(
            f"{_wanted(needs, need)} as {needs.dtypes[needs.tensor[need]]}, {merged.publishers(tensor)} "
            f"publish {tensors.dtypes[tensor]}"
        )
    width = max(needs.width, tensors.width)
    offset, shape = widened(needs.offset[rows], width, 0), widened(needs.shape[rows], width, 1)
    full = widened(tensors.full_shape, width, 1)[number]
    wrong_rank: Bool = needs.rank[rows] != tensors.rank[number]
    outside: Bool = np.logical_or.reduce(shape > full - offset, axis=1)
    wrong = wrong_rank | outside
    if not wrong.any():
        return number
    at = int(np.argmax(wrong))
    need, tensor = int(rows[at]), int(number[at])
    reason = "does not have the rank of" if wrong_rank[at] else "lies outside"
    raise GeometryError(
        f"{_wanted(needs, need)}, which {reason} the global shape {tensors.shape(tensor)} of "
        f"{merged.publishers(tensor)}"
    )


def _wanted(needs: NeedTable, need: int) -> str:
    """Which tensor, who, and what of it: how every refusal of a need begins."""
    offset, shape = needs.box(need)
    return f"tensor {needs.name(need)!r}: {needs.owner} needs offset {offset} shape {shape}"


def prove_cover(
    pieces: Pieces, target_lo: Int, target_hi: Int, target_need: Int, needs: NeedTable, merged: Merged
) -> None:
    """Check that disjoint `pieces`, each inside its target, leave no element of a target out.

    Raises:
        IncompleteVersionError: they do; the message names the tensor, the rank and a missing box.
    """
    wanted = volumes(target_hi - target_lo)
    missing = wanted - covered_volume(pieces, len(target_lo))
    if not missing.any():
        return
    target = int(np.argmax(missing != 0))
    need = int(target_need[target])
    name, rank = needs.name(need), int(needs.rank[need])
    gap_lo, gap_hi = first_gap(pieces, target, target_lo[target], target_hi[target])
    tensor = merged.tensors.index[name]
    raise IncompleteVersionError(
        f"{_wanted(needs, need)}; nobody who may be read holds "
        f"offset {gap_lo[len(gap_lo) - rank :]} shape "
        f"{tuple(b - a for a, b in zip(gap_lo, gap_hi, strict=True))[len(gap_lo) - rank :]} of it "
        f"({int(missing[target])} of {int(wanted[target])} elements missing, "
        f"{int((missing != 0).sum())} of {len(missing)} boxes incomplete); it is published by "
        f"{merged.publishers(tensor)}"
    )


def first_gap(pieces: Pieces, target: int, lo: Int, hi: Int) -> CornerBox:
    """One box of a target that no piece covers."""
    rest: list[CornerBox] = [(corner(lo), corner(hi))]
    for row in np.flatnonzero(pieces.target == target).tolist():
        hole = (corner(pieces.lo[row]), corner(pieces.hi[row]))
        rest = [part for box in rest for part in subtract(box, hole)]
    return rest[0]


def corner(row: Int) -> Corner:
    """One row of coordinates as a tuple."""
    return tuple(row.tolist())


def prove_plan(plan: Plan, needs: NeedTable, merged: Merged) -> None:
    """Check a finished plan of all `needs` anew, from its pieces alone.

    Raises:
        GeometryError: a piece lies outside its need or its shard, or an element is read twice.
        IncompleteVersionError: an element is not read.
    """
    width = merged.tensors.width
    lo = widened(needs.offset, width, 0)
    hi = lo + widened(needs.shape, width, 1)
    table = plan.pieces
    piece_hi = table.offset + table.shape
    shard_lo = merged.shards.offset[table.row]
    inside = (
        (table.offset >= np.maximum(lo[table.need], shard_lo))
        & (piece_hi <= np.minimum(hi[table.need], shard_lo + merged.shards.shape[table.row]))
    ).all(axis=1)
    if not inside.all():
        piece = int(np.argmin(inside))
        need = int(table.need[piece])
        rank = int(needs.rank[need])
        offset, shape = unpadded(table.offset[piece], rank), unpadded(table.shape[piece], rank)
        raise GeometryError(
            f"{_wanted(needs, need)}; the plan reads offset {offset} shape {shape}, which lies outside that, "
            f"or outside its shard"
        )
    pieces = Pieces(table.need, table.row, table.offset, piece_hi)
    if (twice := overlapping_targets(pieces, len(needs))).any():
        need = int(np.argmax(twice))
        raise GeometryError(f"{_wanted(needs, need)}; the plan reads an element of it twice")
    prove_cover(pieces, lo, hi, np.arange(len(needs)), needs, merged)
