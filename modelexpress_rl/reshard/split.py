"""Cutting big pieces of a plan into smaller reads, so that a part is checked while the next is read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.geometry import Int, widened
from modelexpress_rl.reshard.grid import slab_parts
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.plan import PieceTable, Plan


def split(plan: Plan, merged: Merged, limit_bytes: int) -> Plan:
    """The same reads, with pieces of more than `limit_bytes` cut where the slabs of their shards end.

    A piece that does not consist of whole slabs stays as it is; so does one that is a single slab.
    """
    pieces = plan.pieces
    big = np.flatnonzero(pieces.size_bytes > limit_bytes)
    if not len(big):
        return plan
    axis, slab, slabs = _slabs(pieces, merged, big)
    per_cut = np.maximum(limit_bytes // np.maximum(pieces.size_bytes[big] // np.maximum(slabs, 1), 1), 1)
    cuts = np.ones(len(pieces), np.int64)
    cuts[big] = np.maximum(-(-slabs // per_cut), 1)
    piece, number = expand(np.zeros(len(pieces), np.int64), cuts)
    table = PieceTable(*(getattr(pieces, name)[piece] for name in PieceTable.__slots__))
    of_big = np.full(len(pieces), -1, np.int64)
    of_big[big] = np.arange(len(big))
    rows = np.flatnonzero((cuts > 1)[piece])
    own = of_big[piece[rows]]
    skipped = number[rows] * per_cut[own]
    extent = np.minimum(per_cut[own], slabs[own] - skipped) * slab[own]
    narrow(table, rows, axis[own], skipped * slab[own], extent)
    start = np.concatenate([np.zeros(1, np.int64), np.cumsum(cuts)])
    reads = tuple(
        replace(each, first=int(start[each.first]), last=int(start[each.last])) for each in plan.reads
    )
    return replace(plan, pieces=table, reads=reads)


def _slabs(pieces: PieceTable, merged: Merged, big: Int) -> tuple[Int, Int, Int]:
    """Along which axis the shards of some pieces are cut, how far a slab goes, how many a piece has.

    A piece that can't be cut there has 0.
    """
    width = pieces.offset.shape[1]
    row = pieces.row[big]
    elsize = merged.tensors.elsize[merged.shards.tensor[row]]
    shape = merged.shards.shape[row]
    parts = widened(slab_parts(shape, elsize), width, 1)
    axis = np.argmax(parts > 1, axis=1)
    at = np.arange(len(big)), axis
    slab = widened(shape, width, 1)[at] // parts[at]
    begin = pieces.offset[big][at] - widened(merged.shards.offset[row], width, 0)[at]
    extent = pieces.shape[big][at]
    whole = (begin % slab == 0) & (extent % slab == 0) & (parts[at] > 1)
    return axis, slab, np.where(whole, extent // slab, 0)


def narrow(table: PieceTable, rows: Int, axis: Int, skipped: Int, extent: Int) -> None:
    """Make the pieces at `rows` those of `extent` elements after `skipped`, along one axis each."""
    at = rows, axis
    whole = table.shape[at]
    table.offset[at] += skipped
    table.shape[at] = extent
    table.size_bytes[rows] = table.size_bytes[rows] // whole * extent
    table.remote_addr[rows] += (skipped * table.remote_stride[at]).astype(np.uint64)
    table.local_offset[rows] += (skipped * table.local_stride[at]).astype(np.uint64)
    # An axis that lies inside the runs makes them shorter, any other makes them fewer.
    inside = table.count[at] == 1
    table.run_bytes[rows] = np.where(inside, table.run_bytes[rows] // whole * extent, table.run_bytes[rows])
    table.run_count[rows] = np.where(inside, table.run_count[rows], table.run_count[rows] // whole * extent)
    table.count[at] = np.where(inside, 1, extent)
