"""The directory of a file of sparse deltas: each tensor's grid, and each chunk's place and digests.

It is the first tensor of the file, so that one ranged read brings the header and it. Its bytes: a magic
word, the length of a JSON list of tensors, that list, padding to 8, then one record for each chunk.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from modelexpress_rl.canonical.chunk import Chunk, Kind
from modelexpress_rl.canonical.grid import Grid, as_matrix
from modelexpress_rl.canonical.tensor_file import parse_object, word_bytes
from modelexpress_rl.errors import ObjectError

NAME = "__mx_directory__"
_MAGIC = b"MXSPARS1"
RECORD = np.dtype(
    [
        ("begin", "<u8"),  # in the tensor's bytes
        ("size", "<u4"),
        ("changed", "<u4"),
        ("payload_digest", "<u8"),  # xxh3-64
        ("kind", "u1"),
        ("gap_bytes", "u1"),
        ("reserved", "V6"),
        ("base_digest", "V16"),  # xxh3-128 of all the chunk's words before,
        ("result_digest", "V16"),  # and after
    ]
)
Records = npt.NDArray[np.void]
_KEYS = {"name", "dtype", "shape", "rows_per_chunk", "columns_per_chunk"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: what it is, and its chunks in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    grid: Grid
    records: Records

    @property
    def payload_bytes(self) -> int:
        """How many bytes all its chunks have."""
        return int(self.records["size"].sum(dtype=np.uint64))


def record(chunk: Chunk, begin: int, payload_digest: int) -> tuple[Any, ...]:
    """A chunk's record."""
    return (
        begin,
        len(chunk.payload),
        chunk.changed,
        payload_digest,
        chunk.kind,
        chunk.gap_bytes,
        b"",
        chunk.base_digest,
        chunk.result_digest,
    )


def encode(entries: Sequence[Entry]) -> bytes:
    """The directory's bytes."""
    listed = [
        {
            "name": entry.name,
            "dtype": entry.dtype,
            "shape": entry.shape,
            "rows_per_chunk": entry.grid.rows_per_chunk,
            "columns_per_chunk": entry.grid.columns_per_chunk,
        }
        for entry in entries
    ]
    text = json.dumps({"tensors": listed}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    records = b"".join(entry.records.tobytes() for entry in entries)
    return _MAGIC + struct.pack("<Q", len(text)) + text + records


def decode(data: bytes, where: str) -> list[Entry]:
    """A directory, each claim of it checked against the others.

    Raises:
        ObjectError: it is malformed; begins with `where`, and names the tensor.
    """
    if len(data) < 16 or data[:8] != _MAGIC:
        raise ObjectError(f"{where}: expected a directory that begins with {_MAGIC!r}, got {data[:8]!r}")
    (length,) = struct.unpack("<Q", data[8:16])
    if length > len(data) - 16:
        raise ObjectError(f"{where}: a directory of {len(data)} bytes states a list of {length}")
    listed = parse_object(data[16 : 16 + length], f"{where}: the directory").get("tensors")
    if not isinstance(listed, list):
        raise ObjectError(f"{where}: a directory has a list of tensors, not {listed!r:.100}")
    if (len(data) - 16 - length) % RECORD.itemsize:
        raise ObjectError(f"{where}: {len(data) - 16 - length} bytes are no number of records")
    records = np.frombuffer(data, RECORD, offset=16 + length)
    entries: list[Entry] = []
    at = 0
    for item in listed:
        name, dtype, shape, grid = _described(item, where)
        if grid.count > len(records) - at:
            raise ObjectError(
                f"{where}: tensor {name!r}: expected {grid.count} chunks, {len(records) - at} are left"
            )
        entries.append(Entry(name, dtype, shape, grid, records[at : at + grid.count]))
        at += grid.count
        _check_records(entries[-1], f"{where}: tensor {name!r}")
    if at != len(records):
        raise ObjectError(f"{where}: expected {at} chunks, got {len(records)}")
    return entries


def _described(item: Any, where: str) -> tuple[str, str, tuple[int, ...], Grid]:
    if not isinstance(item, dict) or set(item) != _KEYS or not isinstance(item["name"], str):
        raise ObjectError(f"{where}: a tensor has {', '.join(sorted(_KEYS))}, not {item!r:.200}")
    where = f"{where}: tensor {item['name']!r}"
    shape = item["shape"]
    if not isinstance(item["dtype"], str):
        raise ObjectError(f"{where}: dtype must be a string, not {item['dtype']!r:.100}")
    size = word_bytes(item["dtype"], where)
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise ObjectError(f"{where}: shape must be a list of counts, not {shape!r:.100}")
    if math.prod(shape) * size >= 1 << 62:
        raise ObjectError(f"{where}: shape {shape!r:.100} is of no memory")
    for key in ("rows_per_chunk", "columns_per_chunk"):
        if type(item[key]) is not int or item[key] < 1:
            raise ObjectError(f"{where}: {key} must be a positive count, not {item[key]!r:.100}")
    rows, columns = as_matrix(tuple(shape))
    grid = Grid(rows, columns, item["rows_per_chunk"], item["columns_per_chunk"])
    return item["name"], item["dtype"], tuple(shape), grid


def _check_records(entry: Entry, where: str) -> None:
    """That the chunks' payloads fill the tensor one after the other, and are of known kinds."""
    records = entry.records
    ends = np.cumsum(records["size"], dtype=np.uint64)
    if len(records) and (records["begin"][0] != 0 or np.any(records["begin"][1:] != ends[:-1])):
        raise ObjectError(f"{where}: its chunks don't follow each other")
    if len(records) and records["kind"].max() > max(Kind):
        raise ObjectError(f"{where}: a chunk of kind {records['kind'].max()}; known are {list(Kind)}")
