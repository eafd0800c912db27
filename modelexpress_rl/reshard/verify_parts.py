"""What is checked of pieces that land, prepared once per plan: which parts, and which digests they need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.geometry import Bool, Int, row_major_strides, volumes, widened
from modelexpress_rl.reshard.grid import LEVELS, PARTS, DigestGrid, Selection
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable

ASK_BYTES = 32 << 20  # what the first request for digests is about; each further one doubles, up to:
MAX_ASK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """For each piece, the parts of its shard that lie wholly inside it, at the level that suits best.

    `first` and `count` (pieces, width) say which of the shard's `parts` along each axis; `size` is a
    part's shape.
    """

    level: Int
    parts: Int
    size: Int
    first: Int
    count: Int
    verified_bytes: Int


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Parts that lie contiguous in the arena, of piece after piece: `start[p]` .. `start[p + 1] - 1`."""

    start: Int
    begin: Int
    end: Int
    digest: Int


def best_parts(pieces: PieceTable, needs: NeedTable, merged: Merged, grid: DigestGrid) -> Parts:
    """For each piece the level that verifies most of it; of those that verify as much, the coarsest."""
    width = pieces.offset.shape[1]
    rows = merged.manifest_row[pieces.row]
    shard_shape = widened(merged.shards.shape[pieces.row], width, 1)
    lo = pieces.offset - widened(merged.shards.offset[pieces.row], width, 0)
    hi = lo + pieces.shape
    elsize = needs.elsize[pieces.need]
    best = Parts(
        level=np.zeros(len(pieces), np.int64),
        parts=np.ones_like(lo),
        size=shard_shape.copy(),
        first=np.zeros_like(lo),
        count=np.zeros_like(lo),
        verified_bytes=np.zeros(len(pieces), np.int64),
    )
    for level in PARTS:
        parts = widened(grid.parts[level], width, 1)[rows]
        size = shard_shape // parts
        first = -(-lo // size)
        count = np.maximum(hi // size - first, 0)
        count[(grid.count[level, rows] == 0) | (count == 0).any(axis=1)] = 0
        verified = volumes(count * size) * elsize
        better = verified > best.verified_bytes
        best.level[better] = level
        for name, found in (("parts", parts), ("size", size), ("first", first), ("count", count)):
            getattr(best, name)[better] = found[better]
        best.verified_bytes[better] = verified[better]
    return best


def asks_of(
    pieces: PieceTable, rows: Int, parts: Parts, grid: DigestGrid
) -> tuple[tuple[Selection, ...], Int, Int]:
    """What to ask for, in the order of the pieces: (asks, asks that each piece needs, base of each)."""
    asked = np.zeros(len(pieces), np.int64)
    base = np.zeros(len(pieces), np.int64)
    checked = np.flatnonzero(parts.verified_bytes)
    if not len(checked):
        return (), asked, base
    key = rows[checked] * LEVELS + parts.level[checked]
    keys, at = np.unique(key, return_inverse=True)
    # A digest that several pieces need is asked for with the first of them.
    done = np.cumsum(pieces.size_bytes)[checked]
    group = np.searchsorted(_ask_ends(int(done[-1])), done, side="left")
    first_group = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(first_group, at, group)
    asks: list[Selection] = []
    key_base, key_ask, place = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64), 0
    for number in np.unique(first_group).tolist():
        own = np.flatnonzero(first_group == number)
        own_rows, own_levels = keys[own] // LEVELS, keys[own] % LEVELS
        wanted = np.zeros((LEVELS, int(own_rows[-1] - own_rows[0]) + 1), np.bool_)
        wanted[own_levels, own_rows - own_rows[0]] = True
        # `keys` are sorted by row, then level, which is the order of the answer.
        counts = grid.count[own_levels, own_rows]
        key_base[own] = place + np.cumsum(counts) - counts
        key_ask[own] = len(asks) + 1
        asks.append(Selection(int(own_rows[0]), wanted))
        place += int(counts.sum())
    asked[checked] = key_ask[at]
    base[checked] = key_base[at]
    return tuple(asks), asked, base


def whole_ask(rows: Int, parts: Parts, grid: DigestGrid) -> tuple[tuple[Selection, ...], Int, Int]:
    """As `asks_of`, with one ask for everything that the source has."""
    ask = Selection(0, np.ones_like(grid.count, np.bool_))
    counts = ask.counts(grid)
    start = (np.cumsum(counts.reshape(-1)) - counts.reshape(-1)).reshape(counts.shape)
    return (ask,), np.ones(len(rows), np.int64), start[rows, parts.level]


def _ask_ends(total_bytes: int) -> Int:
    ends: list[int] = []
    size = ASK_BYTES
    while not ends or ends[-1] < total_bytes:
        ends.append((ends[-1] if ends else 0) + size)
        size = min(2 * size, MAX_ASK_BYTES)
    return np.array(ends, np.int64)


def lies_contiguous(pieces: PieceTable, needs: NeedTable, parts: Parts) -> Bool:
    """Which pieces' parts lie contiguous in the arena."""
    need_shape = widened(needs.shape[pieces.need], parts.size.shape[1], 1)
    whole = parts.size == need_shape
    inside = np.ones_like(whole)
    inside[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    out: Bool = (inside | (parts.size == 1)).all(axis=1)
    return out


def flatten(
    pieces: PieceTable, needs: NeedTable, merged: Merged, parts: Parts, base: Int, contiguous: Bool
) -> Flat:
    width = parts.size.shape[1]
    counts = np.where(contiguous, volumes(parts.count), 0)
    piece, k = expand(np.zeros(len(counts), np.int64), counts)
    need = pieces.need[piece]
    elsize = needs.elsize[need]
    strides = row_major_strides(widened(needs.shape, width, 1))[need]
    parts_strides = row_major_strides(parts.parts)[piece]
    index = np.zeros((len(piece), width), np.int64)
    for axis in range(width - 1, -1, -1):
        along = parts.count[piece, axis]
        index[:, axis] = k % along
        k = k // along
    index += parts.first[piece]
    size = parts.size[piece]
    shard_offset = widened(merged.shards.offset, width, 0)[pieces.row[piece]]
    inside_need = shard_offset + index * size - widened(needs.offset, width, 0)[need]
    begin = needs.local_offset[need].astype(np.int64) + (inside_need * strides).sum(axis=1) * elsize
    return Flat(
        start=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        begin=begin,
        end=begin + volumes(size) * elsize,
        digest=base[piece] + (index * parts_strides).sum(axis=1),
    )
