"""What storages hold while `load_weights` runs: published tensors, copies of them, parameters, results.

No storage here has memory. A `Copied` one remembers of which views it is made, so that a copy out of it is
resolved to copies out of the published tensors themselves: what a loader rearranges on its way costs
nothing, and a narrow of a reordered copy still reads only its own elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from modelexpress_rl.inference.engines.torch.capture.strided import (
    MAX_PIECES,
    Aligned,
    Axes,
    Fragmented,
    Transfer,
    aligned,
)


@dataclass(frozen=True, slots=True)
class Published:
    """A published tensor, row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """A storage of the live module; `name` is of a tensor that lies in it.

    What is neither a parameter nor written may be read, through `live`, a tensor of that storage.
    """

    name: str
    live: torch.Tensor
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """One value everywhere."""

    value: bool | int | float | complex


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Values that the loader made of nothing that is published; `tensor` is a copy of its own."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of an operation that no copy expresses; `of` names what it was computed from."""

    operation: str
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The box (`offset`, `shape`) of a copy, and the view that it was copied from.

    `begin` and `strides` are that view's in its own storage, by axis of the copy.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    content: Content
    dtype: torch.dtype
    begin: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor that the loader made: its `parts` cover it, a later one lies over those before it."""

    axes: Axes
    dtype: torch.dtype
    parts: tuple[Part, ...]


Leaf = Published | StandIn | Constant | Known | Computed
Content = Leaf | Copied


@dataclass(frozen=True, slots=True)
class Resolved:
    """A copy out of something that is no copy itself, read as `dtype`, cast to each of `casts` in turn."""

    content: Leaf
    transfer: Transfer
    dtype: torch.dtype
    casts: tuple[torch.dtype, ...] = ()

    @property
    def last_dtype(self) -> torch.dtype:
        """The dtype that it has where it is written."""
        return self.casts[-1] if self.casts else self.dtype


def resolved(content: Content, transfer: Transfer, dtype: torch.dtype) -> list[Resolved]:
    """Follow a copy out of `content`, read as `dtype`, to where its elements come from.

    Raises:
        Fragmented: it falls into too many pieces.
    """
    if not isinstance(content, Copied):
        return [Resolved(content, transfer, dtype)]
    if dtype != content.dtype:
        raise Fragmented(f"a copy as {content.dtype} is viewed as {dtype}")
    found = []
    for part, through in _through_parts(aligned(transfer, content.axes), content.parts):
        casts = () if part.dtype == content.dtype else (content.dtype,)
        own = resolved(part.content, through, part.dtype)
        found += [replace(each, casts=(*each.casts, *casts)) for each in own]
    return found


def _through_parts(pieces: list[Aligned], parts: Sequence[Part]) -> Iterator[tuple[Part, Transfer]]:
    """What of the pieces comes from which part, the last part first, as copies out of the part's source."""
    for part in reversed(parts):
        inside, left = list[Aligned](), list[Aligned]()
        for piece in pieces:
            _sort(piece, part, inside, left)
        for piece in inside:
            moved = sum(
                (begin - low) * stride
                for begin, low, stride in zip(piece.begin, part.offset, part.strides, strict=True)
            )
            yield part, piece.moved_to(part.begin + moved, part.strides)
        pieces = left
    assert not pieces, "the parts of a copy cover it"


def _sort(piece: Aligned, part: Part, inside: list[Aligned], outside: list[Aligned]) -> None:
    """Put what of `piece` lies in the box of `part` into `inside`, and what does not into `outside`."""
    for axis, (low, extent) in enumerate(zip(part.offset, part.shape, strict=True)):
        high = low + extent
        begin, end = piece.begin[axis], piece.end[axis]
        if begin >= low and end <= high:
            continue
        if begin >= high or end <= low:
            outside.append(piece)
            return
        own = piece.along(axis)
        at = own[-1]
        step, size = piece.step[at], piece.transfer.dims[at].size
        if len(own) > 1:  # regrouped: each step of the outermost dimension by itself
            if len(inside) + len(outside) + size > MAX_PIECES:
                raise Fragmented(f"a view falls into more than {MAX_PIECES} boxes")
            for k in range(size):
                _sort(piece.cut(at, k, k + 1), part, inside, outside)
            return
        first = max(-((begin - low) // step), 0)
        last = min((high - 1 - begin) // step + 1, size)
        if first >= last:
            outside.append(piece)
            return
        if first > 0:
            outside.append(piece.cut(at, 0, first))
        if last < size:
            outside.append(piece.cut(at, last, size))
        piece = piece.cut(at, first, last)
    inside.append(piece)


def overlaid(under: Copied, transfer: Transfer, content: Content, dtype: torch.dtype) -> Copied:
    """`under` after a copy of `content` into it; `transfer` writes to it.

    Raises:
        Fragmented: the copy writes no boxes.
    """
    parts = []
    for piece in aligned(transfer.turned(), under.axes):
        rank = len(piece.begin)
        strides = [0] * rank
        if piece.gaps():
            raise Fragmented("a temporary tensor is written by a strided copy")
        for axis in range(rank):
            own = piece.along(axis)
            if len(own) > 1:
                raise Fragmented("a temporary tensor is written by a view that regroups its axes")
            if own:
                strides[axis] = piece.transfer.dims[own[0]].target
        shape = tuple(end - begin for begin, end in zip(piece.begin, piece.end, strict=True))
        parts.append(Part(piece.begin, shape, content, dtype, piece.transfer.target, tuple(strides)))
    return replace(under, parts=(*under.parts, *parts))
