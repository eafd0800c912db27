"""Whether our plan and 0.7.0's move the same bytes to the same places: both are carried out by address."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from tests.reshard.reference import Piece, address, need_bytes, publish, pull

DTYPE = "torch.bfloat16"


def compared(
    shapes: dict[str, tuple[int, ...]],
    shards: list[list[Piece]],
    boxes: Sequence[Piece],
    folder: Path,
    ask: Callable[[Path], Any],
    *,
    spread: int,
) -> None:
    """Give the trainer's ranks real memory, let both plan, pull by both plans, and compare with a slice.

    Raises:
        RuntimeError: a box came out otherwise; the message names the tensor and the planner.
    """
    noise = np.random.default_rng(0)
    tensors = {name: (DTYPE, noise.integers(0, 256, (*shape, 2), np.uint8)) for name, shape in shapes.items()}
    world = publish(tensors, shards)
    for number, source in enumerate(world.manifests):
        (folder / f"{number:03d}.json").write_bytes(manifests.encode(source.manifest))
    (folder / "needs").write_text(json.dumps(boxes))
    needs = [Need(name, DTYPE, offset, shape) for name, offset, shape in boxes]
    table = NeedTable.build(needs)
    ours = np.zeros(table.arena_bytes, np.uint8)
    pull(plan(table, world.merged(), spread=spread), ours)
    theirs = np.zeros(table.arena_bytes, np.uint8)
    for addr, need, at, size_bytes in ask(folder)["segments"]:
        ctypes.memmove(address(theirs) + int(table.local_offset[need]) + at, addr, size_bytes)
    for number, need in enumerate(needs):
        for who, arena in (("our", ours), ("0.7.0's", theirs)):
            if need_bytes(table, arena, number) != world.expected(need):
                raise RuntimeError(f"tensor {need.name!r}: {who} plan brings other bytes for {need}")
