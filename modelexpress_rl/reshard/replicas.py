"""Comparing what replicas of a box hold, by the digests of its slabs.

Every publisher cuts a box alike, because the cut depends on its shape and dtype alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from modelexpress_rl.errors import GeometryError
from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, Bool, Bytes, Int, Source
from modelexpress_rl.reshard.grid import LEVELS, SLABS, DigestGrid, Selection
from modelexpress_rl.reshard.merge import Merged


@dataclass(frozen=True, slots=True, eq=False)
class SlabDigests:
    """Digests of the slabs of those rows of a manifest that are `known`: `start[row]` .. `start[row + 1]`."""

    known: Bool
    start: Int
    digests: Bytes

    @classmethod
    def of(cls, selection: Selection, grid: DigestGrid, digests: Bytes) -> SlabDigests:
        """What was answered to a selection of slabs alone."""
        known = np.zeros(grid.count.shape[1], np.bool_)
        known[selection.rows] = selection.wanted[SLABS]
        count = np.where(known, grid.count[SLABS], 0)
        return cls(known, np.concatenate([np.zeros(1, np.int64), np.cumsum(count)]), digests)


def shared_rows(merged: Merged, read_rows: Int, sources: Collection[Source]) -> dict[Source, Int]:
    """Which rows of its own manifest each of `sources` shares with another of them.

    Of the boxes whose rows in the merged table are among `read_rows` only; sources that share none are
    left out.
    """
    if len(merged.box_start) - 1 == len(merged.shards):
        return {}
    among = np.array([source in sources for source in merged.sources], np.bool_)[merged.shards.source]
    box = np.repeat(np.arange(len(merged.box_start) - 1), np.diff(merged.box_start))
    needed = np.zeros(len(merged.box_start) - 1, np.bool_)
    needed[box[read_rows]] = True
    among &= needed[box]
    among &= (np.bincount(box[among], minlength=len(needed)) > 1)[box]
    rows = np.flatnonzero(among)
    return {
        merged.sources[number]: merged.manifest_row[rows[merged.shards.source[rows] == number]]
        for number in np.unique(merged.shards.source[rows]).tolist()
    }


def slabs_of(rows: Int) -> Selection:
    """Asks for the slabs of some rows of a manifest."""
    first = int(rows.min())
    wanted = np.zeros((LEVELS, int(rows.max()) - first + 1), np.bool_)
    wanted[SLABS, rows - first] = True
    return Selection(first, wanted)


def refuse_disagreeing_replicas(merged: Merged, digests: Mapping[Source, SlabDigests]) -> None:
    """Compare the digests that are known of replicas, each with the next one's of its box.

    Raises:
        GeometryError: two sources publish other bytes for one box; the message names tensor and both.
    """
    begin = np.zeros(len(merged.shards), np.int64)
    count = np.zeros(len(merged.shards), np.int64)
    is_known = np.zeros(len(merged.shards), np.bool_)
    before = 0
    for number, source in enumerate(merged.sources):
        if source not in digests:
            continue
        own = digests[source]
        rows = np.flatnonzero(merged.shards.source == number)
        rows = rows[own.known[merged.manifest_row[rows]]]
        theirs = merged.manifest_row[rows]
        begin[rows], is_known[rows] = own.start[theirs] + before, True
        count[rows] = own.start[theirs + 1] - own.start[theirs]
        before += len(own.digests)
    known = np.flatnonzero(is_known)  # box by box, as the table is sorted
    box = np.searchsorted(merged.box_start, known, side="right")
    pairs = np.flatnonzero(box[1:] == box[:-1])
    a, b = known[pairs], known[pairs + 1]
    joined = np.concatenate(
        [np.zeros((0, DIGEST_BYTES), np.uint8)]
        + [digests[source].digests for source in merged.sources if source in digests]
    )
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
