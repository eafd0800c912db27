"""Strided views of a tensor, looked at through the boxes of it that a rank holds.

A *frame* is a tensor in row-major order; a view of it has sizes, strides and a start in elements of
the frame, as torch's views have. A `Piece` is a box of a tensor that lies strided in some memory.
`Lens.see` turns a piece of the frame into the pieces of the view that it makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


class NotABoxError(Exception):
    """A view runs across the dimensions of what it is a view of: it is no union of few boxes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and its memory in `native`: `start` and `strides` are in elements there."""

    native: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    is_cast: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """A part of a view's dimension that moves along one dimension of the frame, or along none."""

    size: int
    dim: int | None
    step: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Indices [first, first + count) of a dimension or an axis; `stride` apart in memory, `at` its start."""

    first: int
    count: int
    stride: int
    at: int = 0


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Lens:
    """A view of a frame, as axes along the frame's dimensions; a view's dimension has one or more."""

    base: tuple[int, ...]
    axes: tuple[tuple[_Axis, ...], ...]

    @classmethod
    def of(cls, frame: Sequence[int], sizes: Sequence[int], strides: Sequence[int], start: int) -> Lens:
        """Take a view apart.

        Raises:
            NotABoxError: a dimension of the view wraps around one of the frame's.
        """
        frame_strides = row_major(frame)
        base = tuple(
            start // stride % max(extent, 1) for stride, extent in zip(frame_strides, frame, strict=True)
        )
        axes = tuple(
            _axes(frame, frame_strides, base, size, stride)
            for size, stride in zip(sizes, strides, strict=True)
        )
        for dim, extent in enumerate(frame):
            reach = sum(axis.step * (axis.size - 1) for axis in _along(axes, dim))
            if base[dim] + reach >= max(extent, 1) and all(sizes):
                raise NotABoxError
        return cls(base, axes)

    def see(self, piece: Piece) -> Iterator[Piece]:
        """The pieces of the view that lie in a piece of the frame."""
        if not all(piece.shape) or any(not axis.size for group in self.axes for axis in group):
            return
        fits = [self._fits(piece, dim) for dim in range(len(self.base))]
        origin = piece.start + sum(
            (base - offset) * stride
            for base, offset, stride in zip(self.base, piece.offset, piece.strides, strict=True)
        )
        for chosen in product(*fits):
            held = {id(axis): span for one in chosen for axis, span in one}
            groups = [[held.get(id(axis), _Span(0, axis.size, 0)) for axis in group] for group in self.axes]
            sizes = [[axis.size for axis in group] for group in self.axes]
            joined = [_joined(spans, of) for spans, of in zip(groups, sizes, strict=True)]
            for spans in product(*joined):
                yield Piece(
                    native=piece.native,
                    offset=tuple(span.first for span in spans),
                    shape=tuple(span.count for span in spans),
                    start=origin + sum(span.at for span in spans),
                    strides=tuple(span.stride for span in spans),
                    is_cast=piece.is_cast,
                )

    def _fits(self, piece: Piece, dim: int) -> list[list[tuple[_Axis, _Span]]]:
        """The ways in which the axes along one dimension of the frame stay within the piece."""
        axes = sorted(_along(self.axes, dim), key=lambda axis: -axis.step)
        low, high, stride = piece.offset[dim], piece.offset[dim] + piece.shape[dim], piece.strides[dim]
        return [
            [
                (axis, _Span(first, count, axis.step * stride, first * axis.step * stride))
                for axis, (first, count) in zip(axes, found, strict=True)
            ]
            for found in _fit(axes, self.base[dim], low, high)
        ]


def _along(axes: Sequence[Sequence[_Axis]], dim: int) -> list[_Axis]:
    return [axis for group in axes for axis in group if axis.dim == dim]


def _axes(
    frame: Sequence[int], frame_strides: Sequence[int], base: Sequence[int], size: int, stride: int
) -> tuple[_Axis, ...]:
    """One dimension of a view as axes, the outermost first; it has several where it joins dimensions."""
    if size == 1:
        return ()
    if size == 0 or stride == 0:
        return (_Axis(size, None, 0),)
    dims = [dim for dim, extent in enumerate(frame) if extent > 1 and frame_strides[dim] <= stride]
    if not dims:
        raise NotABoxError
    dim = dims[0]
    step, rest = divmod(stride, frame_strides[dim])
    if rest:
        raise NotABoxError
    if base[dim] + step * (size - 1) < frame[dim]:
        return (_Axis(size, dim, step),)
    inner, uneven = divmod(frame[dim], step)
    outer, left = divmod(size, inner or 1)
    if uneven or left or base[dim] >= step:
        raise NotABoxError
    rest_of_it = _axes(frame, frame_strides, base, outer, frame[dim] * frame_strides[dim])
    return (*rest_of_it, _Axis(inner, dim, step)) if inner > 1 else rest_of_it


def _fit(axes: Sequence[_Axis], base: int, low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Boxes of the axes' indices for which base + sum(step * index) lies in [low, high)."""
    if not axes:
        return [()] if low <= base < high else []
    axis, inner = axes[0], axes[1:]
    reach = sum(one.step * (one.size - 1) for one in inner)
    touched = range(
        max(0, -(-(low - reach - base) // axis.step)), min(axis.size, (high - 1 - base) // axis.step + 1)
    )
    whole = range(
        max(0, -(-(low - base) // axis.step)), min(axis.size, (high - 1 - reach - base) // axis.step + 1)
    )
    found: list[tuple[tuple[int, int], ...]] = []
    if whole:
        found.append(((whole.start, len(whole)), *((0, one.size) for one in inner)))
    for index in touched:
        if index not in whole:
            found.extend(((index, 1), *tail) for tail in _fit(inner, base + index * axis.step, low, high))
    return found


def _joined(spans: Sequence[_Span], sizes: Sequence[int]) -> list[_Span]:
    """The spans of a dimension that has these axes, outermost first."""
    found, inner = [_Span(0, 1, 0)], 1
    for span, size in zip(reversed(spans), reversed(sizes), strict=True):
        found = _under(span, found, inner)
        inner *= size
    return found


def _under(outer: _Span, found: list[_Span], inner: int) -> list[_Span]:
    """What `found` within a dimension of `inner` elements becomes where `outer` repeats it."""
    only = found[0]
    is_whole = len(found) == 1 and (only.first, only.count) == (0, inner)
    if is_whole and (inner == 1 or outer.count == 1 or outer.stride == inner * only.stride):
        stride = outer.stride if inner == 1 else only.stride
        return [_Span(outer.first * inner, outer.count * inner, stride, outer.at + only.at)]
    return [
        _Span(
            (outer.first + index) * inner + one.first,
            one.count,
            one.stride,
            outer.at + index * outer.stride + one.at,
        )
        for index in range(outer.count)
        for one in found
    ]


def contiguous_count(piece: Piece) -> int:
    """How many contiguous boxes a piece is."""
    return prod(piece.shape[: _contiguous_from(piece)])


def contiguous(piece: Piece) -> Iterator[Piece]:
    """The row-major contiguous boxes that make up a piece, in order."""
    first = _contiguous_from(piece)
    tail = piece.shape[first:]
    for index in product(*(range(extent) for extent in piece.shape[:first])):
        yield Piece(
            native=piece.native,
            offset=tuple(
                offset + at for offset, at in zip(piece.offset, (*index, *(0 for _ in tail)), strict=True)
            ),
            shape=(*(1 for _ in index), *tail),
            start=piece.start
            + sum(at * stride for at, stride in zip(index, piece.strides[:first], strict=True)),
            strides=piece.strides,
            is_cast=piece.is_cast,
        )


def _contiguous_from(piece: Piece) -> int:
    """The first dimension from which on a piece lies row-major without gaps."""
    step = 1
    for dim in reversed(range(len(piece.shape))):
        if piece.shape[dim] > 1 and piece.strides[dim] != step:
            return dim + 1
        step *= piece.shape[dim]
    return 0
