"""Immutable objects that are read by ranges: the port of every decoder, and two plain ones."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from modelexpress_rl.errors import ObjectError


@runtime_checkable
class ObjectReader(Protocol):
    """One immutable object. Implementations are used from several threads at once."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def size_bytes(self) -> int:
        """How long it is."""
        ...

    def read(self, begin: int, end: int) -> bytes:
        """The bytes [begin, end), or fewer where the object ends or the transfer was cut short."""
        ...


def read_range(source: ObjectReader, begin: int, end: int, what: str) -> bytes:
    """Exactly the bytes [begin, end) of an object.

    Raises:
        ObjectError: the object is shorter, or its reader gave another number of bytes; names `what`.
    """
    if not 0 <= begin <= end <= source.size_bytes:
        raise ObjectError(
            f"{source.name}: {what} lies at bytes {begin} to {end}, but the object has {source.size_bytes}"
        )
    data = source.read(begin, end) if end > begin else b""
    if len(data) != end - begin:
        raise ObjectError(
            f"{source.name}: {what}: expected {end - begin} bytes from {begin}, got {len(data)}"
        )
    return data


class BytesObject:
    """An object that is in memory."""

    def __init__(self, name: str, data: bytes | memoryview) -> None:
        self.name = name
        self._data = memoryview(data)
        self.size_bytes = self._data.nbytes

    def read(self, begin: int, end: int) -> bytes:
        return bytes(self._data[begin:end])


class FileObject:
    """A file, opened once; `close` it, or use it as a context manager.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = str(path) if name is None else name
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._file).st_size

    def read(self, begin: int, end: int) -> bytes:
        return os.pread(self._file, end - begin, begin)

    def close(self) -> None:
        """Close the file; later calls do nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> FileObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RangeFile:
    """The bytes [begin, end) of an object as a file that is read forwards, some at a time."""

    def __init__(self, source: ObjectReader, begin: int, end: int, what: str) -> None:
        self._source = source
        self._at = begin
        self._end = end
        self._what = what

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes; nothing at the end.

        Raises:
            ObjectError: the object ended early.
        """
        stop = self._end if size < 0 else min(self._end, self._at + size)
        data = read_range(self._source, self._at, stop, self._what)
        self._at = stop
        return data
