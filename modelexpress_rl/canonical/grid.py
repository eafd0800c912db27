"""How a tensor is cut into chunks, and which of them a slice of it needs.

A tensor is looked at as a matrix: its last axis are the columns, all others together the rows (a vector is
one column). Chunks are boxes of it, and their elements are in row-major order. With one block of columns a
chunk is contiguous. With several, the chunks of one block follow each other: whoever holds a slice of the
columns needs only its blocks, which lie side by side in the object.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Box:
    """Rows [row, row_end) and columns [column, column_end)."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def elements(self) -> int:
        """How many there are in it."""
        return (self.row_end - self.row) * (self.column_end - self.column)


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix in chunks of `rows_per_chunk` times `columns_per_chunk`; those at the ends may be smaller."""

    rows: int
    columns: int
    rows_per_chunk: int
    columns_per_chunk: int

    @classmethod
    def of(cls, shape: tuple[int, ...], elements: int, column_blocks: int = 1) -> Grid:
        """Chunks of about that many elements, at most; whole columns' blocks, at least so many."""
        rows, columns = as_matrix(shape)
        blocks = max(min(column_blocks, columns), -(-columns // elements), 1)
        columns_per_chunk = max(1, -(-columns // blocks))
        return cls(rows, columns, max(1, elements // columns_per_chunk), columns_per_chunk)

    @property
    def down(self) -> int:
        """Chunks one below the other."""
        return -(-self.rows // self.rows_per_chunk)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.down * -(-self.columns // self.columns_per_chunk)

    def box(self, number: int) -> Box:
        """What a chunk covers."""
        column, row = divmod(number, self.down)
        row, column = row * self.rows_per_chunk, column * self.columns_per_chunk
        return Box(
            row,
            min(row + self.rows_per_chunk, self.rows),
            column,
            min(column + self.columns_per_chunk, self.columns),
        )

    def of_box(self, box: Box) -> Iterator[int]:
        """The chunks that share an element with a box, in order."""
        if not box.elements:
            return
        for block in range(
            box.column // self.columns_per_chunk, -(-box.column_end // self.columns_per_chunk)
        ):
            first = block * self.down
            yield from range(
                first + box.row // self.rows_per_chunk, first + -(-box.row_end // self.rows_per_chunk)
            )


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor as the engine sees it: where it begins on each axis, and how long it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a tensor."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


def boxes_of(shape: tuple[int, ...], part: Slice) -> list[Box]:
    """A slice as boxes of the matrix, in the order in which its rows follow each other in the slice.

    Rows that lie side by side in the tensor are one box.
    """
    if not shape:
        return [Box(0, 1, 0, 1)]
    if not math.prod(part.shape):
        return []
    if len(shape) == 1:
        return [Box(part.offset[0], part.offset[0] + part.shape[0], 0, 1)]
    column, column_end = part.offset[-1], part.offset[-1] + part.shape[-1]
    # From the last axis of the rows outwards: the runs of rows so far, repeated for each place further out.
    runs = [(0, 1)]
    stride = 1
    for extent, begin, length in zip(
        reversed(shape[:-1]), reversed(part.offset[:-1]), reversed(part.shape[:-1]), strict=True
    ):
        places = range(begin * stride, (begin + length) * stride, stride)
        if runs == [(0, stride)]:
            runs = [(places.start, places.stop)]
        else:
            runs = [(place + first, place + last) for place in places for first, last in runs]
        stride *= extent
    return [Box(first, last, column, column_end) for first, last in runs]
