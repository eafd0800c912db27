"""Tensors that an arena stores in blocks of columns, each a shard of its own.

Readers that take a slice of a tensor's last axis would read a short run for each row. A copy of the
tensor is made anyway in the copy modes: it is made block by block, so that the slice is one run. In the
manifest each block is simply a shard, which readers of every version understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.column_blocks import LONG_RUN_BYTES, MIN_ROWS, ColumnBlocks
from modelexpress_rl.train.adapter import SourceBox
from modelexpress_rl.train.memory import host_bytes, torch_bytes

COPY_ROWS_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PackedBox:
    """A box whose columns are cut at `cuts` (elements within it, 0 and its extent included)."""

    box: SourceBox
    cuts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Its rows: the product of all extents but the last."""
        return prod(self.box.shape[:-1])

    @property
    def elsize(self) -> int:
        """Bytes of an element."""
        return self.box.size_bytes // prod(self.box.shape)

    def at(self, addr: int, owner: Any) -> list[SourceBox]:
        """Its blocks, one after the other in host memory from `addr` on."""
        box, found = self.box, []
        for begin, end in pairwise(self.cuts):
            found.append(
                replace(
                    box,
                    offset=(*box.offset[:-1], box.offset[-1] + begin),
                    shape=(*box.shape[:-1], end - begin),
                    addr=addr + self.rows * begin * self.elsize,
                    size_bytes=self.rows * (end - begin) * self.elsize,
                    device_kind="cpu",
                    device_index=0,
                    owner=owner,
                )
            )
        return found

    def row_ranges(self) -> list[range]:
        """Its rows in parts that are worth a thread's while."""
        step = max(1, COPY_ROWS_BYTES // (self.box.size_bytes // self.rows))
        return [range(begin, min(begin + step, self.rows)) for begin in range(0, self.rows, step)]

    def copy(self, target: Any, rows: range) -> None:
        """Copy some rows into the blocks that `target` holds, an array or, on a GPU, a tensor of bytes.

        Rows on the host have arrived when this returns; those on a GPU are queued on its current stream.
        """
        if self.box.device_kind == "cpu":
            self._copy_here(target, rows)
        else:
            self._queue(target, rows)

    def _copy_here(self, target: NDArray[np.uint8], rows: range) -> None:
        box, elsize = self.box, self.elsize
        size = gcd(8, elsize * gcd(*self.cuts), box.addr)
        dtype = np.dtype(f"u{size}")
        width = box.shape[-1] * elsize // size
        source = host_bytes(box.addr, box.size_bytes).view(dtype).reshape(self.rows, width)
        for begin, end in pairwise(self.cuts):
            at, columns = self.rows * begin * elsize, (end - begin) * elsize
            block = target[at : at + self.rows * columns].view(dtype).reshape(self.rows, columns // size)
            part = source[rows.start : rows.stop, begin * elsize // size : end * elsize // size]
            np.copyto(block[rows.start : rows.stop], part)

    def _queue(self, target: Any, rows: range) -> None:
        import torch  # only an engine that has tensors on a GPU comes here

        box, elsize = self.box, self.elsize
        source = torch_bytes(box.addr, box.size_bytes, box.owner).view(self.rows, box.shape[-1] * elsize)
        into = target if isinstance(target, torch.Tensor) else torch.from_numpy(target)
        for begin, end in pairwise(self.cuts):
            at, columns = self.rows * begin * elsize, (end - begin) * elsize
            block = into[at : at + self.rows * columns].view(self.rows, columns)
            part = source[rows.start : rows.stop, begin * elsize : end * elsize]
            block[rows.start : rows.stop].copy_(part, non_blocking=True)


def packed(boxes: Sequence[SourceBox], blocks: ColumnBlocks) -> dict[int, PackedBox]:
    """Which of these boxes are stored in blocks of columns, by their place in the sequence.

    Those are left alone whose readers' slices are long or few runs as they are, whose tensor can't be
    cut into as many equal blocks, and those that share memory with another box.
    """
    found: dict[int, PackedBox] = {}
    if not blocks.rules:
        return found
    for number, box in enumerate(boxes):
        cuts = _cuts(box, blocks.count(box.name, box.full_shape[-1]) if box.full_shape else 1)
        if len(cuts) > 2:
            found[number] = PackedBox(box, cuts)
    for number in _sharing(boxes):
        found.pop(number, None)
    return found


def _cuts(box: SourceBox, count: int) -> tuple[int, ...]:
    whole = (0, box.shape[-1]) if box.shape else ()
    if box.block is not None:
        return whole
    if count < 2 or len(box.shape) < 2 or not box.size_bytes or box.full_shape[-1] % count:
        return whole
    elsize = box.size_bytes // prod(box.shape)
    width = box.full_shape[-1] // count
    if prod(box.shape[:-1]) < MIN_ROWS or width * elsize >= LONG_RUN_BYTES:
        return whole
    begin, end = box.offset[-1], box.offset[-1] + box.shape[-1]
    return (0, *(cut - begin for cut in range((begin // width + 1) * width, end, width)), end - begin)


def _sharing(boxes: Sequence[SourceBox]) -> set[int]:
    """The boxes whose memory overlaps another's."""
    order = sorted(
        (n for n, box in enumerate(boxes) if box.size_bytes),
        key=lambda n: (boxes[n].device_kind, boxes[n].device_index, boxes[n].addr),
    )
    shared: set[int] = set()
    last = -1
    for number in order:
        box = boxes[number]
        if last >= 0:
            before = boxes[last]
            same_device = (before.device_kind, before.device_index) == (box.device_kind, box.device_index)
            if same_device and box.addr < before.addr + before.size_bytes:
                shared |= {last, number}
                if box.addr + box.size_bytes <= before.addr + before.size_bytes:
                    continue  # the longer one may reach into the next, too
        last = number
    return shared
