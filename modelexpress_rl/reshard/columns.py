"""Columns of integers as bytes, and back: packed as narrow as their values, read with every size checked."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard.geometry import Bool, Int, UInt

_HEAD = struct.Struct("<Bq")
_WIDTHS = (0, 1, 2, 4, 8)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def distinct_rows(rows: Int) -> tuple[Int, Int]:
    """(first, number): row `first[number[i]]` equals row i; the numbers are in no order.

    A row is known by a hash first, which is what makes it fast; rows that collide are told apart.
    """
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys = np.zeros(len(rows), np.uint64)
    for column in rows.T:
        keys = (keys + column.astype(np.uint64)) * _FACTOR
    order = np.argsort(keys)
    ordered = keys[order]
    fresh = np.ones(len(rows), np.bool_)
    fresh[1:] = ordered[1:] != ordered[:-1]
    first = order[fresh]
    number = np.empty(len(rows), np.int64)
    number[order] = np.cumsum(fresh) - 1
    if (rows[first][number] != rows).any():
        _, first, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first.astype(np.int64), number.reshape(-1)


def packed(values: Int) -> bytes:
    """One column: the number of bytes of a value, the smallest value, and what each is above it.

    Bytes of equal weight lie together, which compresses better; a column of one value takes none.
    """
    if not len(values):
        return _HEAD.pack(0, 0)
    base = int(values.min())
    above = values.view(np.uint64) - np.uint64(base & 0xFFFFFFFFFFFFFFFF)
    most = int(above.max())
    width = next(width for width in _WIDTHS if most < 1 << 8 * width)
    planes = above.astype("<u8").view(np.uint8).reshape(len(values), 8)[:, :width]
    return _HEAD.pack(width, base) + planes.T.tobytes()


def packed_bits(flags: Bool) -> bytes:
    """One bit for each flag, the lowest of a byte first."""
    return np.packbits(flags, bitorder="little").tobytes()


class Reader:
    """Takes bytes and columns off a body, in order; what would reach past its end is a ManifestError."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._at = 0

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        end = self._at + count
        if count < 0 or end > len(self._body):
            raise ManifestError(
                f"manifest: {what} takes {count} bytes, {len(self._body) - self._at} are left"
            )
        found = self._body[self._at : end]
        self._at = end
        return found

    def column(self, count: int, what: str) -> Int:
        """The next column, of `count` values; the caller bounds `count`."""
        width, base = _HEAD.unpack(self.take(_HEAD.size, what))
        if width not in _WIDTHS:
            raise ManifestError(f"manifest: {what}: a value can't have {width} bytes")
        data = np.frombuffer(self.take(count * width, what), np.uint8).reshape(width, count)
        above: UInt | NDArray[np.uint64]
        if width == 0:
            above = np.zeros(count, np.uint64)
        elif width == 1:
            above = data[0].astype(np.uint64)
        else:
            above = np.ascontiguousarray(data.T).view(f"<u{width}").reshape(count).astype(np.uint64)
        # What wraps around is some other integer, and is checked as any other is.
        above += np.uint64(base & 0xFFFFFFFFFFFFFFFF)
        return above.view(np.int64)

    def bits(self, count: int, what: str) -> Bool:
        """The next `count` flags."""
        data = np.frombuffer(self.take((count + 7) // 8, what), np.uint8)
        return np.unpackbits(data, count=count, bitorder="little").astype(np.bool_)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._body):
            raise ManifestError(f"manifest: {len(self._body) - self._at} bytes too many at its end")
