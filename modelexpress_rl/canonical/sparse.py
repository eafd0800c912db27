"""Reads files of sparse deltas: opened by one ranged read each, then fetched by chunk.

A reader of a slice fetches the chunks that the slice touches, and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from modelexpress_rl.canonical import directory
from modelexpress_rl.canonical.grid import Box, Slice, boxes_of
from modelexpress_rl.canonical.index import Encoding, Index, Prefix
from modelexpress_rl.canonical.objects import BytesObject, ObjectReader, read_range
from modelexpress_rl.canonical.plain_files import Open
from modelexpress_rl.canonical.tensor_file import TensorFile, read_header, word_bytes
from modelexpress_rl.errors import DigestMismatch, ObjectError

MAX_PREFIX_BYTES = 256 << 20
GAP_BYTES = 64 << 10  # bytes that are read although nobody needs them cost less than another request
_GROUP_BYTES = 16 << 20  # of payload in memory at once, or one chunk's


@dataclass(frozen=True, slots=True)
class SparseTensor:
    """The delta of one tensor: its directory entry, and where its chunks lie."""

    entry: directory.Entry
    source: ObjectReader
    begin: int

    @property
    def word_bytes(self) -> int:
        """The size of an element."""
        return word_bytes(self.entry.dtype, self.where)

    @property
    def where(self) -> str:
        """What errors call it."""
        return f"{self.source.name}: tensor {self.entry.name!r}"

    @property
    def size_bytes(self) -> int:
        """How long the tensor itself is."""
        return self.entry.grid.rows * self.entry.grid.columns * self.word_bytes


def read_sparse(index: Index, open_file: Open) -> dict[str, SparseTensor]:
    """Where the deltas of a version lie; one ranged read for each file.

    Raises:
        ObjectError: the version is no sparse delta, or a file is not the one that the index names.
    """
    if index.encoding is not Encoding.SPARSE:
        raise ObjectError(f"version {index.version!r}: expected encoding sparse, got {index.encoding}")
    found: dict[str, SparseTensor] = {}
    for name in index.files:
        source = open_file(name)
        file, entries = _opened(source, index.prefixes[name])
        for entry in entries:
            stored = file.tensors.get(entry.name)
            if stored is None or stored.size_bytes != entry.payload_bytes or stored.dtype != "U8":
                raise ObjectError(
                    f"{source.name}: tensor {entry.name!r}: "
                    f"expected {entry.payload_bytes} bytes of U8, got {stored}"
                )
            if index.weight_map.get(entry.name) != name or entry.name in found:
                raise ObjectError(f"{source.name}: tensor {entry.name!r} is by the index not in this file")
            found[entry.name] = SparseTensor(entry, source, stored.begin)
        if len(entries) + 1 != len(file.tensors):
            raise ObjectError(f"{source.name}: expected {len(entries) + 1} tensors, got {len(file.tensors)}")
    if missing := index.weight_map.keys() - found.keys():
        name = min(missing)
        raise ObjectError(
            f"{index.weight_map[name]}: tensor {name!r} is by the index in this file, which lacks it"
        )
    return found


def _opened(source: ObjectReader, prefix: Prefix) -> tuple[TensorFile, list[directory.Entry]]:
    if prefix.size_bytes > MAX_PREFIX_BYTES:
        raise ObjectError(
            f"{source.name}: a prefix of {prefix.size_bytes} bytes, more than {MAX_PREFIX_BYTES}"
        )
    data = read_range(source, 0, prefix.size_bytes, "the header and the directory")
    if (got := hashlib.sha256(data).hexdigest()) != prefix.sha256:
        raise DigestMismatch(
            f"{source.name}: expected sha256 {prefix.sha256} of {prefix.size_bytes} bytes, got {got}"
        )
    file = read_header(_Beginning(source.name, data, source.size_bytes))
    stored = file.tensors.get(directory.NAME)
    if stored is None or (stored.begin, stored.end) != (file.data_begin, prefix.size_bytes):
        raise ObjectError(f"{source.name}: expected a directory of {prefix.size_bytes} bytes, got {stored}")
    return file, directory.decode(data[stored.begin : stored.end], source.name)


class _Beginning(BytesObject):
    """An object of which only the beginning is here."""

    def __init__(self, name: str, data: bytes, size_bytes: int) -> None:
        super().__init__(name, data)
        self.size_bytes = size_bytes


def byte_ranges(
    tensor: SparseTensor, part: Slice | None = None, gap_bytes: int = GAP_BYTES
) -> list[tuple[int, int]]:
    """Which ranges of its object a slice of a tensor needs (or the whole one), nearby ones joined."""
    return _runs(tensor, needed(tensor, part), gap_bytes)


def whole_box(tensor: SparseTensor) -> Box:
    """All of a tensor."""
    return Box(0, tensor.entry.grid.rows, 0, tensor.entry.grid.columns)


def needed(tensor: SparseTensor, part: Slice | None) -> list[int]:
    """The chunks that a slice touches, in order."""
    boxes = boxes_of(tensor.entry.shape, part) if part else [whole_box(tensor)]
    return sorted({number for box in boxes for number in tensor.entry.grid.of_box(box)})


def _runs(tensor: SparseTensor, numbers: Sequence[int], gap_bytes: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        record = tensor.entry.records[number]
        begin = tensor.begin + int(record["begin"])
        end = begin + int(record["size"])
        if runs and begin - runs[-1][1] <= gap_bytes:
            runs[-1] = (runs[-1][0], end)
        elif end > begin:
            runs.append((begin, end))
    return runs


def fetched(deltas: Sequence[SparseTensor], numbers: Sequence[int]) -> Iterator[tuple[int, list[bytes]]]:
    """Each chunk's payloads, of all deltas, some chunks' at a time; nearby ones are one read."""
    sizes = np.stack([delta.entry.records["size"] for delta in deltas]).sum(axis=0, dtype=np.int64).tolist()
    group: list[int] = []
    room = _GROUP_BYTES
    for number in numbers:
        if group and sizes[number] > room:
            yield from _read(deltas, group)
            group, room = [], _GROUP_BYTES
        group.append(number)
        room -= sizes[number]
    if group:
        yield from _read(deltas, group)


def _read(deltas: Sequence[SparseTensor], group: Sequence[int]) -> Iterator[tuple[int, list[bytes]]]:
    payloads = [_payloads(delta, group) for delta in deltas]
    yield from ((number, [each[place] for each in payloads]) for place, number in enumerate(group))


def _payloads(delta: SparseTensor, group: Sequence[int]) -> list[bytes]:
    runs = [
        (begin, memoryview(read_range(delta.source, begin, end, f"chunks of tensor {delta.entry.name!r}")))
        for begin, end in _runs(delta, group, GAP_BYTES)
    ]
    found = []
    run = 0
    for number in group:
        record = delta.entry.records[number]
        begin, size = delta.begin + int(record["begin"]), int(record["size"])
        while size and begin >= runs[run][0] + len(runs[run][1]):
            run += 1
        at = begin - runs[run][0] if size else 0
        found.append(bytes(runs[run][1][at : at + size]) if size else b"")
    return found
