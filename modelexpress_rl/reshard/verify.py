"""Checking bytes that landed against their publisher's digests, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import NoReturn

import numpy as np
import xxhash

from modelexpress_rl.errors import DigestMismatch, UsageError
from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.digests import as_box, box_digests
from modelexpress_rl.reshard.geometry import (
    DIGEST_BYTES,
    Bool,
    Bytes,
    Int,
    row_major_strides,
    unpadded,
    volumes,
    widened,
)
from modelexpress_rl.reshard.grid import LEVELS, DigestGrid, Selection
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan

ASK_BYTES = 32 << 20  # what the first request for digests is about; each further one doubles, up to:
MAX_ASK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check covered. `unverified_bytes` lie in parts that a need cuts, or have no digests."""

    verified_bytes: int
    unverified_bytes: int

    def __add__(self, other: Verified) -> Verified:
        return Verified(
            self.verified_bytes + other.verified_bytes, self.unverified_bytes + other.unverified_bytes
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
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
class _Flat:
    """Parts that lie contiguous in the arena, of piece after piece: `start[p]` .. `start[p + 1] - 1`."""

    start: Int
    begin: Int
    end: Int
    digest: Int


@dataclass(frozen=True, slots=True, eq=False)
class Verifier:
    """Checks pieces of one plan that come from one source; made once per plan, for every version.

    `asks` are the digests that it needs, in the order in which the pieces want them: it is given their
    answers in one array, one after the other. `asked` says for each piece how many of them it needs.
    """

    plan: Plan
    needs: NeedTable
    merged: Merged
    first: int
    pieces: PieceTable
    asks: tuple[Selection, ...]
    asked: Int
    ask_start: Int
    parts: _Parts
    base: Int
    flat: _Flat
    strided: Bool
    _slices: list[tuple[int, list[memoryview]]] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        plan: Plan,
        needs: NeedTable,
        merged: Merged,
        pieces: slice,
        grid: DigestGrid,
        *,
        at_once: bool = False,
    ) -> Verifier:
        """Prepare to check the pieces at `pieces` of `plan`, whose source's shards are cut by `grid`.

        `at_once`: ask for all digests of the source in one, whether they are needed or not.
        """
        table = PieceTable(*(getattr(plan.pieces, name)[pieces] for name in PieceTable.__slots__))
        parts = _best_parts(table, needs, merged, grid)
        rows = merged.manifest_row[table.row]
        asks, asked, base = _whole(rows, parts, grid) if at_once else _asks(table, rows, parts, grid)
        contiguous = _contiguous(table, needs, parts)
        sizes = [int(ask.counts(grid).sum()) for ask in asks]
        return cls(
            plan=plan,
            needs=needs,
            merged=merged,
            first=pieces.start,
            pieces=table,
            asks=asks,
            asked=asked,
            ask_start=np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))]),
            parts=parts,
            base=base,
            flat=_flatten(table, needs, merged, parts, base, contiguous),
            strided=~contiguous & (parts.verified_bytes > 0),
        )

    @property
    def digest_count(self) -> int:
        """How many digests it needs in all."""
        return int(self.ask_start[-1])

    def asks_for(self, rows: Int | slice | None = None) -> int:
        """How many of `asks`, from the first, must be answered to check the pieces at `rows`."""
        return int(self.asked[self._own(rows)].max(initial=0))

    def coverage(self, rows: Int | slice | None = None) -> Verified:
        """What checking the pieces at `rows` of the plan covers (default all of this source)."""
        own = self._own(rows)
        verified = int(self.parts.verified_bytes[own].sum())
        return Verified(verified, int(self.pieces.size_bytes[own].sum()) - verified)

    def verify(self, arena: Bytes, digests: Bytes, rows: Int | slice | None = None) -> Verified:
        """Check the pieces at `rows` of the plan (default all), whose bytes have landed in `arena`.

        Blocking and long; run it in a thread. It copies only parts that are not contiguous, a block at
        a time, and releases the GIL over big ones.

        Raises:
            DigestMismatch: bytes differ from what was published; the message names tensor, source, box.
            UsageError: the arena is smaller than the needs' arena.
        """
        if arena.dtype != np.uint8 or arena.ndim != 1 or len(arena) < self.needs.arena_bytes:
            raise UsageError(
                f"arena: expected {self.needs.arena_bytes} flat bytes, got {arena.dtype} {arena.shape}"
            )
        own = self._own(rows)
        self._verify_flat(arena, digests, own)
        for piece in own[self.strided[own]].tolist():
            self._verify_strided(arena, digests, piece)
        return self.coverage(own + self.first)

    def _own(self, rows: Int | slice | None) -> Int:
        if rows is None:
            return np.arange(len(self.pieces))
        if isinstance(rows, slice):
            return np.arange(rows.start - self.first, rows.stop - self.first)
        return rows - self.first

    def _verify_flat(self, arena: Bytes, digests: Bytes, own: Int) -> None:
        flat = self.flat
        owner, at = expand(flat.start[own], flat.start[own + 1] - flat.start[own])
        if not len(at):
            return
        slices = self._flat_slices(arena)
        first, last = int(at[0]), int(at[-1]) + 1
        chosen = slices[first:last] if last - first == len(at) else [slices[i] for i in at.tolist()]
        found = b"".join(map(xxhash.xxh3_128_digest, chosen))
        expected = digests[flat.digest[at]]
        if found != expected.tobytes():
            number = _first_difference(found, expected)
            piece = int(own[owner[number]])
            self._refuse(piece, int(at[number] - flat.start[piece]))

    def _flat_slices(self, arena: Bytes) -> list[memoryview]:
        """The flat parts as they lie in an arena; kept, for versions come to the same one again and again."""
        addr = arena.ctypes.data
        if not self._slices or self._slices[0][0] != addr:
            memory, flat = arena.data, self.flat
            made = [memory[a:b] for a, b in zip(flat.begin.tolist(), flat.end.tolist(), strict=True)]
            self._slices[:] = [(addr, made)]
        return self._slices[0][1]

    def _verify_strided(self, arena: Bytes, digests: Bytes, piece: int) -> None:
        parts = self.parts
        need = int(self.pieces.need[piece])
        elsize = int(self.needs.elsize[need])
        width = parts.size.shape[1]
        shape = [1] * (width - self.needs.width) + self.needs.shape[need].tolist()
        at = int(self.needs.local_offset[need])
        box = as_box(arena[at : at + prod(shape) * elsize], shape, elsize)
        begin = self._corner(piece, parts.first[piece]) - widened(self.needs.offset[[need]], width, 0)[0]
        extent = parts.count[piece] * parts.size[piece]
        begin[-1] *= elsize
        extent[-1] *= elsize
        part = box[tuple(slice(a, a + n) for a, n in zip(begin.tolist(), extent.tolist(), strict=True))]
        found = box_digests(part, parts.count[piece].tolist())
        base, along = int(self.base[piece]), parts.parts[piece].tolist()
        expected = digests[base : base + prod(along)].reshape(*along, DIGEST_BYTES)
        chosen = zip(parts.first[piece].tolist(), parts.count[piece].tolist(), strict=True)
        expected = expected[tuple(slice(a, a + n) for a, n in chosen)].reshape(-1, DIGEST_BYTES)
        if found != expected.tobytes():
            self._refuse(piece, _first_difference(found, expected))

    def _corner(self, piece: int, index: Int) -> Int:
        """Global offset of a part of a piece's shard."""
        width = self.parts.size.shape[1]
        row = int(self.pieces.row[piece])
        out: Int = widened(self.merged.shards.offset[[row]], width, 0)[0] + index * self.parts.size[piece]
        return out

    def _refuse(self, piece: int, number: int) -> NoReturn:
        need = int(self.pieces.need[piece])
        rank = int(self.needs.rank[need])
        count = self.parts.count[piece].tolist()
        index = self.parts.first[piece] + np.array(np.unravel_index(number, count))
        offset = unpadded(self._corner(piece, index), rank)
        shape = unpadded(self.parts.size[piece], rank)
        source = self.merged.sources[int(self.pieces.source[piece])]
        raise DigestMismatch(
            f"tensor {self.needs.name(need)!r}: offset {offset} shape {shape} as read by {self.needs.owner} "
            f"is not what {source} published"
        )


def _first_difference(found: bytes, expected: Bytes) -> int:
    rows = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)
    return int(np.argmax((rows != expected).any(axis=1)))


def _best_parts(pieces: PieceTable, needs: NeedTable, merged: Merged, grid: DigestGrid) -> _Parts:
    """For each piece the level that verifies most of it; of those that verify as much, the coarsest."""
    width = pieces.offset.shape[1]
    rows = merged.manifest_row[pieces.row]
    shard_shape = widened(merged.shards.shape[pieces.row], width, 1)
    lo = pieces.offset - widened(merged.shards.offset[pieces.row], width, 0)
    hi = lo + pieces.shape
    elsize = needs.elsize[pieces.need]
    best = _Parts(
        level=np.zeros(len(pieces), np.int64),
        parts=np.ones_like(lo),
        size=shard_shape.copy(),
        first=np.zeros_like(lo),
        count=np.zeros_like(lo),
        verified_bytes=np.zeros(len(pieces), np.int64),
    )
    for level in range(LEVELS):
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


def _asks(
    pieces: PieceTable, rows: Int, parts: _Parts, grid: DigestGrid
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


def _whole(rows: Int, parts: _Parts, grid: DigestGrid) -> tuple[tuple[Selection, ...], Int, Int]:
    """As `_asks`, with one ask for everything that the source has."""
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


def _contiguous(pieces: PieceTable, needs: NeedTable, parts: _Parts) -> Bool:
    """Which pieces' parts lie contiguous in the arena."""
    need_shape = widened(needs.shape[pieces.need], parts.size.shape[1], 1)
    whole = parts.size == need_shape
    inside = np.ones_like(whole)
    inside[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    out: Bool = (inside | (parts.size == 1)).all(axis=1)
    return out


def _flatten(
    pieces: PieceTable, needs: NeedTable, merged: Merged, parts: _Parts, base: Int, contiguous: Bool
) -> _Flat:
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
    return _Flat(
        start=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        begin=begin,
        end=begin + volumes(size) * elsize,
        digest=base[piece] + (index * parts_strides).sum(axis=1),
    )
