"""What to read: pieces of needs, each a strided set of byte runs at one source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.geometry import Bool, Int, Source, UInt


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """Boxes to read, sorted by (source, device, place in the arena).

    Piece i is the part (`offset[i]`, `shape[i]`, global coordinates) of need `need[i]` that is read
    from row `row[i]` of the merged shard table. Its bytes are `run_count[i]` runs of `run_bytes[i]`:
    the first from `remote_addr[i]` to `local_offset[i]`, the others `count[i]` times along each axis
    at `remote_stride[i]` and `local_stride[i]` bytes.
    """

    need: Int
    row: Int
    source: Int
    device_id: Int
    offset: Int
    shape: Int
    size_bytes: Int
    remote_addr: UInt
    local_offset: UInt
    run_bytes: Int
    run_count: Int
    count: Int
    remote_stride: Int
    local_stride: Int

    def __len__(self) -> int:
        return len(self.need)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Byte runs contiguous on both sides: equal-length columns of dtype uint64.

    Run i goes from `remote_addr[i]` in the source's memory to `local_offset[i]` in our arena.
    """

    remote_addr: UInt
    local_offset: UInt
    size_bytes: UInt

    def __len__(self) -> int:
        return len(self.size_bytes)

    @property
    def total_bytes(self) -> int:
        """The sum of all run lengths."""
        return int(self.size_bytes.sum())


@dataclass(frozen=True, slots=True)
class SourceReads:
    """The pieces `first` .. `last - 1` of a plan: all that is read from one device of one source."""

    source: Source
    source_index: int
    device_id: int
    first: int
    last: int
    total_bytes: int

    @property
    def piece_rows(self) -> slice:
        """The rows of these pieces in the plan's piece table."""
        return slice(self.first, self.last)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that one generator rank reads for one version, grouped by source."""

    owner: str
    pieces: PieceTable
    reads: tuple[SourceReads, ...]
    needed_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that go over the wire."""
        return int(self.pieces.size_bytes.sum())

    @property
    def amplification(self) -> float:
        """Bytes read per byte needed; 1.0 where nothing is needed."""
        return self.total_bytes / self.needed_bytes if self.needed_bytes else 1.0

    @property
    def descriptors(self) -> int:
        """Runs after merging, over all sources; costs no expansion."""
        return int(self.pieces.run_count.sum()) - int(_joins(self.pieces).sum())

    @property
    def source_bytes(self) -> dict[Source, int]:
        """Bytes read from each source."""
        totals: dict[Source, int] = {}
        for reads in self.reads:
            totals[reads.source] = totals.get(reads.source, 0) + reads.total_bytes
        return totals

    def runs(self, rows: Int | slice | SourceReads) -> Runs:
        """The byte runs of some pieces, in order, merged where adjacent on both sides.

        `rows` may be the reads of one source, a slice, or row numbers. All of it is materialised: 24
        bytes a run, and as much again while it is made.
        """
        chosen = rows.piece_rows if isinstance(rows, SourceReads) else rows
        p = self.pieces
        count, remote_stride, local_stride = p.count[chosen], p.remote_stride[chosen], p.local_stride[chosen]
        run_bytes, run_count = p.run_bytes[chosen], p.run_count[chosen]
        piece, k = expand(np.zeros(len(run_count), np.int64), run_count)
        remote, local = p.remote_addr[chosen][piece], p.local_offset[chosen][piece]
        if len(piece) > len(run_count):
            for axis in range(count.shape[1] - 1, -1, -1):
                along = count[:, axis][piece]
                step = k % along
                k = k // along
                remote += (step * remote_stride[:, axis][piece]).astype(np.uint64)
                local += (step * local_stride[:, axis][piece]).astype(np.uint64)
        return _merged(Runs(remote, local, run_bytes[piece].astype(np.uint64)))

    def joins(self) -> Bool:
        """Where a piece's first run continues the last run of the piece before it, on both sides."""
        return _joins(self.pieces)

    def explain(self) -> str:
        """Say in words and as a table who is read and how much of what."""
        from modelexpress_rl.reshard.explain import PlanSummary  # which knows plans

        return PlanSummary.of(self).text()


def _joins(p: PieceTable) -> Bool:
    joins = np.zeros(len(p), np.bool_)
    if len(p) > 1:
        steps = p.count[:-1] - 1
        remote_end = (steps * p.remote_stride[:-1]).sum(axis=1) + p.run_bytes[:-1]
        local_end = (steps * p.local_stride[:-1]).sum(axis=1) + p.run_bytes[:-1]
        joins[1:] = (
            (p.source[1:] == p.source[:-1])
            & (p.device_id[1:] == p.device_id[:-1])
            & (p.remote_addr[:-1] + remote_end.astype(np.uint64) == p.remote_addr[1:])
            & (p.local_offset[:-1] + local_end.astype(np.uint64) == p.local_offset[1:])
        )
    return joins


def _merged(runs: Runs) -> Runs:
    begins = np.ones(len(runs), np.bool_)
    begins[1:] = (runs.remote_addr[:-1] + runs.size_bytes[:-1] != runs.remote_addr[1:]) | (
        runs.local_offset[:-1] + runs.size_bytes[:-1] != runs.local_offset[1:]
    )
    if begins.all():
        return runs
    first = np.flatnonzero(begins)
    return Runs(runs.remote_addr[first], runs.local_offset[first], np.add.reduceat(runs.size_bytes, first))
