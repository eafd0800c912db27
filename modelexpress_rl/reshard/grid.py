"""In which parts shards are digested: levels, of which a reader asks for what it can use.

*Slabs* cut a shard along its first axis and lie contiguous, so that they are hashed where they lie; a
small shard is one slab. Every shard that isn't empty has slabs. *Bands* are cut along all axes but the
last, for readers of row slices that cut slabs; *tiles* are cut along every axis, for readers of column
slices. A level that would repeat a coarser one is absent. The parts of a level are in row-major order.

*Groups* join small shards that are neighbours in memory: one digest over the bytes of all, for readers
of all of them. It belongs to the last of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.digests import DEFAULT_RULE, DigestTable, GridRule, band_counts, tile_parts
from modelexpress_rl.reshard.geometry import Bool, Int, ShardTable, volumes

SLABS: Final = 0
BANDS: Final = 1
TILES: Final = 2
GROUPS: Final = 3
LEVELS: Final = 4
FINER: Final = (BANDS, TILES)
PARTS: Final = (SLABS, *FINER)  # the levels that cut shards

WHOLE_BYTES = 256 << 10  # a shard up to this is one slab: finer parts would cost more than the bytes
SMALL_RULE = GridRule(min_tile_bytes=16, fine_parts=8)  # and its finer parts are asked for by few
GROUPED_BYTES = 32 << 10  # a shard up to this is joined with its neighbours,
GROUP_BYTES = 512 << 10  # into groups of about so many bytes,
GROUP_ROWS = 256  # and of at most so many shards
GRID: Final = 2  # names this way of cutting on the wire


@dataclass(frozen=True, slots=True, eq=False)
class DigestGrid:
    """How every shard of a table is cut: `parts` is (`PARTS`, rows, width), along each axis.

    `count`, (`LEVELS`, rows), is how many digests that makes; 0 where a shard has no such level. `members`
    are the rows of group after group in the order of their bytes, group g's at `group_start[g]` ..
    `group_start[g + 1]`; `group_row` is the row that its digest belongs to.
    """

    parts: Int
    count: Int
    members: Int
    group_start: Int
    group_row: Int


def digest_grid(table: ShardTable, rule: GridRule = DEFAULT_RULE) -> DigestGrid:
    """The grid of every shard of a table."""
    elsize = table.tensors.elsize[table.tensor]
    fine = _fine_parts(table.shape, elsize, rule)
    rows, width = fine.shape
    parts = np.ones((len(PARTS), rows, width), np.int64)
    parts[SLABS] = _slabs_of(table.shape, table.size_bytes, fine)
    parts[BANDS, :, :-1] = fine[:, :-1]
    parts[TILES] = fine
    count = np.zeros((LEVELS, rows), np.int64)
    count[: len(PARTS)] = parts.prod(axis=2)
    count[BANDS, count[BANDS] <= count[SLABS]] = 0
    count[TILES, (fine[:, -1] == 1) | (count[TILES] <= count[SLABS])] = 0
    members, group_start = _groups(table)
    group_row = np.maximum.reduceat(members, group_start[:-1]) if len(members) else members
    count[GROUPS, group_row] = 1
    count[:, volumes(table.shape) == 0] = 0
    return DigestGrid(parts, count, members, group_start, group_row)


def _groups(table: ShardTable) -> tuple[Int, Int]:
    """(members, start): small shards in the order of their addresses, two or more to a group."""
    size = table.size_bytes
    small = np.flatnonzero((size > 0) & (size <= GROUPED_BYTES))
    members = small[np.lexsort((small, table.addr[small], table.device_id[small]))]
    before = np.cumsum(size[members]) - size[members]
    number = np.stack(
        [table.device_id[members], before // GROUP_BYTES, np.arange(len(members)) // GROUP_ROWS]
    )
    fresh = np.append(True, (number[:, 1:] != number[:, :-1]).any(axis=0))[: len(members)]
    rows = np.diff(np.append(np.flatnonzero(fresh), len(members)))
    members = members[np.repeat(rows > 1, rows)]
    return members, np.concatenate([np.zeros(1, np.int64), np.cumsum(rows[rows > 1])])


def slab_parts(shape: Int, elsize: Int, rule: GridRule = DEFAULT_RULE) -> Int:
    """Slabs along each axis for boxes of these shapes, as `digest_grid` cuts them."""
    return _slabs_of(shape, volumes(shape) * elsize, _fine_parts(shape, elsize, rule))


def _fine_parts(shape: Int, elsize: Int, rule: GridRule) -> Int:
    fine = tile_parts(shape, elsize, rule)
    small = volumes(shape) * elsize <= WHOLE_BYTES
    fine[small] = tile_parts(shape[small], elsize[small], SMALL_RULE)
    return fine


def _slabs_of(shape: Int, size_bytes: Int, fine: Int) -> Int:
    parts = np.ones_like(fine)
    # The first axis that has an extent: what lies before it has none, so its parts are contiguous.
    axis = np.argmax(shape != 1, axis=1)
    big = np.flatnonzero(size_bytes > WHOLE_BYTES)
    parts[big, axis[big]] = fine[big, axis[big]]
    return parts


def grid_of_table(made: DigestTable) -> DigestGrid:
    """The grid of a whole table of bands and tiles, as publishers make it that know no slabs."""
    rows, width = made.parts.shape
    parts = np.ones((len(PARTS), rows, width), np.int64)
    parts[BANDS, :, :-1] = made.parts[:, :-1]
    parts[TILES] = made.parts
    count = np.zeros((LEVELS, rows), np.int64)
    total = np.diff(made.start)
    count[BANDS] = np.minimum(band_counts(made.parts), total)
    count[TILES] = total - count[BANDS]
    none = np.zeros(0, np.int64)
    return DigestGrid(parts, count, none, np.zeros(1, np.int64), none)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Digests that are asked for: of which levels of the rows `first_row` .. of a manifest.

    `wanted` is (levels, rows). They are answered row by row, and of a row level by level.
    """

    first_row: int
    wanted: Bool

    @property
    def rows(self) -> slice:
        """The rows of the manifest that it is about."""
        return slice(self.first_row, self.first_row + self.wanted.shape[1])

    @property
    def name(self) -> bytes:
        """A digest of the selection, which binds an answer to it."""
        key = xxhash.xxh3_128(f"{GRID} {self.first_row} {self.wanted.shape[1]}".encode())
        key.update(b"".join(self.bitmaps()))
        return key.digest()

    def bitmaps(self) -> list[bytes]:
        """For each level a bit per row, the lowest first."""
        return [np.packbits(level, bitorder="little").tobytes() for level in self.wanted]

    @classmethod
    def of_bitmaps(cls, first_row: int, row_count: int, bitmaps: list[bytes], table_rows: int) -> Selection:
        """Read what `bitmaps` wrote, for a table of `table_rows` rows; an empty one has no bit set.

        Raises:
            UsageError: rows are not in the table, or a bitmap has another length.
        """
        if min(first_row, row_count) < 0 or first_row + row_count > table_rows:
            raise UsageError(
                f"digests: rows {first_row} .. {first_row + row_count} of a manifest of {table_rows} rows"
            )
        wanted = np.zeros((LEVELS, row_count), np.bool_)
        for level, bits in zip(wanted, bitmaps, strict=True):
            if not bits:
                continue
            if len(bits) != -(-row_count // 8):
                raise UsageError(
                    f"digests: expected a bit for each of {row_count} rows, got {len(bits)} bytes"
                )
            level[:] = np.unpackbits(np.frombuffer(bits, np.uint8), count=row_count, bitorder="little")
        return cls(first_row, wanted)

    def counts(self, grid: DigestGrid) -> Int:
        """How many digests are asked for, (rows, levels): the order in which they are answered."""
        out: Int = np.where(self.wanted, grid.count[:, self.rows], 0).T
        return out
