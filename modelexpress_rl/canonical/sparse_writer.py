"""Writes files of sparse deltas: chunks are encoded by several threads, and spooled in order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from modelexpress_rl.canonical import directory
from modelexpress_rl.canonical.chunk import Chunk, Kind, encode
from modelexpress_rl.canonical.grid import CHUNK_BYTES, Grid
from modelexpress_rl.canonical.index import Prefix
from modelexpress_rl.canonical.memory import Bytes, Words, as_words, in_order, same_size
from modelexpress_rl.canonical.shard_writer import ShardWriter
from modelexpress_rl.canonical.tensor_file import word_bytes
from modelexpress_rl.errors import UsageError


@dataclass(frozen=True, slots=True)
class TypedChange:
    """A tensor's memory before and after a step.

    `column_blocks` is into how many blocks of columns its readers cut it; 1 where they take whole rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    base: Bytes
    new: Bytes
    column_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """What a bucket came to."""

    words: int
    changed: int


class SparseWriter:
    """One file of a sparse delta. `close` it, or use it as a context manager; not for several threads."""

    def __init__(
        self, *, threads: int | None = None, spool_dir: Path | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._threads = threads or os.cpu_count() or 1
        self._shard = ShardWriter(spool_dir)
        self._entries: list[directory.Entry] = []
        self._chunk_bytes = chunk_bytes

    @property
    def names(self) -> list[str]:
        """The tensors so far."""
        return self._shard.names

    def add(self, changes: Sequence[TypedChange]) -> Counts:
        """Encode a bucket of tensors; those that did not change are left out.

        Beside the tensors themselves some MiB for each thread are in memory.

        Raises:
            UsageError: sizes, shape and dtype don't agree, or a name comes twice or is reserved.
            OSError: the disk of the spool is full; the writer is of no use any more.
        """
        work = [(change, grid, number) for change, grid in self._cut(changes) for number in range(grid.count)]
        words = sum(grid.rows * grid.columns for _, grid in self._cut(changes))
        changed = 0
        with ThreadPoolExecutor(self._threads, "mx-sparse") as pool:
            encoded = in_order(pool, _encode, work, 4 * self._threads)
            for change, grid in self._cut(changes):
                changed += self.put(
                    change.name, change.dtype, change.shape, grid, (next(encoded) for _ in range(grid.count))
                )
        return Counts(words, changed)

    def put(self, name: str, dtype: str, shape: tuple[int, ...], grid: Grid, chunks: Iterator[Chunk]) -> int:
        """Add a tensor whose chunks are encoded already; returns how many words changed."""
        if name == directory.NAME:
            raise UsageError(f"tensor {name!r}: the name is reserved")
        records = np.zeros(grid.count, directory.RECORD)
        begin = 0

        def payloads() -> Iterator[bytes]:
            nonlocal begin
            for number, chunk in enumerate(chunks):
                records[number] = directory.record(chunk, begin, xxhash.xxh3_64_intdigest(chunk.payload))
                begin += len(chunk.payload)
                yield chunk.payload

        self._shard.add(name, payloads(), keep=lambda: bool(np.any(records["kind"] != Kind.UNCHANGED)))
        if name in self._shard.names:
            self._entries.append(directory.Entry(name, dtype, shape, grid, records))
        return int(records["changed"].sum(dtype=np.int64))

    def parts(self) -> Iterator[bytes]:
        """The file's bytes, some MiB at a time."""
        return self._shard.parts({directory.NAME: self._directory()})

    def prefix(self) -> Prefix:
        """The length and digest of the file's beginning, for the index."""
        parts = self.parts()
        begin = next(parts) + next(parts)
        return Prefix(len(begin), hashlib.sha256(begin).hexdigest())

    def close(self) -> None:
        """Give the spool back."""
        self._shard.close()

    def __enter__(self) -> SparseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _directory(self) -> bytes:
        return directory.encode(self._entries)

    def _cut(self, changes: Sequence[TypedChange]) -> Iterator[tuple[TypedChange, Grid]]:
        for change in changes:
            same_size(change.base, change.new, change.name, "the new one")
            size = word_bytes(change.dtype, f"tensor {change.name!r}")
            grid = Grid.of(change.shape, max(1, self._chunk_bytes // size), change.column_blocks)
            if grid.rows * grid.columns * size != change.base.nbytes:
                raise UsageError(
                    f"tensor {change.name!r}: {change.dtype} of shape {change.shape} has "
                    f"{grid.rows * grid.columns * size} bytes, its memory {change.base.nbytes}"
                )
            yield change, grid


def _encode(item: tuple[TypedChange, Grid, int]) -> Chunk:
    change, grid, number = item
    size = word_bytes(change.dtype, change.name)
    return encode(*(chunk_words(data, size, grid, number) for data in (change.base, change.new)))


def chunk_words(data: Bytes, word: int, grid: Grid, number: int) -> Words:
    """A chunk's words, contiguous; copied only where they aren't."""
    box = grid.box(number)
    if box.column == 0 and box.column_end == grid.columns:
        row = grid.columns * word
        return as_words(data[box.row * row : box.row_end * row], word)
    matrix = data.view(f"<u{word}").reshape(grid.rows, grid.columns)
    part = matrix[box.row : box.row_end, box.column : box.column_end]
    words: Words = np.require(part, requirements=("C", "A")).reshape(-1)
    return words
