"""The result of a capture: needs, and the copies that put what was staged where `load_weights` would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from modelexpress_rl.inference.engines.torch.capture.contents import Constant, Known, Published, Resolved
from modelexpress_rl.inference.engines.torch.capture.errors import refused
from modelexpress_rl.inference.engines.torch.capture.filling import unfilled
from modelexpress_rl.inference.engines.torch.capture.reading import (
    Box,
    boxes_of,
    hull,
    located,
    worth_a_read,
)
from modelexpress_rl.inference.engines.torch.capture.strided import (
    Aligned,
    Axes,
    Fragmented,
    Transfer,
    aligned,
)
from modelexpress_rl.reshard.needs import Need


@dataclass(frozen=True, slots=True)
class Target:
    """A view of a parameter or buffer; `offset` and the strides of copies are relative to where it begins."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCopy:
    """One copy of the install: into `target`, from need number `need`, or else of `value`.

    `transfer` counts elements in the need's box (row-major) and from where the target begins. What is
    staged is read as `dtype`, then cast to each of `casts`, then copied, which casts once more.
    """

    target: Target
    transfer: Transfer
    dtype: torch.dtype
    casts: tuple[torch.dtype, ...] = ()
    need: int | None = None
    value: torch.Tensor | bool | int | float | complex | None = None


@dataclass(frozen=True, slots=True)
class Widened:
    """A box that is read although not all of its elements are used."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    unused: int


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """What a rank loads. The copies are to be made in their order."""

    needs: tuple[Need, ...]
    copies: tuple[CapturedCopy, ...]
    widened: tuple[Widened, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """A resolved copy whose transfer writes relative to where `target` begins."""

    target: Target
    resolved: Resolved


def assembled(landings: Sequence[Landing], dtypes: dict[str, str]) -> Captured:
    """Choose the boxes that are read, and find every copy's elements in them.

    Raises:
        CaptureRefused: a view falls into too many pieces.
    """
    pieces: list[list[Aligned]] = []
    by_name: dict[str, list[Aligned]] = {}
    itemsize: dict[str, int] = {}
    for landing in landings:
        content, own = landing.resolved.content, list[Aligned]()
        if isinstance(content, Published):
            own = _aligned(landing, content)
            by_name.setdefault(content.name, []).extend(own)
            itemsize[content.name] = content.dtype.itemsize
        pieces.append(own)
    boxes = {
        name: boxes_of(hull(part) for piece in own for part in worth_a_read(piece, itemsize[name]))
        for name, own in by_name.items()
    }
    used: dict[tuple[str, Box], list[Aligned]] = {}
    located_in = [
        [
            (content.name, each)
            for piece in own
            for each in located(piece, boxes[content.name], itemsize[content.name])
        ]
        if isinstance(content := landing.resolved.content, Published)
        else []
        for landing, own in zip(landings, pieces, strict=True)
    ]
    for name, each in chain.from_iterable(located_in):
        used.setdefault((name, each.box), []).append(each.piece)
    # A part may lie in a bigger box of another copy, too, and is then taken from there.
    keys = [(name, box) for name in sorted(boxes) for box in boxes[name] if (name, box) in used]
    number = {key: i for i, key in enumerate(keys)}
    copies: list[CapturedCopy] = []
    for landing, places in zip(landings, located_in, strict=True):
        if not isinstance(landing.resolved.content, Published):
            copies.append(_of_value(landing))
        copies += [_of_need(landing, each.transfer, number[name, each.box]) for name, each in places]
    return Captured(
        needs=tuple(Need(name, dtypes[name], low, _extents((low, high))) for name, (low, high) in keys),
        copies=tuple(copies),
        widened=tuple(_widened(key, used[key]) for key in keys if _is_widened(key[1], used[key])),
    )


def _aligned(landing: Landing, content: Published) -> list[Aligned]:
    try:
        return aligned(landing.resolved.transfer, Axes.row_major(content.shape))
    except Fragmented as error:
        raise refused(f"tensor {content.name!r} into {landing.target.name!r}: {error}") from error


def _of_value(landing: Landing) -> CapturedCopy:
    content = landing.resolved.content
    assert isinstance(content, (Constant, Known))
    value = content.value if isinstance(content, Constant) else content.tensor
    resolved = landing.resolved
    return CapturedCopy(landing.target, resolved.transfer, resolved.dtype, resolved.casts, value=value)


def _of_need(landing: Landing, transfer: Transfer, need: int) -> CapturedCopy:
    resolved = landing.resolved
    return CapturedCopy(landing.target, transfer, resolved.dtype, resolved.casts, need=need)


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in zip(*box, strict=True))


def _is_widened(box: Box, pieces: Sequence[Aligned]) -> bool:
    """Whether elements may be unused: no single copy takes the whole box."""
    return not any(hull(piece) == box and not piece.gaps() for piece in pieces) and _unused(box, pieces) > 0


def _unused(box: Box, pieces: Sequence[Aligned]) -> int:
    return unfilled(_extents(box), [piece.relative_to(box[0]) for piece in pieces])


def _widened(key: tuple[str, Box], pieces: Sequence[Aligned]) -> Widened:
    name, box = key
    return Widened(name, box[0], _extents(box), _unused(box, pieces))
