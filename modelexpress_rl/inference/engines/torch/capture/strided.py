"""Arithmetic on strided copies: which box of a row-major tensor a view of it touches, and how.

A view is (offset, sizes, strides) over a storage. A `Transfer` is a copy between two of them, and
`aligned` cuts it until each of its dimensions moves along one axis of the tensor that it reads: then its
coordinates are arithmetic, whatever chain of views led there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_PIECES = 1 << 12


class Fragmented(Exception):
    """A view would fall into more than `MAX_PIECES` pieces."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a copy: how often, and how many elements further in the source and the target."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of one strided view to another; offsets and strides in elements. Sizes are 2 or more.

    A source stride of 0 repeats one element (a broadcast).
    """

    source: int
    target: int
    dims: tuple[Dim, ...]

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        source: tuple[int, Sequence[int]],
        target: tuple[int, Sequence[int]],
    ) -> Transfer:
        """The copy between two views, each (offset, strides), of equal `sizes`."""
        dims = zip(sizes, source[1], target[1], strict=True)
        return cls(source[0], target[0], tuple(Dim(*dim) for dim in dims if dim[0] != 1))

    @property
    def volume(self) -> int:
        """Elements that it writes."""
        return math.prod(dim.size for dim in self.dims)

    def turned(self) -> Transfer:
        """The copy the other way round."""
        return Transfer(self.target, self.source, tuple(Dim(d.size, d.target, d.source) for d in self.dims))

    def cut(self, at: int, first: int, last: int) -> Transfer:
        """The part where dimension `at` runs from `first` to `last - 1`."""
        dim = self.dims[at]
        middle = () if last - first == 1 else (replace(dim, size=last - first),)
        return Transfer(
            self.source + first * dim.source,
            self.target + first * dim.target,
            (*self.dims[:at], *middle, *self.dims[at + 1 :]),
        )

    def split(self, at: int, inner: int) -> Transfer:
        """The same copy with dimension `at` as two, the inner one of size `inner`."""
        dim = self.dims[at]
        two = [
            Dim(dim.size // inner, dim.source * inner, dim.target * inner),
            Dim(inner, dim.source, dim.target),
        ]
        return replace(
            self, dims=(*self.dims[:at], *(each for each in two if each.size != 1), *self.dims[at + 1 :])
        )


@dataclass(frozen=True, slots=True)
class Axes:
    """A dense tensor in its storage: extents and strides of its axes as they lie, the outermost first.

    `number` says which axis of the tensor each is; those of extent 1 are left out.
    """

    number: tuple[int, ...]
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> Axes | None:
        """The axes of a tensor without elements that share memory; None where it has such."""
        order = sorted((a for a in range(len(shape)) if shape[a] != 1), key=lambda a: -strides[a])
        for outer, inner in itertools.pairwise(order):
            if strides[outer] < strides[inner] * shape[inner]:
                return None
        if order and strides[order[-1]] < 1:
            return None
        return cls(tuple(order), tuple(shape[a] for a in order), tuple(strides[a] for a in order), len(shape))

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> Axes:
        """The axes of a contiguous tensor."""
        axes = cls.of(shape, row_major(shape))
        assert axes is not None
        return axes


@dataclass(frozen=True, slots=True)
class Aligned:
    """A copy whose dimension i moves along axis `axis[i]` of its source, `step[i]` coordinates at a time.

    `begin` and `end` are the corners of what it reads, by axis of the tensor. A broadcast has axis -1.
    """

    transfer: Transfer
    begin: tuple[int, ...]
    end: tuple[int, ...]
    axis: tuple[int, ...]
    step: tuple[int, ...]

    def along(self, axis: int) -> list[int]:
        """Its dimensions along one axis, those of the smallest step first."""
        own = [i for i in range(len(self.axis)) if self.axis[i] == axis]
        return sorted(own, key=lambda i: self.step[i])

    def gaps(self) -> list[int]:
        """The dimensions that leave coordinates out, those of the outermost axis and largest step first."""
        found: list[int] = []
        if max(self.step, default=0) <= 1:
            return found
        for axis in range(len(self.begin)):
            reach = 1
            own = []
            for i in self.along(axis):
                if self.step[i] > reach:
                    own.append(i)
                reach += self.step[i] * (self.transfer.dims[i].size - 1)
            found += reversed(own)
        return found

    def cut(self, at: int, first: int, last: int) -> Aligned:
        """The part where dimension `at` runs from `first` to `last - 1`."""
        transfer = self.transfer.cut(at, first, last)
        begin, end = list(self.begin), list(self.end)
        begin[self.axis[at]] += first * self.step[at]
        end[self.axis[at]] -= (self.transfer.dims[at].size - last) * self.step[at]
        axis, step = self.axis, self.step
        if last - first == 1:
            axis, step = (*axis[:at], *axis[at + 1 :]), (*step[:at], *step[at + 1 :])
        return Aligned(transfer, tuple(begin), tuple(end), axis, step)

    def relative_to(self, origin: Sequence[int]) -> Aligned:
        """The same, with coordinates that count from `origin`."""
        begin = tuple(at - low for at, low in zip(self.begin, origin, strict=True))
        end = tuple(at - low for at, low in zip(self.end, origin, strict=True))
        return replace(self, begin=begin, end=end)

    def moved_to(self, offset: int, strides: Sequence[int]) -> Transfer:
        """The copy with another source: one whose axes have `strides`, and where `begin` is at `offset`."""
        dims = tuple(
            Dim(dim.size, 0 if axis < 0 else step * strides[axis], dim.target)
            for dim, axis, step in zip(self.transfer.dims, self.axis, self.step, strict=True)
        )
        return Transfer(offset, self.transfer.target, dims)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def aligned(transfer: Transfer, axes: Axes) -> list[Aligned]:
    """Cut a copy out of the tensor of `axes` into aligned ones, in a fixed order.

    Nothing is widened: together they copy exactly what it copies.

    Raises:
        Fragmented: more than `MAX_PIECES` would be needed.
    """
    todo, done = [transfer], list[Aligned]()
    while todo:
        if len(todo) + len(done) > MAX_PIECES:
            raise Fragmented(f"a view falls into more than {MAX_PIECES} boxes")
        found = _step(todo.pop(), axes)
        if isinstance(found, Aligned):
            done.append(found)
        else:
            todo.extend(reversed(found))
    return done


def _step(transfer: Transfer, axes: Axes) -> Aligned | list[Transfer]:
    """The copy as an aligned one, or as parts that are closer to being aligned."""
    begin, left = [0] * len(axes.extent), transfer.source
    for j, stride in enumerate(axes.stride):
        begin[j], left = divmod(left, stride)
    reach = [0] * len(axes.extent)
    axis, step = [-1] * len(transfer.dims), [0] * len(transfer.dims)
    for i in sorted(range(len(transfer.dims)), key=lambda i: transfer.dims[i].source):
        dim = transfer.dims[i]
        if not dim.source:
            continue
        j = next(j for j in range(len(axes.stride) - 1, -1, -1) if _moves(dim.source, axes, j))
        steps, rest = divmod(dim.source, axes.stride[j])
        if rest:  # a diagonal, or a view of a foreign stride: each of its steps is a copy of its own
            if dim.size > MAX_PIECES:
                raise Fragmented(f"a view falls into more than {MAX_PIECES} boxes")
            return [transfer.cut(i, k, k + 1) for k in range(dim.size)]
        room = axes.extent[j] - 1 - begin[j] - reach[j]
        if steps * (dim.size - 1) > room:
            if j == 0 or axes.stride[j - 1] != axes.stride[j] * axes.extent[j]:
                raise Fragmented("a view leaves the tensor that it is of")
            return _carried(transfer, i, steps, room, begin[j] + reach[j], axes.extent[j])
        reach[j] += steps * (dim.size - 1)
        axis[i], step[i] = axes.number[j], steps
    first, last = [0] * axes.rank, [1] * axes.rank
    for j, number in enumerate(axes.number):
        first[number] = begin[j]
        last[number] = begin[j] + reach[j] + 1
    return Aligned(transfer, tuple(first), tuple(last), tuple(axis), tuple(step))


def _moves(stride: int, axes: Axes, j: int) -> bool:
    """Whether a stride moves along axis `j`, and not along one further out."""
    return j == 0 or stride < axes.stride[j - 1]


def _carried(transfer: Transfer, i: int, steps: int, room: int, at: int, extent: int) -> list[Transfer]:
    """Dimension `i` runs over the end of its axis into the next: two dimensions, or two parts."""
    size = transfer.dims[i].size
    fits = room // steps + 1
    if at < steps and extent % steps == 0:
        rows = size // fits * fits
        if rows == size:
            return [transfer.split(i, fits)]
        fits = rows
    return [transfer.cut(i, 0, fits), transfer.cut(i, fits, size)]
