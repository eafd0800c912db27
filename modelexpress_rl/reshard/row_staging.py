"""Reading by whole rows where that is cheaper than many short runs, piece by piece.

A piece that is cut out of a shard's last axis, or that goes to strided places in the arena, is a run
for each row. Instead, whole contiguous rows of the shard can be read into a scratch region, and the
piece be copied out of them here. What crosses the wire is then more than what is needed (unless the
piece, or several together, are whole rows: then nothing is).

`choose` says for which pieces that is cheaper, cuts these so that each read fits a part of the scratch
region where the digests of the shard end, and joins those that want the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.cost import TransportCost
from modelexpress_rl.reshard.digests import tile_parts
from modelexpress_rl.reshard.geometry import Bool, Int, row_major_strides, volumes, widened
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.plan import PieceTable, Plan
from modelexpress_rl.reshard.split import narrow

SCRATCH_BYTES = 32 << 20  # of one part of the scratch region; bigger only where digests need it
MAX_SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Boxes of shards that are read whole, (rows, width) in the shards' own coordinates."""

    lo: Int
    shape: Int

    def take(self, rows: Int | Bool) -> Rows:
        """Those at `rows`."""
        return Rows(self.lo[rows], self.shape[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A plan whose pieces are cut as they will be read, and how each is read.

    `read[p]` is -1 where piece p is read exactly, else the number of the staged read that brings it.
    `rows` are the staged reads' boxes, `piece[r]` one piece of each.
    """

    plan: Plan
    read: Int
    rows: Rows
    piece: Int

    @property
    def read_bytes(self) -> Int:
        """Bytes of each staged read."""
        pieces = self.plan.pieces
        elsize = pieces.size_bytes[self.piece] // np.maximum(volumes(pieces.shape[self.piece]), 1)
        out: Int = volumes(self.rows.shape) * elsize
        return out


def choose(
    plan: Plan, merged: Merged, cost: TransportCost, *, max_read_bytes: int = MAX_SCRATCH_BYTES
) -> Choice:
    """Choose for every piece of a plan whether it is read exactly or by whole rows.

    No staged read is bigger than `max_read_bytes`; most are cut to `SCRATCH_BYTES` or less.
    """
    pieces = plan.pieces
    several = np.flatnonzero(pieces.run_count > 1)
    if not len(several):
        return exactly(plan)
    staged, rows = _cheaper(pieces, merged, cost, several, max_read_bytes)
    if not len(staged):
        return exactly(plan)
    cut = _cut(plan, merged, staged, rows, min(SCRATCH_BYTES, max_read_bytes))
    return _without(cut, cut.read_bytes > max_read_bytes)


def exactly(plan: Plan) -> Choice:
    """Read every piece as it is."""
    none = np.zeros((0, plan.pieces.offset.shape[1]), np.int64)
    return Choice(plan, np.full(len(plan.pieces), -1, np.int64), Rows(none, none), np.zeros(0, np.int64))


def _cheaper(
    pieces: PieceTable, merged: Merged, cost: TransportCost, several: Int, max_read_bytes: int
) -> tuple[Int, Rows]:
    """Of the pieces at `several`, those for which whole rows are cheaper, and which rows."""
    width = pieces.offset.shape[1]
    row, elsize = pieces.row[several], _elsize(pieces, several)
    shard = widened(merged.shards.shape[row], width, 1)
    lo = pieces.offset[several] - widened(merged.shards.offset[row], width, 0)
    shape, needed = pieces.shape[several], pieces.size_bytes[several]
    exact = Rows(lo, shape)
    whole = _extended(exact, shard)
    copied = cost.seconds(wire_bytes=0, copied_bytes=needed)
    by_runs = cost.seconds(wire_bytes=needed, runs=pieces.run_count[several])
    # The piece itself in scratch, in as few runs as its shard allows: where only the arena is strided.
    by_shard = cost.seconds(wire_bytes=needed, runs=_runs(exact, shard)) + copied
    wire = volumes(whole.shape) * elsize
    by_rows = cost.seconds(wire_bytes=wire, runs=_runs(whole, shard))
    least = _least_bytes(whole, shard, elsize)
    by_rows = np.where(least <= max_read_bytes, by_rows, np.inf)
    by_shard = np.where(_least_bytes(exact, shard, elsize) <= max_read_bytes, by_shard, np.inf)
    # Pieces that want the same rows share their read.
    group = _numbered(row, whole)
    alone = np.minimum(by_runs, by_shard)
    apart = np.bincount(group, weights=alone)
    first = _firsts(group)
    together = by_rows[first] + np.bincount(group, weights=copied)
    joined = (together < apart)[group]
    own = ~joined & (by_shard < by_runs)
    chosen = joined | own
    lo = np.where(joined[:, None], whole.lo, exact.lo)[chosen]
    return several[chosen], Rows(lo, np.where(joined[:, None], whole.shape, exact.shape)[chosen])


def _extended(piece: Rows, shard: Int) -> Rows:
    """The piece with the last axis along which it is cut taken whole, where that makes runs fewer."""
    cut = piece.shape != shard
    axis = cut.shape[1] - 1 - np.argmax(cut[:, ::-1], axis=1)
    at = np.arange(len(axis)), axis
    before = np.arange(cut.shape[1]) < axis[:, None]
    helps = cut.any(axis=1) & (np.where(before, piece.shape, 1).prod(axis=1) > 1)
    lo, shape = piece.lo.copy(), piece.shape.copy()
    lo[at] = np.where(helps, 0, lo[at])
    shape[at] = np.where(helps, shard[at], shape[at])
    return Rows(lo, shape)


def _inside(box: Int, shard: Int) -> Bool:
    """Which axes lie inside the runs of boxes of shards: every later one is taken whole."""
    inside = np.ones_like(box, np.bool_)
    inside[:, :-1] = np.logical_and.accumulate((box == shard)[:, :0:-1], axis=1)[:, ::-1]
    return inside


def _runs(rows: Rows, shard: Int) -> Int:
    out: Int = np.where(_inside(rows.shape, shard), 1, rows.shape).prod(axis=1)
    return out


def _grain(shard: Int, elsize: Int) -> Int:
    """How far the parts go in which shards are digested, along each axis; the last is never cut."""
    parts = tile_parts(shard, elsize)
    parts[:, -1] = 1
    out: Int = shard // parts
    return out


def _least_bytes(rows: Rows, shard: Int, elsize: Int) -> Int:
    """What is left of each when it is cut along every axis but the last where digests end."""
    parts = np.minimum(rows.shape, _grain(shard, elsize))
    parts[:, -1] = rows.shape[:, -1]
    out: Int = volumes(parts) * elsize
    return out


def _cut(plan: Plan, merged: Merged, staged: Int, rows: Rows, limit_bytes: int) -> Choice:
    """Cut the staged pieces, and their rows with them, until a read has at most `limit_bytes` or a grain."""
    pieces = plan.pieces
    width = pieces.offset.shape[1]
    index = np.full(len(pieces), -1, np.int64)
    index[staged] = np.arange(len(staged))
    source = np.arange(len(pieces))  # which piece of the plan each is a part of
    for axis in range(width - 1):
        on = np.flatnonzero(index >= 0)
        row, elsize = pieces.row[on], _elsize(pieces, on)
        shard = widened(merged.shards.shape[row], width, 1)
        own = rows.take(index[on])
        extent = own.shape[:, axis]
        size = volumes(own.shape) * elsize
        grain = _grain(shard, elsize)[:, axis]
        # An axis that the piece was extended along is not cut: the pieces that share the rows differ there.
        same = extent == pieces.shape[on, axis]
        step = np.maximum(limit_bytes // np.maximum(size // np.maximum(extent, 1) * grain, 1), 1) * grain
        begin, end = own.lo[:, axis], own.lo[:, axis] + extent
        # Nor is one inside a run that other axes before it lie in: its parts would be no single runs.
        before = (own.shape[:, :axis] == 1).all(axis=1)
        whole = same & (before | (pieces.count[on, axis] > 1))
        cuts = np.where(whole & (size > limit_bytes), -(-end // step) - begin // step, 1)
        if (cuts <= 1).all():
            continue
        count = np.ones(len(pieces), np.int64)
        count[on] = cuts
        piece, number = expand(np.zeros(len(pieces), np.int64), count)
        pieces = PieceTable(*(getattr(pieces, name)[piece] for name in PieceTable.__slots__))
        source, fresh = source[piece], index[piece]
        many = np.flatnonzero((count > 1)[piece])
        place = np.searchsorted(on, piece[many])
        from_ = np.maximum((begin[place] // step[place] + number[many]) * step[place], begin[place])
        to = np.minimum((begin[place] // step[place] + number[many] + 1) * step[place], end[place])
        narrow(pieces, many, np.full(len(many), axis), from_ - begin[place], to - from_)
        index = np.full(len(pieces), -1, np.int64)
        on = np.flatnonzero(fresh >= 0)
        rows, index[on] = rows.take(fresh[on]), np.arange(len(on))
        rows.lo[index[many], axis], rows.shape[index[many], axis] = from_, to - from_
    on = np.flatnonzero(index >= 0)
    own = rows.take(index[on])
    group = _numbered(pieces.row[on], own)
    first = _firsts(group)
    read = np.full(len(pieces), -1, np.int64)
    read[on] = group
    start = np.searchsorted(source, np.arange(len(plan.pieces) + 1))
    reads = tuple(
        replace(each, first=int(start[each.first]), last=int(start[each.last])) for each in plan.reads
    )
    return Choice(replace(plan, pieces=pieces, reads=reads), read, own.take(first), on[first])


def _without(choice: Choice, dropped: Bool) -> Choice:
    """Read the pieces of some staged reads exactly after all."""
    if not dropped.any():
        return choice
    number = np.where(dropped, -1, np.cumsum(~dropped) - 1)
    read = np.where(choice.read >= 0, number[choice.read], -1)
    return Choice(choice.plan, read, choice.rows.take(~dropped), choice.piece[~dropped])


def _elsize(pieces: PieceTable, at: Int) -> Int:
    out: Int = pieces.size_bytes[at] // np.maximum(volumes(pieces.shape[at]), 1)
    return out


def _numbered(row: Int, rows: Rows) -> Int:
    """Equal numbers for equal boxes of one shard."""
    keys = np.concatenate([row[:, None], rows.lo, rows.shape], axis=1)
    order = np.lexsort(keys.T)
    fresh = np.zeros(len(keys), np.int64)
    fresh[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    group = np.empty(len(keys), np.int64)
    group[order] = np.cumsum(fresh)
    return group


def _firsts(group: Int) -> Int:
    _, first = np.unique(group, return_index=True)
    return np.asarray(first, np.int64)


def scratch_strides(rows: Rows, elsize: Int) -> Int:
    """Byte strides of each read's box in scratch, where it lies packed."""
    out: Int = row_major_strides(rows.shape) * elsize[:, None]
    return out
