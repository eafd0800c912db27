"""From needs and merged shards to a plan: who is read for which bytes.

    needs -> prove that each is possible -> intersect with boxes -> make pieces disjoint
          -> prove that nothing is missing -> choose a holder of each -> byte runs by arithmetic

Everything is arithmetic on columns; only a need whose boxes overlap (publishers that shard the same
tensor in different ways) is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import GeometryError, UsageError
from modelexpress_rl.reshard.boxes import (
    CornerBox,
    Pieces,
    concatenated,
    intersect,
    overlapping_targets,
    subtract,
)
from modelexpress_rl.reshard.geometry import (
    Bool,
    Int,
    Source,
    row_major_strides,
    volumes,
    widened,
)
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan, SourceReads
from modelexpress_rl.reshard.proof import corner, prove_cover, prove_needs

MAX_FRAGMENTS = 4096

Nothing: frozenset[Source] = frozenset()
EverybodyAlike: Mapping[Source, int] = MappingProxyType({})


def plan(
    needs: NeedTable,
    merged: Merged,
    *,
    avoid: Collection[Source] = Nothing,
    only: Bool | None = None,
    spread: int = 0,
    distance: Mapping[Source, int] = EverybodyAlike,
) -> Plan:
    """Plan the reads of all needs, or of those where `only` is true, from sources not in `avoid`.

    Every element is read exactly once. A box that several sources hold is read from one of the nearest
    by `distance` (0 where it doesn't say), and bytes spread evenly over those; the choice is the same for
    the same arguments. Ranks that pass different numbers as `spread` begin with different holders.

    Raises:
        IncompleteVersionError: an element that is needed is held by nobody who may be read.
        GeometryError: a need does not fit its tensor, or boxes overlap in a way too fragmented to use.
    """
    rows = np.arange(len(needs)) if only is None else np.flatnonzero(only)
    width = max(needs.width, merged.tensors.width)
    lo = widened(needs.offset[rows], width, 0)
    hi = lo + widened(needs.shape[rows], width, 1)
    return _plan(needs, merged, rows, lo, hi, frozenset(avoid), spread, distance)


def replan(
    before: Plan,
    needs: NeedTable,
    merged: Merged,
    *,
    failed_sources: Collection[Source],
    landed: Bool,
    spread: int = 0,
    distance: Mapping[Source, int] = EverybodyAlike,
) -> Plan:
    """Plan again the pieces of `before` that are not `landed`, without `failed_sources`.

    `landed` is a mask over `before.pieces`: true for what need not be read again, because it landed
    or is still being read from a healthy source. `merged` may be a newer one of the same version.

    Raises:
        IncompleteVersionError: the other sources don't hold all that is left.
    """
    if landed.shape != before.pieces.need.shape:
        raise UsageError(f"landed: expected a mask of {len(before.pieces)} pieces, got shape {landed.shape}")
    left = np.flatnonzero(~landed)
    width = max(needs.width, merged.tensors.width)
    if before.pieces.offset.shape[1] > width:
        raise UsageError("merged: not of the version that was planned before")
    lo = widened(before.pieces.offset[left], width, 0)
    hi = lo + widened(before.pieces.shape[left], width, 1)
    avoid = frozenset(failed_sources)
    return _plan(needs, merged, before.pieces.need[left], lo, hi, avoid, spread, distance)


def _plan(
    needs: NeedTable,
    merged: Merged,
    target_need: Int,
    target_lo: Int,
    target_hi: Int,
    avoid: frozenset[Source],
    spread: int,
    distance: Mapping[Source, int],
) -> Plan:
    tensor = prove_needs(needs, merged, target_need)
    width = target_lo.shape[1]
    shard_lo = widened(merged.shards.offset, width, 0)
    shard_hi = shard_lo + widened(merged.shards.shape, width, 1)
    holders = _Holders.of(merged, avoid, distance)
    box_row = holders.rows[holders.first]
    first_box = holders.tensor_box_start[tensor]
    pieces = intersect(
        target_lo,
        target_hi,
        first_box,
        holders.tensor_box_start[tensor + 1] - first_box,
        shard_lo[box_row],
        shard_hi[box_row],
    )
    twice = overlapping_targets(pieces, len(target_lo))
    if twice.any():
        pieces = _disjoint(pieces, twice, target_lo, target_hi, target_need, needs, spread)
    prove_cover(pieces, target_lo, target_hi, target_need, needs, merged)
    size_bytes = pieces.volume * needs.elsize[target_need[pieces.target]]
    row = _choose(holders, merged, pieces.box, size_bytes, spread)
    table = _strided(needs, merged, target_need[pieces.target], row, pieces, size_bytes)
    needed = int((volumes(target_hi - target_lo) * needs.elsize[target_need]).sum())
    return Plan(needs.owner, table, _by_source(table, merged), needed)


class _Holders:
    """The boxes that somebody who may be read holds, and the rows of the nearest who do.

    Box b is at rows[first[b]] .. rows[first[b] + count[b] - 1].
    """

    __slots__ = ("count", "first", "rows", "tensor_box_start")

    def __init__(self, rows: Int, first: Int, count: Int, tensor_box_start: Int) -> None:
        self.rows, self.first, self.count = rows, first, count
        self.tensor_box_start = tensor_box_start

    @classmethod
    def of(cls, merged: Merged, avoid: frozenset[Source], distance: Mapping[Source, int]) -> _Holders:
        """Leave out the rows of `avoid`, those of holders farther than others, and boxes of nobody."""
        starts = merged.box_start
        alike = len({distance.get(source, 0) for source in merged.sources}) < 2
        if alike and avoid.isdisjoint(merged.sources):
            return cls(np.arange(len(merged.shards)), starts[:-1], np.diff(starts), merged.tensor_box_start)
        allowed = merged.source_rows(avoid)
        if not alike and len(allowed):
            far = np.array([distance.get(source, 0) for source in merged.sources], np.int64)
            of_row = np.where(allowed, far[merged.shards.source], np.iinfo(np.int64).max)
            allowed &= of_row == np.repeat(np.minimum.reduceat(of_row, starts[:-1]), np.diff(starts))
        before = np.concatenate([[0], np.cumsum(allowed)])
        count = before[starts[1:]] - before[starts[:-1]]
        held = count > 0
        boxes_before = np.concatenate([[0], np.cumsum(held)])
        return cls(
            rows=np.flatnonzero(allowed),
            first=before[starts[:-1]][held],
            count=count[held],
            tensor_box_start=boxes_before[merged.tensor_box_start],
        )


def _disjoint(
    pieces: Pieces,
    twice: Bool,
    target_lo: Int,
    target_hi: Int,
    target_need: Int,
    needs: NeedTable,
    spread: int,
) -> Pieces:
    """Cut the pieces of the targets flagged in `twice` so that they share no element.

    Where one box covers a whole target, one such box is taken; elsewhere the biggest piece first,
    and of the others what is left.
    """
    whole = ((pieces.lo == target_lo[pieces.target]) & (pieces.hi == target_hi[pieces.target])).all(axis=1)
    whole &= twice[pieces.target]
    candidates = np.flatnonzero(whole)
    target, first, count = np.unique(pieces.target[candidates], return_index=True, return_counts=True)
    taken = candidates[first + (target + spread) % np.maximum(count, 1)]
    settled = np.zeros(len(twice), np.bool_)
    settled[target] = True
    parts = [pieces.take(~twice[pieces.target]), pieces.take(taken)]
    for number in np.flatnonzero(twice & ~settled).tolist():
        own = pieces.take(pieces.target == number)
        parts.append(_greedy(own, target_lo[number], target_hi[number], needs, int(target_need[number])))
    joined = concatenated(parts, target_lo.shape[1])
    return joined.take(np.argsort(joined.target, kind="stable"))


def _greedy(own: Pieces, lo: Int, hi: Int, needs: NeedTable, need: int) -> Pieces:
    rest: list[CornerBox] = [(corner(lo), corner(hi))]
    taken: list[tuple[int, CornerBox]] = []
    for row in np.argsort(-own.volume, kind="stable").tolist():
        piece = (corner(own.lo[row]), corner(own.hi[row]))
        still: list[CornerBox] = []
        for box in rest:
            box_lo = tuple(map(max, box[0], piece[0]))
            box_hi = tuple(map(min, box[1], piece[1]))
            if all(a < b for a, b in zip(box_lo, box_hi, strict=True)):
                taken.append((row, (box_lo, box_hi)))
            still += subtract(box, piece)
        rest = still
        if len(rest) + len(taken) > MAX_FRAGMENTS:
            raise GeometryError(
                f"tensor {needs.name(need)!r}: the {len(own)} boxes that {needs.owner} would read overlap in "
                f"more than {MAX_FRAGMENTS} fragments"
            )
    rows = np.array([row for row, _ in taken], np.int64)
    return Pieces(
        own.target[rows],
        own.box[rows],
        np.array([box[0] for _, box in taken], np.int64),
        np.array([box[1] for _, box in taken], np.int64),
    )


def _choose(holders: _Holders, merged: Merged, box: Int, size_bytes: Int, spread: int) -> Int:
    """Choose a row of the merged table for each piece; bytes even out over the holders of replicas."""
    source = merged.shards.source[holders.rows]
    pick = np.zeros(len(box), np.int64)
    several = holders.count[box] > 1
    if several.any():
        lone = holders.first[box[~several]]
        load = np.zeros(len(merged.sources))
        np.add.at(load, source[lone], size_bytes[~several])
        # Boxes with the same holders share a key. Keys only group: a collision would cost balance,
        # never correctness.
        keys = np.add.reduceat(_scrambled(len(merged.sources))[source], holders.first)[box]
        _, group = np.unique(keys[several], return_inverse=True)
        members = np.flatnonzero(several)[np.argsort(group, kind="stable")]
        for same in np.split(members, np.cumsum(np.bincount(group))[:-1]):
            count = int(holders.count[box[same[0]]])
            first = int(holders.first[box[same[0]]])
            who = source[first : first + count]
            order = np.roll(np.arange(count), -spread)
            shares = np.cumsum(_even_shares(load[who], float(size_bytes[same].sum()))[order])
            middle = np.cumsum(size_bytes[same]) - size_bytes[same] / 2
            at = np.minimum(np.searchsorted(shares, middle, side="right"), count - 1)
            pick[same] = order[at] % holders.count[box[same]]
            np.add.at(load, who[order[at]], size_bytes[same])
    out: Int = holders.rows[holders.first[box] + pick]
    return out


def _even_shares(load: NDArray[np.float64], more: float) -> NDArray[np.float64]:
    """How `more` bytes are to be poured onto loads so that the fullest ends as low as possible."""
    order = np.sort(load)
    filled = order * np.arange(1, len(order) + 1) - np.cumsum(order)  # to lift the first k to load k
    k = int(np.searchsorted(filled, more, side="right"))
    level = (more + order[:k].sum()) / k
    out: NDArray[np.float64] = np.maximum(level - load, 0.0)
    return out


def _scrambled(count: int) -> NDArray[np.uint64]:
    """Numbers whose sums tell sets of sources apart (splitmix64 of 1, 2, ...)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _strided(
    needs: NeedTable, merged: Merged, need: Int, row: Int, pieces: Pieces, size_bytes: Int
) -> PieceTable:
    """Describe each piece as runs that are contiguous both in the shard and in the arena."""
    width = pieces.lo.shape[1]
    shape = pieces.hi - pieces.lo
    shard_shape = widened(merged.shards.shape[row], width, 1)
    need_shape = widened(needs.shape[need], width, 1)
    elsize = needs.elsize[need]
    # An axis is inside the run when every later axis is taken whole on both sides.
    whole = (shape == shard_shape) & (shape == need_shape)
    inside = np.ones_like(whole)
    inside[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    count = np.where(inside, 1, shape)
    remote_stride = row_major_strides(shard_shape) * elsize[:, None]
    local_stride = row_major_strides(need_shape) * elsize[:, None]
    remote_first = ((pieces.lo - widened(merged.shards.offset[row], width, 0)) * remote_stride).sum(axis=1)
    local_first = ((pieces.lo - widened(needs.offset[need], width, 0)) * local_stride).sum(axis=1)
    table = PieceTable(
        need=need,
        row=row,
        source=merged.shards.source[row],
        device_id=merged.shards.device_id[row],
        offset=pieces.lo,
        shape=shape,
        size_bytes=size_bytes,
        remote_addr=merged.shards.addr[row] + remote_first.astype(np.uint64),
        local_offset=needs.local_offset[need] + local_first.astype(np.uint64),
        run_bytes=np.where(inside, shape, 1).prod(axis=1) * elsize,
        run_count=volumes(count),
        count=count,
        remote_stride=remote_stride,
        local_stride=local_stride,
    )
    order = np.lexsort((table.local_offset, table.device_id, table.source))
    return PieceTable(*(getattr(table, name)[order] for name in PieceTable.__slots__))


def _by_source(table: PieceTable, merged: Merged) -> tuple[SourceReads, ...]:
    if not len(table):
        return ()
    begins = np.ones(len(table), np.bool_)
    begins[1:] = (table.source[1:] != table.source[:-1]) | (table.device_id[1:] != table.device_id[:-1])
    first = np.flatnonzero(begins)
    totals = np.add.reduceat(table.size_bytes, first)
    return tuple(
        SourceReads(
            merged.sources[int(table.source[a])], int(table.source[a]), int(table.device_id[a]), a, b, total
        )
        for a, b, total in zip(
            first.tolist(), [*first[1:].tolist(), len(table)], totals.tolist(), strict=True
        )
    )
