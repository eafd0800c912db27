"""Of which tensors a reader takes slices of columns: what it tells trainers, which may store them so."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import numpy as np

from modelexpress_rl.column_blocks import LONG_RUN_BYTES, MAX_DECLARED_BLOCKS, MIN_ROWS, ColumnBlocks
from modelexpress_rl.reshard.geometry import widened
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import Plan


def wanted_columns(plan: Plan, needs: NeedTable, merged: Merged) -> ColumnBlocks:
    """In how many blocks of columns this reader's slices would be contiguous, by patterns of names.

    About tensors whose shards it reads by many short runs, all of the same last two words of a name alike.
    Nothing is asked for where another tensor of such a name is cut along another axis, or where the slices
    are no whole blocks.
    """
    pieces = plan.pieces
    shard = widened(merged.shards.shape[pieces.row], pieces.shape.shape[1], 1)
    many = pieces.shape[:, :-1].prod(axis=1) >= MIN_ROWS
    short = pieces.shape[:, -1] * needs.elsize[pieces.need] < LONG_RUN_BYTES
    asked = np.unique(pieces.need[(pieces.shape[:, -1] < shard[:, -1]) & many & short])
    if not len(asked):
        return ColumnBlocks()
    full = merged.tensors.full_shape
    number = np.array([merged.tensors.index[name] for name in needs.names], np.int64)[needs.tensor]
    whole = widened(full, needs.width, 1)[number]
    by_other_axes = np.unique(needs.tensor[(needs.shape[:, :-1] < whole[:, :-1]).any(axis=1)])
    refused = {_pattern(needs.names[tensor]) for tensor in by_other_axes.tolist()}
    blocks: dict[str, int] = {}
    for need in asked.tolist():
        width, offset, extent = needs.shape[need, -1], needs.offset[need, -1], whole[need, -1]
        pattern = _pattern(needs.name(need))
        if extent % width or offset % width or not pattern:
            refused.add(pattern)
        else:
            blocks[pattern] = lcm(blocks.get(pattern, 1), int(extent // width))
    return ColumnBlocks.declared(_wanted(blocks, refused))


def _wanted(blocks: dict[str, int], refused: set[str]) -> Iterator[tuple[str, int]]:
    for pattern, count in sorted(blocks.items()):
        if pattern not in refused and count <= MAX_DECLARED_BLOCKS:
            yield pattern, count


def _pattern(name: str) -> str:
    """What a tensor shares with those of other layers and experts: the last two words of its name."""
    words = name.split(".")
    return name if len(words) < 3 else "*." + ".".join(words[-2:])
