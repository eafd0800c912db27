"""Laying needs out as their sources lie, where neighbours there then are neighbours here, read as one run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modelexpress_rl.reshard.geometry import Int
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan

ALIGN_BYTES = 64


def in_source_order(needs: NeedTable, plan: Plan) -> tuple[NeedTable, Plan]:
    """The same needs and reads, in an arena whose order is that of the memory that is read.

    Needs stand in the order of (source, device, address) of their first pieces, each at a multiple of
    `ALIGN_BYTES`; those that are empty come last. Where that makes runs no fewer, all stays as it is: that
    is the order of publication, in which digests are made.
    """
    pieces = plan.pieces
    order = np.lexsort((pieces.remote_addr, pieces.device_id, pieces.source))
    _, first = np.unique(pieces.need[order], return_index=True)
    read = pieces.need[order][np.sort(first)]
    rest = np.ones(len(needs), np.bool_)
    rest[read] = False
    sequence = np.concatenate([read, np.flatnonzero(rest)])
    places = np.empty(len(needs), np.int64)
    ends = np.cumsum(-(-needs.size_bytes[sequence] // ALIGN_BYTES) * ALIGN_BYTES)
    places[sequence] = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(needs) else ends
    moved = places - needs.local_offset.astype(np.int64)
    if not moved.any():
        return needs, plan
    local = (pieces.local_offset.astype(np.int64) + moved[pieces.need]).astype(np.uint64)
    table = _sorted(replace(pieces, local_offset=local))
    arena_bytes = int((places + needs.size_bytes).max(initial=0))
    laid = replace(needs, local_offset=places.astype(np.uint64), arena_bytes=arena_bytes)
    moved_plan = replace(plan, pieces=table)
    if moved_plan.descriptors >= plan.descriptors:
        return needs, plan
    return laid, moved_plan


def _sorted(pieces: PieceTable) -> PieceTable:
    order: Int = np.lexsort((pieces.local_offset, pieces.device_id, pieces.source))
    return PieceTable(*(getattr(pieces, name)[order] for name in PieceTable.__slots__))
