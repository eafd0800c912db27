"""Comparing what replicas of a box hold, by whole tables of their digests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from modelexpress_rl.errors import GeometryError
from modelexpress_rl.reshard.boxes import expand
from modelexpress_rl.reshard.digests import DigestTable, GridRule
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, Bytes, Source
from modelexpress_rl.reshard.merge import Merged


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
