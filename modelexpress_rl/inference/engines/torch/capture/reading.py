"""Which boxes are read for a set of copies, and where in them each copy finds its elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelexpress_rl.inference.engines.torch.capture.strided import Aligned, Transfer, row_major

# A copy that leaves coordinates out is read as several boxes, as long as these are worth a read each.
MIN_BOX_BYTES = 4 << 10
MAX_BOXES = 1 << 10

Corner = tuple[int, ...]
Box = tuple[Corner, Corner]


@dataclass(frozen=True, slots=True)
class Local:
    """`piece` as a copy out of a box that is read: `transfer` reads from `box`, row-major."""

    box: Box
    piece: Aligned
    transfer: Transfer


def hull(piece: Aligned) -> Box:
    """The smallest box around what an aligned copy reads, as corners."""
    return piece.begin, piece.end


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(high - low for low, high in zip(*box, strict=True))


def worth_a_read(piece: Aligned, itemsize: int) -> list[Aligned]:
    """Cut a copy at the coordinates that it leaves out, while the parts are many bytes and few."""
    parts = [piece]
    for _ in range(len(piece.axis)):
        if not (gaps := parts[0].gaps()):
            break
        size = parts[0].transfer.dims[gaps[0]].size
        cut = [part.cut(gaps[0], k, k + 1) for part in parts for k in range(size)]
        if len(cut) > MAX_BOXES or volume(hull(cut[0])) * itemsize < MIN_BOX_BYTES:
            break
        parts = cut
    return parts


def boxes_of(wanted: Iterable[Box]) -> tuple[Box, ...]:
    """Boxes that hold each of `wanted` whole: fewer of them, where that reads nothing more."""
    boxes = sorted(set(wanted))
    rank = len(boxes[0][0]) if boxes else 0
    merged = True
    while merged and len(boxes) > 1:
        merged = False
        for last in range(rank):
            order = [axis for axis in range(rank) if axis != last] + [last] * (rank > 0)
            found = _swept(sorted(boxes, key=lambda box: [box[0][axis] for axis in order]))
            merged = merged or len(found) < len(boxes)
            boxes = found
    return tuple(sorted(boxes))


def _swept(boxes: Sequence[Box]) -> list[Box]:
    """Join neighbours in this order whose common box is no bigger than both together."""
    out: list[Box] = []
    for box in boxes:
        while out:
            both = _around(out[-1], box)
            if volume(both) > volume(out[-1]) + volume(box):
                break
            box = both
            out.pop()
        out.append(box)
    return out


def _around(a: Box, b: Box) -> Box:
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))


def located(piece: Aligned, boxes: Sequence[Box], itemsize: int) -> list[Local]:
    """The copy out of the boxes that hold it: one, or one for each part that is read by itself."""
    whole = _holding(hull(piece), boxes)
    parts = [piece] if whole is not None else worth_a_read(piece, itemsize)
    found = []
    for part in parts:
        box = _holding(hull(part), boxes)
        assert box is not None, "every part that is read lies in a box"
        shape = [high - low for low, high in zip(*box, strict=True)]
        strides = row_major(shape)
        offset = sum((b - low) * s for b, low, s in zip(part.begin, box[0], strides, strict=True))
        found.append(Local(box, part, part.moved_to(offset, strides)))
    return found


def _holding(inner: Box, boxes: Sequence[Box]) -> Box | None:
    for box in boxes:
        inside = all(
            low <= a and b <= high for low, a, b, high in zip(box[0], inner[0], inner[1], box[1], strict=True)
        )
        if inside:
            return box
    return None
