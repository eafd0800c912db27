"""Puts sparse deltas onto a base, or joins them to one; all of a chain in one pass.

Each chunk of the base is hashed and changed once, however many deltas follow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from modelexpress_rl.canonical.chunk import Chunk, Kind, digest, encode_change, encode_plain, put_onto
from modelexpress_rl.canonical.grid import Box, Slice, boxes_of
from modelexpress_rl.canonical.memory import Bytes, Words, in_order, same_size
from modelexpress_rl.canonical.sparse import SparseTensor, fetched, needed, whole_box
from modelexpress_rl.canonical.sparse_writer import SparseWriter
from modelexpress_rl.errors import DigestMismatch, ObjectError, UsageError


@dataclass(frozen=True, slots=True)
class Checked:
    """How many bytes of a result were compared with the digests of its publisher.

    A chunk of which a slice holds a part can't be: there its payload's digest is all the proof.
    """

    verified_bytes: int
    unverified_bytes: int


def advance(
    deltas: Sequence[SparseTensor],
    base: Bytes,
    out: Bytes,
    *,
    part: Slice | None = None,
    threads: int | None = None,
) -> Checked:
    """Put deltas that follow each other onto a tensor, or a slice of it; `out` may be the base itself.

    What the base holds, that each delta follows the one before, and the result are checked by chunk. Where
    it raises, `out` holds nothing of use. Beside base and `out` some tens of MiB are in memory.

    Raises:
        DigestMismatch: the base is another, or a payload was damaged.
        ObjectError: a payload is malformed, or the deltas are not of one tensor, or of different grids.
        UsageError: the memory does not fit the slice.
    """
    first = deltas[0]
    size = first.word_bytes
    where = first.where
    same_size(base, out, first.entry.name, "what it is written to")
    boxes = boxes_of(first.entry.shape, part) if part else [whole_box(first)]
    if sum(box.elements for box in boxes) * size != base.nbytes:
        elements = sum(box.elements for box in boxes)
        raise UsageError(f"{where}: the slice has {elements * size} bytes, the memory {base.nbytes}")
    _check_chain(deltas)
    if base is not out:
        out[:] = base
    held = _Held(_as_matrix(out, size, boxes), boxes)
    count = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(count, "mx-sparse") as pool:
        work = fetched(deltas, needed(first, part))
        done = in_order(pool, lambda item: _advance(deltas, held, *item), work, 4 * count)
        verified = sum(done)
    return Checked(verified * size, base.nbytes - verified * size)


def squash(deltas: Sequence[SparseTensor], writer: SparseWriter, *, threads: int | None = None) -> None:
    """Write one delta that does what those do that follow each other; needs no base.

    Raises:
        DigestMismatch, ObjectError: as `advance` does.
    """
    _check_chain(deltas)
    entry = deltas[0].entry
    count = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(count, "mx-squash") as pool:
        work = fetched(deltas, range(entry.grid.count))
        joined = in_order(pool, lambda item: _squashed(deltas, *item), work, 4 * count)
        writer.put(entry.name, entry.dtype, entry.shape, entry.grid, joined)


def _squashed(deltas: Sequence[SparseTensor], number: int, payloads: Sequence[bytes]) -> Chunk:
    words = np.zeros(deltas[0].entry.grid.box(number).elements, f"<u{deltas[0].word_bytes}")
    plain = _join(deltas, number, payloads, words)
    base = deltas[0].entry.records["base_digest"][number].tobytes()
    result = deltas[-1].entry.records["result_digest"][number].tobytes()
    return encode_plain(words, base, result) if plain else encode_change(words, base, result)


@dataclass(frozen=True, slots=True)
class _Held:
    """A slice in memory: its rows one after the other, and which boxes of the tensor they are."""

    matrix: Words
    boxes: list[Box]

    def parts(self, chunk: Box) -> Iterator[tuple[Words, Box]]:
        """What of a chunk is held: where in memory, and where in the tensor."""
        above = 0
        for box in self.boxes:
            row, row_end = max(box.row, chunk.row), min(box.row_end, chunk.row_end)
            column, end = max(box.column, chunk.column), min(box.column_end, chunk.column_end)
            if row < row_end and column < end:
                yield (
                    self.matrix[
                        above + row - box.row : above + row_end - box.row,
                        column - box.column : end - box.column,
                    ],
                    Box(row, row_end, column, end),
                )
            above += box.row_end - box.row


def _as_matrix(data: Bytes, size: int, boxes: Sequence[Box]) -> Words:
    """A slice's memory as the rows of its boxes."""
    words = data.view(f"<u{size}")
    columns = boxes[0].column_end - boxes[0].column if boxes else 1
    return words.reshape(-1, columns) if words.size else words.reshape(0, max(columns, 1))


def _advance(deltas: Sequence[SparseTensor], held: _Held, number: int, payloads: Sequence[bytes]) -> int:
    """Advance one chunk; returns how many words were compared with digests."""
    chunk = deltas[0].entry.grid.box(number)
    where = f"{deltas[0].where}: chunk {number}"
    parts = list(held.parts(chunk))
    if len(parts) == 1 and parts[0][1] == chunk:
        memory = parts[0][0]
        words = np.require(memory, requirements=("C", "A")).reshape(-1)  # copied only where it must be
        _expect(words, deltas[0].entry.records["base_digest"][number], f"{where}: the base")
        result = deltas[-1].entry.records["result_digest"][number]
        _join(deltas, number, payloads, words)
        if any(payloads) or result != deltas[0].entry.records["base_digest"][number]:
            _expect(words, result, f"{where}: the result")
        if not np.may_share_memory(words, memory):
            memory[:] = words.reshape(memory.shape)
        return chunk.elements
    change = np.zeros(chunk.elements, held.matrix.dtype)
    plain = _join(deltas, number, payloads, change)
    image = change.reshape(chunk.row_end - chunk.row, -1)
    for memory, box in parts:
        piece = image[
            box.row - chunk.row : box.row_end - chunk.row,
            box.column - chunk.column : box.column_end - chunk.column,
        ]
        if plain:
            memory[:] = piece
        else:
            memory ^= piece
    return 0


def _join(deltas: Sequence[SparseTensor], number: int, payloads: Sequence[bytes], words: Words) -> bool:
    plain = False
    for delta, payload in zip(deltas, payloads, strict=True):
        plain |= put_onto(_chunk(delta, number, payload), words, f"{delta.where}: chunk {number}")
    return plain


def _chunk(delta: SparseTensor, number: int, payload: bytes) -> Chunk:
    record = delta.entry.records[number]
    got = xxhash.xxh3_64_intdigest(payload)
    if got != record["payload_digest"]:
        raise DigestMismatch(
            f"{delta.where}: chunk {number}: expected xxh3-64 {record['payload_digest']:016x} of its "
            f"{len(payload)} bytes, got {got:016x}"
        )
    return Chunk(
        Kind(int(record["kind"])), int(record["changed"]), int(record["gap_bytes"]), payload, b"", b""
    )


def _expect(words: Words, expected: np.void, what: str) -> None:
    if (got := digest(words)) != expected.tobytes():
        raise DigestMismatch(f"{what}: expected xxh3-128 {expected.tobytes().hex()}, got {got.hex()}")


def _check_chain(deltas: Sequence[SparseTensor]) -> None:
    """That they are of one tensor, cut in one way, and that each begins where the one before ended."""
    for before, after in pairwise(deltas):
        ours, theirs = (
            (each.entry.name, each.entry.dtype, each.entry.shape, each.entry.grid) for each in (before, after)
        )
        if ours != theirs:
            raise ObjectError(f"{after.where}: expected {ours} as in {before.source.name}, got {theirs}")
        differ = np.flatnonzero(before.entry.records["result_digest"] != after.entry.records["base_digest"])
        if differ.size:
            raise DigestMismatch(f"{after.where}: chunk {differ[0]} does not follow {before.source.name}")
