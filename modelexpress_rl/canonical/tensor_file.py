"""The header of a safetensors file: made, and read with every claim of it checked against the file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelexpress_rl.canonical.objects import ObjectReader, read_range
from modelexpress_rl.errors import ObjectError, UsageError

MAX_HEADER_BYTES = 100_000_000  # what readers of the format accept
WORD_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file; `begin` and `end` count from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What a file says that it holds; `data_begin` is where the first tensor may begin."""

    name: str
    data_begin: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, Stored]


def word_bytes(dtype: str, where: str) -> int:
    """How many bytes an element has.

    Raises:
        ObjectError: no type of that name is known; begins with `where`.
    """
    size = WORD_BYTES.get(dtype)
    if size is None:
        raise ObjectError(f"{where}: dtype {dtype!r} is none of {', '.join(WORD_BYTES)}")
    return size


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """The length and the header of a file whose tensors (name, dtype, shape, bytes) follow in this order.

    The header is padded to a multiple of 8 bytes, so that what follows is aligned.

    Raises:
        UsageError: two tensors have one name, or one is named as the metadata is.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, size in tensors:
        if name in header:
            raise UsageError(f"tensor {name!r} can't be written: there is one of that name already")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(source: ObjectReader) -> TensorFile:
    """A file's header; the tensors that it lists fill the file exactly, without gap or overlap.

    Raises:
        ObjectError: it is malformed, or the file is longer or shorter than it says.
    """
    (length,) = struct.unpack("<Q", read_range(source, 0, 8, "the header's length"))
    if length > MAX_HEADER_BYTES:
        raise ObjectError(f"{source.name}: a header of {length} bytes, more than {MAX_HEADER_BYTES}")
    header = parse_object(read_range(source, 8, 8 + length, "the header"), f"{source.name}: the header")
    data_begin = 8 + length
    metadata = _metadata(header.pop("__metadata__", {}), source.name)
    tensors = {
        name: _stored(entry, data_begin, f"{source.name}: tensor {name!r}") for name, entry in header.items()
    }
    _check_filled(tensors, data_begin, source)
    return TensorFile(source.name, data_begin, metadata, tensors)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object none of whose keys is there twice.

    Raises:
        ObjectError: it is something else; begins with `where`.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ObjectError(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ObjectError(f"{where} must be a JSON object, not {type(value).__name__}")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ObjectError(f"{where}: __metadata__ must map strings to strings, not be {value!r:.200}")
    return value


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _stored(entry: Any, data_begin: int, where: str) -> Stored:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ObjectError(f"{where}: expected dtype, shape and data_offsets, got {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ObjectError(f"{where}: dtype must be a string, not {dtype!r:.200}")
    if not isinstance(shape, list) or not all(map(_count, shape)):
        raise ObjectError(f"{where}: shape must be a list of counts, not {shape!r:.200}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        raise ObjectError(f"{where}: data_offsets must be two counts, not {offsets!r:.200}")
    expected = math.prod(shape) * word_bytes(dtype, where)
    if offsets[1] - offsets[0] != expected:
        raise ObjectError(
            f"{where}: {dtype} of shape {shape!r:.200} has {expected} bytes, but its data has "
            f"{offsets[1] - offsets[0]}"
        )
    return Stored(dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _check_filled(tensors: Mapping[str, Stored], data_begin: int, source: ObjectReader) -> None:
    at = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            raise ObjectError(
                f"{source.name}: tensor {name!r} begins at {tensor.begin}, where the one before ends at {at}"
            )
        at = tensor.end
    if at != source.size_bytes:
        raise ObjectError(
            f"{source.name}: its tensors end at {at}, but the object has {source.size_bytes} bytes"
        )
