"""Checking bytes that landed against their publishers' digests, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import xxhash

from modelexpress_rl.errors import DigestMismatch, GeometryError, UsageError
from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.digests import DigestTable, GridRule, as_box, band_counts, box_digests
from modelexpress_rl.reshard.geometry import (
    DIGEST_BYTES,
    Bool,
    Bytes,
    Int,
    Source,
    row_major_strides,
    unpadded,
    volumes,
    widened,
)
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check covered. `unverified_bytes` lie in tiles that a need cuts, or have no digests."""

    verified_bytes: int
    unverified_bytes: int

    def __add__(self, other: Verified) -> Verified:
        return Verified(
            self.verified_bytes + other.verified_bytes, self.unverified_bytes + other.unverified_bytes
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """For each piece, the tiles that lie wholly inside it.

    `first` and `count` (pieces, width) say which of the shard's `parts` along each axis; `base` is
    where the digests of that grid begin in the joined digest array; `tile` is a tile's shape.
    """

    base: Int
    parts: Int
    tile: Int
    first: Int
    count: Int
    verified_bytes: Int


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """Tiles that lie contiguous in the arena, of piece after piece: `start[p]` .. `start[p + 1] - 1`."""

    start: Int
    begin: Int
    end: Int
    digest: Int


@dataclass(frozen=True, slots=True, eq=False)
class Verifier:
    """Checks the pieces of one plan; made once per plan, `renewed` for each version's digests."""

    plan: Plan
    needs: NeedTable
    merged: Merged
    rules: Mapping[Source, DigestTable]
    digests: Bytes
    grid: _Grid
    flat: _Flat
    strided: Bool

    @classmethod
    def of(
        cls, plan: Plan, needs: NeedTable, merged: Merged, digests: Mapping[Source, DigestTable]
    ) -> Verifier:
        """Prepare to check `plan`; pieces of sources that are not in `digests` stay unverified."""
        grid = _grid(plan, needs, merged, digests)
        contiguous = _contiguous(plan, needs, grid)
        return cls(
            plan=plan,
            needs=needs,
            merged=merged,
            rules=dict(digests),
            digests=_joined(merged, digests),
            grid=grid,
            flat=_flatten(plan, needs, merged, grid, contiguous),
            strided=~contiguous & (grid.verified_bytes > 0),
        )

    def renewed(self, digests: Mapping[Source, DigestTable]) -> Verifier:
        """The same checks with the digests of another version of the same structure; no per-piece work.

        Raises:
            UsageError: the digests are of other sources, or cut otherwise.
        """
        same = digests.keys() == self.rules.keys() and all(
            table.rule == self.rules[source].rule and len(table.digests) == len(self.rules[source].digests)
            for source, table in digests.items()
        )
        if not same:
            raise UsageError("digests: not of the structure that this verifier was made for")
        return replace(self, rules=dict(digests), digests=_joined(self.merged, digests))

    @property
    def coverage(self) -> Verified:
        """What checking all pieces would cover."""
        return self._covered(np.arange(len(self.plan.pieces)))

    def verify(self, arena: Bytes, rows: Int | slice | None = None) -> Verified:
        """Check the pieces at `rows` of the plan (default all), whose bytes have landed in `arena`.

        Blocking and long; run it in a thread. It copies only tiles that are not contiguous, a block at
        a time, and releases the GIL over big ones.

        Raises:
            DigestMismatch: bytes differ from what was published; the message names tensor, source, box.
            UsageError: the arena is smaller than the needs' arena.
        """
        if arena.dtype != np.uint8 or arena.ndim != 1 or len(arena) < self.needs.arena_bytes:
            raise UsageError(
                f"arena: expected {self.needs.arena_bytes} flat bytes, got {arena.dtype} {arena.shape}"
            )
        everything = np.arange(len(self.plan.pieces))
        chosen = everything if rows is None else everything[rows]
        self._verify_flat(arena, chosen)
        for piece in chosen[self.strided[chosen]].tolist():
            self._verify_strided(arena, piece)
        return self._covered(chosen)

    def _covered(self, chosen: Int) -> Verified:
        verified = int(self.grid.verified_bytes[chosen].sum())
        return Verified(verified, int(self.plan.pieces.size_bytes[chosen].sum()) - verified)

    def _verify_flat(self, arena: Bytes, chosen: Int) -> None:
        flat = self.flat
        owner, tiles = expand(flat.start[chosen], flat.start[chosen + 1] - flat.start[chosen])
        if not len(tiles):
            return
        memory = arena.data
        one = xxhash.xxh3_128_digest
        found = b"".join(
            [
                one(memory[a:b])
                for a, b in zip(flat.begin[tiles].tolist(), flat.end[tiles].tolist(), strict=True)
            ]
        )
        differs = (
            np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES) != self.digests[flat.digest[tiles]]
        ).any(axis=1)
        if differs.any():
            at = int(np.argmax(differs))
            piece = int(chosen[owner[at]])
            self._refuse(piece, int(tiles[at] - flat.start[piece]))

    def _verify_strided(self, arena: Bytes, piece: int) -> None:
        table, grid = self.plan.pieces, self.grid
        need = int(table.need[piece])
        elsize = int(self.needs.elsize[need])
        width = grid.tile.shape[1]
        shape = [1] * (width - self.needs.width) + self.needs.shape[need].tolist()
        at = int(self.needs.local_offset[need])
        box = as_box(arena[at : at + prod(shape) * elsize], shape, elsize)
        begin = self._tile_corner(piece, grid.first[piece]) - widened(self.needs.offset[[need]], width, 0)[0]
        extent = grid.count[piece] * grid.tile[piece]
        begin[-1] *= elsize
        extent[-1] *= elsize
        part = box[tuple(slice(a, a + n) for a, n in zip(begin.tolist(), extent.tolist(), strict=True))]
        found = box_digests(part, grid.count[piece].tolist())
        base, parts = int(grid.base[piece]), grid.parts[piece].tolist()
        expected = self.digests[base : base + prod(parts)].reshape(*parts, DIGEST_BYTES)
        tiles = zip(grid.first[piece].tolist(), grid.count[piece].tolist(), strict=True)
        expected = expected[tuple(slice(a, a + n) for a, n in tiles)]
        if found != expected.tobytes():
            rows = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)
            self._refuse(piece, int(np.argmax((rows != expected.reshape(-1, DIGEST_BYTES)).any(axis=1))))

    def _tile_corner(self, piece: int, index: Int) -> Int:
        """Global offset of a tile of a piece's shard."""
        width = self.grid.tile.shape[1]
        row = int(self.plan.pieces.row[piece])
        out: Int = widened(self.merged.shards.offset[[row]], width, 0)[0] + index * self.grid.tile[piece]
        return out

    def _refuse(self, piece: int, number: int) -> None:
        table = self.plan.pieces
        need = int(table.need[piece])
        rank = int(self.needs.rank[need])
        index = self.grid.first[piece] + np.array(np.unravel_index(number, self.grid.count[piece].tolist()))
        offset = unpadded(self._tile_corner(piece, index), rank)
        shape = unpadded(self.grid.tile[piece], rank)
        raise DigestMismatch(
            f"tensor {self.needs.name(need)!r}: offset {offset} shape {shape} as read by {self.needs.owner} "
            f"is not what {self.merged.sources[int(table.source[piece])]} published"
        )


def refuse_disagreeing_replicas(merged: Merged, digests: Mapping[Source, DigestTable]) -> None:
    """Compare the digests of replicas, before anything is read.

    Replicas cut by different rules can't be compared and are let pass.

    Raises:
        GeometryError: two sources publish other bytes for one box; the message names tensor and both.
    """
    joined = _joined(merged, digests)
    begin = np.zeros(len(merged.shards), np.int64)
    count = np.zeros(len(merged.shards), np.int64)
    cut_by = np.full(len(merged.shards), -1, np.int64)
    rules: dict[GridRule, int] = {}
    before = 0
    for number, source in enumerate(merged.sources):
        if source not in digests:
            continue
        own = digests[source]
        rows = np.flatnonzero(merged.shards.source == number)
        theirs = merged.manifest_row[rows]
        begin[rows] = own.start[theirs] + before
        count[rows] = own.start[theirs + 1] - own.start[theirs]
        cut_by[rows] = rules.setdefault(own.rule, len(rules))
        before += len(own.digests)
    known = np.flatnonzero(cut_by >= 0)
    box = np.searchsorted(merged.box_start, known, side="right")
    known = known[np.lexsort((known, cut_by[known], box))]
    box = np.searchsorted(merged.box_start, known, side="right")
    pairs = np.flatnonzero((box[1:] == box[:-1]) & (cut_by[known[1:]] == cut_by[known[:-1]]))
    a, b = known[pairs], known[pairs + 1]
    pair, mine = expand(begin[a], count[a])
    _, other = expand(begin[b], count[a])
    differs = (joined[mine] != joined[other]).any(axis=1)
    if differs.any():
        row, replica = (int(rows[pair[np.argmax(differs)]]) for rows in (a, b))
        offset, shape = merged.shards.box(row)
        raise GeometryError(
            f"tensor {merged.tensors.names[int(merged.shards.tensor[row])]!r}: replicas of offset {offset} "
            f"shape {shape} differ, {merged.sources[int(merged.shards.source[row])]} and "
            f"{merged.sources[int(merged.shards.source[replica])]}"
        )


def _joined(merged: Merged, digests: Mapping[Source, DigestTable]) -> Bytes:
    tables = [digests[source].digests for source in merged.sources if source in digests]
    return np.concatenate([np.zeros((0, DIGEST_BYTES), np.uint8), *tables])


def _grid(plan: Plan, needs: NeedTable, merged: Merged, digests: Mapping[Source, DigestTable]) -> _Grid:
    table = plan.pieces
    width = table.offset.shape[1]
    base = np.zeros(len(table), np.int64)
    parts = np.ones((len(table), width), np.int64)
    known = np.zeros(len(table), np.bool_)
    joined = 0
    for number, source in enumerate(merged.sources):
        if source not in digests:
            continue
        own = digests[source]
        pieces = np.flatnonzero(table.source == number)
        rows = merged.manifest_row[table.row[pieces]]
        base[pieces] = own.start[rows] + joined
        parts[pieces] = widened(own.parts, width, 1)[rows]
        known[pieces] = True
        joined += len(own.digests)
    shard_shape = widened(merged.shards.shape[table.row], width, 1)
    lo = table.offset - widened(merged.shards.offset[table.row], width, 0)
    hi = lo + table.shape
    # Where a piece has whole rows, bands do, and they can often be hashed where they lie.
    whole_rows = (lo[:, -1] == 0) & (hi[:, -1] == shard_shape[:, -1])
    use_tiles = ~whole_rows & (parts[:, -1] > 1)
    base[use_tiles] += band_counts(parts)[use_tiles]
    parts[~use_tiles, -1] = 1
    tile = shard_shape // parts
    first = -(-lo // tile)
    count = np.maximum(hi // tile - first, 0)
    count[~known | (count == 0).any(axis=1)] = 0
    return _Grid(
        base=base,
        parts=parts,
        tile=tile,
        first=first,
        count=count,
        verified_bytes=volumes(count * tile) * needs.elsize[table.need],
    )


def _contiguous(plan: Plan, needs: NeedTable, grid: _Grid) -> Bool:
    """Which pieces' tiles lie contiguous in the arena."""
    need_shape = widened(needs.shape[plan.pieces.need], grid.tile.shape[1], 1)
    whole = grid.tile == need_shape
    inside = np.ones_like(whole)
    inside[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    out: Bool = (inside | (grid.tile == 1)).all(axis=1)
    return out


def _flatten(plan: Plan, needs: NeedTable, merged: Merged, grid: _Grid, contiguous: Bool) -> _Flat:
    width = grid.tile.shape[1]
    counts = np.where(contiguous, volumes(grid.count), 0)
    piece, k = expand(np.zeros(len(counts), np.int64), counts)
    need = plan.pieces.need[piece]
    elsize = needs.elsize[need]
    strides = row_major_strides(widened(needs.shape, width, 1))[need]
    parts_strides = row_major_strides(grid.parts)[piece]
    index = np.zeros((len(piece), width), np.int64)
    for axis in range(width - 1, -1, -1):
        along = grid.count[piece, axis]
        index[:, axis] = k % along
        k = k // along
    index += grid.first[piece]
    tile = grid.tile[piece]
    shard_offset = widened(merged.shards.offset, width, 0)[plan.pieces.row[piece]]
    inside_need = shard_offset + index * tile - widened(needs.offset, width, 0)[need]
    begin = needs.local_offset[need].astype(np.int64) + (inside_need * strides).sum(axis=1) * elsize
    return _Flat(
        start=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        begin=begin,
        end=begin + volumes(tile) * elsize,
        digest=grid.base[piece] + (index * parts_strides).sum(axis=1),
    )
