"""What is posted for a choice: exact pieces into their needs, whole rows into scratch, and copies out of it.

The scratch region lies behind the needs in the same arena. It has a few equal parts; the staged reads
are joined into batches, each of which fills one part at most, and batch b goes to part b modulo the
number of parts: it can be posted when the one before it there has been copied out.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

import numpy as np

from modelexpress_rl.reshard.geometry import Bytes, Int, row_major_strides, volumes, widened
from modelexpress_rl.reshard.hash_beside import Beside, in_blocks
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan, SourceReads
from modelexpress_rl.reshard.row_staging import SCRATCH_BYTES, Choice

PARTS = 2  # one is read while the other is checked and copied out; more only contend for the memory
_ALIGN_BYTES = 64
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Scratch:
    """The scratch region: `parts` parts of `part_bytes` each, from `begin` in the arena on."""

    begin: int
    part_bytes: int
    parts: int

    @property
    def end(self) -> int:
        """Bytes of an arena that has it."""
        return self.begin + self.part_bytes * self.parts


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies from scratch into needs: byte offsets in the arena, and a run repeated along some axes."""

    source: Int
    target: Int
    run_bytes: Int
    count: Int
    source_stride: Int
    target_stride: Int

    def __len__(self) -> int:
        return len(self.source)

    def views(self, arena: Bytes, rows: range) -> list[Beside]:
        """Some copies, in blocks, as arrays of runs over `arena`, in the order of what they read."""
        found: list[Beside] = []
        for row in rows:
            axes = np.flatnonzero(self.count[row] > 1)
            count = self.count[row, axes].tolist()
            source, target = self.source_stride[row, axes].tolist(), self.target_stride[row, axes].tolist()
            run, places = int(self.run_bytes[row]), (int(self.source[row]), int(self.target[row]))
            dtype = np.dtype((np.void, run))  # a run is one element, and copied as such
            found += in_blocks(
                np.ndarray(count, dtype, arena.data, places[1], target),
                np.ndarray(count, dtype, arena.data, places[0], source),
                places[0],
                source[0] if source else run,
            )
        return sorted(found, key=itemgetter(0))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows `first` .. `last - 1` of the wire plan's pieces: staged reads into one part of scratch.

    `copies` are those that bring them to where they are needed.
    """

    first: int
    last: int
    part: int
    copies: range


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """What is read for a choice, and what to do with it.

    `plan` reads `needs`, the boxes in scratch included. Piece w of the choice's plan is there when piece
    `brought_by[w]` of `plan` is and was copied out. `scratch` is None where nothing is staged.
    """

    plan: Plan
    needs: NeedTable
    brought_by: Int
    scratch: Scratch | None
    batches: tuple[Batch, ...]
    copies: Copies

    @property
    def arena_bytes(self) -> int:
        """Bytes of an arena for the needs and the scratch region."""
        return self.needs.arena_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes that are read into scratch."""
        return sum(int(self.plan.pieces.size_bytes[batch.first : batch.last].sum()) for batch in self.batches)

    @property
    def copied_bytes(self) -> int:
        """Bytes that are copied out of it."""
        return int((volumes(self.copies.count) * self.copies.run_bytes).sum())


def wire(choice: Choice, needs: NeedTable, merged: Merged, scratch: Scratch | None = None) -> Wire:
    """Make the reads of a choice; `scratch` is a region to use instead of one that suits it best.

    The reads of one source and device come together: exact pieces, then staged ones.
    """
    wanted = choice.plan.pieces
    if not len(choice.piece):
        none = np.zeros((0, wanted.count.shape[1]), np.int64)
        no = none[:, 0]
        copies = Copies(no, no, no, none, none, none)
        return Wire(choice.plan, needs, np.arange(len(wanted)), None, (), copies)
    rows = _row_pieces(choice, merged)
    order = np.lexsort((rows.remote_addr, rows.device_id, rows.source))
    rows = _take(rows, order)
    number = np.empty(len(order), np.int64)  # of each staged read of the choice
    number[order] = np.arange(len(order))
    scratch = scratch or _scratch(rows, needs)
    batch, place = _batches(rows, scratch.part_bytes)
    local = scratch.begin + batch % scratch.parts * scratch.part_bytes + place
    rows = replace(rows, need=len(needs) + np.arange(len(rows)), local_offset=local.astype(np.uint64))
    exact = np.flatnonzero(choice.read < 0)
    pieces, brought_by, at = _joined(choice, exact, rows, number)
    plan = replace(choice.plan, pieces=pieces, reads=_reads(choice.plan, pieces))
    copies, copy_batch = _copies(choice, rows, number, batch)
    begin = np.searchsorted(batch, np.arange(int(batch[-1]) + 2))
    copy_begin = np.searchsorted(copy_batch, np.arange(int(batch[-1]) + 2)).tolist()
    made = tuple(
        Batch(int(at[a]), int(at[b - 1]) + 1, n % scratch.parts, range(copy_begin[n], copy_begin[n + 1]))
        for n, (a, b) in enumerate(zip(begin[:-1].tolist(), begin[1:].tolist(), strict=True))
    )
    return Wire(plan, _with_scratch(needs, choice, rows, order, scratch), brought_by, scratch, made, copies)


def _row_pieces(choice: Choice, merged: Merged) -> PieceTable:
    """The staged reads as pieces, packed; `need` and `local_offset` are not yet theirs."""
    one, rows = _take(choice.plan.pieces, choice.piece), choice.rows
    width = rows.shape.shape[1]
    elsize = one.size_bytes // np.maximum(volumes(one.shape), 1)
    shard = widened(merged.shards.shape[one.row], width, 1)
    remote_stride = row_major_strides(shard) * elsize[:, None]
    inside = np.ones_like(shard, np.bool_)
    inside[:, :-1] = np.logical_and.accumulate((rows.shape == shard)[:, :0:-1], axis=1)[:, ::-1]
    count = np.where(inside, 1, rows.shape)
    first = (rows.lo * remote_stride).sum(axis=1)
    return replace(
        one,
        offset=rows.lo + widened(merged.shards.offset[one.row], width, 0),
        shape=rows.shape,
        size_bytes=volumes(rows.shape) * elsize,
        remote_addr=merged.shards.addr[one.row] + first.astype(np.uint64),
        run_bytes=np.where(inside, rows.shape, 1).prod(axis=1) * elsize,
        run_count=volumes(count),
        count=count,
        remote_stride=remote_stride,
        local_stride=row_major_strides(rows.shape) * elsize[:, None],
    )


def _scratch(rows: PieceTable, needs: NeedTable) -> Scratch:
    part_bytes = _up(max(int(rows.size_bytes.max()), SCRATCH_BYTES), _PAGE_BYTES)
    total = int((-(-rows.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES).sum())
    parts = min(PARTS, -(-total // part_bytes))
    part_bytes = min(part_bytes, _up(total, _PAGE_BYTES))
    return Scratch(_up(needs.arena_bytes, _PAGE_BYTES), part_bytes, parts)


def _batches(rows: PieceTable, part_bytes: int) -> tuple[Int, Int]:
    """The batch of each staged read, and its place in the batch's part."""
    sizes = -(-rows.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    ends = np.cumsum(sizes)
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = (rows.source[1:] != rows.source[:-1]) | (rows.device_id[1:] != rows.device_id[:-1])
    bounds = [*np.flatnonzero(fresh).tolist(), len(rows)]
    starts = []
    for first, last in pairwise(bounds):
        begin = first
        while begin < last:
            starts.append(begin)
            done = int(ends[begin] - sizes[begin])
            fits = int(np.searchsorted(ends, done + part_bytes, side="right"))
            begin = min(max(fits, begin + 1), last)
    batch = np.zeros(len(rows), np.int64)
    batch[starts] = 1
    batch = np.cumsum(batch) - 1
    begins = (ends - sizes)[starts]
    return batch, ends - sizes - begins[batch]


def _joined(choice: Choice, exact: Int, rows: PieceTable, number: Int) -> tuple[PieceTable, Int, Int]:
    """Exact pieces and staged reads as one table: (it, what brings each piece, where each read is)."""
    wanted = choice.plan.pieces
    both = PieceTable(
        *(
            np.concatenate([getattr(wanted, name)[exact], getattr(rows, name)])
            for name in PieceTable.__slots__
        )
    )
    is_staged = np.arange(len(both)) >= len(exact)
    order = np.lexsort((np.arange(len(both)), is_staged, both.device_id, both.source))
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order))
    brought_by = np.empty(len(wanted), np.int64)
    brought_by[exact] = at[: len(exact)]
    staged = choice.read >= 0
    brought_by[staged] = at[len(exact) + number[choice.read[staged]]]
    return _take(both, order), brought_by, at[len(exact) :]


def _copies(choice: Choice, rows: PieceTable, number: Int, batch: Int) -> tuple[Copies, Int]:
    """The copies out of scratch, in the order of batches, and the batch of each."""
    wanted = choice.plan.pieces
    own = np.flatnonzero(choice.read >= 0)
    read = number[choice.read[own]]
    order = np.argsort(read, kind="stable")
    own, read = own[order], read[order]
    skipped = wanted.offset[own] - rows.offset[read]
    strides = rows.local_stride[read]
    copies = Copies(
        source=rows.local_offset[read].astype(np.int64) + (skipped * strides).sum(axis=1),
        target=wanted.local_offset[own].astype(np.int64),
        run_bytes=wanted.run_bytes[own],
        count=wanted.count[own],
        source_stride=strides,
        target_stride=wanted.local_stride[own],
    )
    return copies, batch[read]


def _with_scratch(
    needs: NeedTable, choice: Choice, rows: PieceTable, order: Int, scratch: Scratch
) -> NeedTable:
    """The needs, and behind them each staged read's box as one."""
    need = choice.plan.pieces.need[choice.piece[order]]
    width = needs.width
    return replace(
        needs,
        tensor=np.concatenate([needs.tensor, needs.tensor[need]]),
        elsize=np.concatenate([needs.elsize, needs.elsize[need]]),
        rank=np.concatenate([needs.rank, needs.rank[need]]),
        offset=np.concatenate([needs.offset, rows.offset[:, -width:]]),
        shape=np.concatenate([needs.shape, rows.shape[:, -width:]]),
        local_offset=np.concatenate([needs.local_offset, rows.local_offset]),
        arena_bytes=scratch.end,
    )


def _reads(plan: Plan, pieces: PieceTable) -> tuple[SourceReads, ...]:
    order = {(each.source_index, each.device_id): each for each in plan.reads}
    begins = np.ones(len(pieces), np.bool_)
    begins[1:] = (pieces.source[1:] != pieces.source[:-1]) | (pieces.device_id[1:] != pieces.device_id[:-1])
    first = np.flatnonzero(begins)
    totals = np.add.reduceat(pieces.size_bytes, first)
    return tuple(
        replace(order[int(pieces.source[a]), int(pieces.device_id[a])], first=a, last=b, total_bytes=total)
        for a, b, total in zip(
            first.tolist(), [*first[1:].tolist(), len(pieces)], totals.tolist(), strict=True
        )
    )


def _take(pieces: PieceTable, rows: Int) -> PieceTable:
    return PieceTable(*(getattr(pieces, name)[rows] for name in PieceTable.__slots__))


def _up(size_bytes: int, multiple: int) -> int:
    return -(-size_bytes // multiple) * multiple
