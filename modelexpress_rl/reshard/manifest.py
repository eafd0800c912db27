"""Version 1 manifests: the JSON document in which a trainer rank says what it holds and where.

Encoding is exact: the bytes are those that modelexpress 0.7.0 writes for the same facts, so their
sha256 agrees. Decoding trusts nothing: sizes are bounded before parsing, every type, range and count
is checked, and a document that fails costs at most a fixed multiple of its own size.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard.geometry import (
    ADDRESS_SPACE_BYTES,
    DIGEST_BYTES,
    DTYPE_SIZE_BYTES,
    MAX_EXTENT,
    MAX_RANK,
    Int,
    ShardTable,
    TensorTable,
    padded,
    shard_fault,
    tensor_fault,
)

SCHEMA = "mx.reshard.shard_table.v1"
MAX_MANIFEST_BYTES = 32 << 20
MAX_TEXT_CHARS = 1024
# Every list and object of a manifest comes with field names: the smallest shard has 3 brackets in 78
# characters. Denser documents are refused before parsing, so that "[[],[],...]" can't become many
# times its size in Python objects.
MIN_BYTES_PER_BRACKET = 12
_DIGEST = re.compile(r"[0-9a-f]{32}").fullmatch

Where = Callable[[int], str]


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """What one agent publishes: its transport metadata and its shards (all of source 0)."""

    agent_name: str
    metadata_endpoint: str
    agent_meta: bytes
    table: ShardTable


def digest(data: bytes) -> str:
    """The manifest digest that the control plane carries: sha256, in hex."""
    return hashlib.sha256(data).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Write a manifest in version 1, tensors in table order and shards in row order within them."""
    table = manifest.table
    width = table.tensors.width
    order = np.argsort(table.tensor, kind="stable")
    offsets, shapes = table.offset[order].tolist(), table.shape[order].tolist()
    addrs, devices = table.addr[order].tolist(), table.device_id[order].tolist()
    digests = [
        row.tobytes().hex() if has else None
        for row, has in zip(table.digest[order], table.has_digest[order].tolist(), strict=True)
    ]
    ends = np.searchsorted(table.tensor[order], np.arange(len(table.tensors)), side="right").tolist()
    tensors = []
    begin = 0
    for name, dtype, elsize, rank, full, end in zip(
        table.tensors.names,
        table.tensors.dtypes,
        table.tensors.elsize.tolist(),
        table.tensors.rank.tolist(),
        table.tensors.full_shape.tolist(),
        ends,
        strict=True,
    ):
        pad = width - rank
        shards: list[dict[str, Any]] = []
        for i in range(begin, end):
            shard: dict[str, Any] = {
                "agent_name": manifest.agent_name,
                "device_id": devices[i],
                "addr": addrs[i],
                "shard_offset": offsets[i][pad:],
                "shape": shapes[i][pad:],
            }
            if digests[i] is not None:
                shard["digest"] = digests[i]
            shards.append(shard)
        begin = end
        tensors.append(
            {"name": name, "dtype": dtype, "elsize": elsize, "full_shape": full[pad:], "shards": shards}
        )
    document = {
        "schema": SCHEMA,
        "agent_name": manifest.agent_name,
        "metadata_endpoint": manifest.metadata_endpoint,
        "agent_meta_b64": base64.b64encode(manifest.agent_meta).decode("ascii"),
        "tensors": tensors,
    }
    return json.dumps(document).encode("ascii")


def decode(data: bytes, *, max_bytes: int = MAX_MANIFEST_BYTES) -> Manifest:
    """Read a version 1 manifest.

    Raises:
        ManifestError: it is too big, not JSON, not of this schema, or a field has the wrong type or
            range; the message names the tensor and the field.
    """
    document = _parse(data, max_bytes)
    top: Where = lambda _: "manifest"  # noqa: E731
    schema, agent_name, endpoint, meta_b64, raw_tensors = (
        column[0]
        for column in _fields(
            [document], ("schema", "agent_name", "metadata_endpoint", "agent_meta_b64", "tensors"), top
        )
    )
    if schema != SCHEMA:
        raise ManifestError(f"manifest: schema must be {SCHEMA!r}, got {_short(schema)}")
    _texts([agent_name], top, "agent_name")
    _texts([endpoint], top, "metadata_endpoint", allow_empty=True)
    agent_meta = _base64(meta_b64)
    _lists([raw_tensors], top, "tensors")
    names, dtypes, elsizes, full_shapes, shard_lists = _fields(
        raw_tensors,
        ("name", "dtype", "elsize", "full_shape", "shards"),
        lambda i: f"tensor number {i}",
    )
    tensors = _tensor_table(names, dtypes, elsizes, full_shapes)
    table = _shard_table(tensors, shard_lists, agent_name)
    return Manifest(agent_name, endpoint, agent_meta, table)


def _parse(data: bytes, max_bytes: int) -> Any:
    if len(data) > max_bytes:
        raise ManifestError(f"manifest: at most {max_bytes} bytes are accepted, got {len(data)}")
    brackets = data.count(b"{") + data.count(b"[")
    if brackets > len(data) // MIN_BYTES_PER_BRACKET + 64:
        raise ManifestError(f"manifest: {brackets} lists and objects in {len(data)} bytes is too many")
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ManifestError("manifest: nested too deeply") from error
    except ValueError as error:  # bad UTF-8, bad JSON, an integer of thousands of digits
        raise ManifestError(f"manifest: not JSON: {error}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ManifestError(f"manifest: {text} is not a number that a manifest may hold")


def _base64(value: object) -> bytes:
    if type(value) is not str:
        raise ManifestError(f"manifest: agent_meta_b64 must be a string, got {_short(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ManifestError(f"manifest: agent_meta_b64 is not base64: {error}") from error


def _tensor_table(
    names: list[Any], dtypes: list[Any], elsizes: list[Any], full_shapes: list[Any]
) -> TensorTable:
    _texts(names, lambda i: f"tensor number {i}", "name")
    index = dict(zip(names, range(len(names)), strict=True))
    if len(index) != len(names):
        repeated = next(name for i, name in enumerate(names) if index[name] != i)
        raise ManifestError(f"tensor {repeated!r}: appears twice")
    where: Where = lambda i: f"tensor {names[i]!r}"  # noqa: E731
    _texts(dtypes, where, "dtype")
    if not set(dtypes) <= DTYPE_SIZE_BYTES.keys():
        at = next(i for i, dtype in enumerate(dtypes) if dtype not in DTYPE_SIZE_BYTES)
        raise ManifestError(f"{where(at)}: dtype {_short(dtypes[at])} is not known")
    elsize = _integers(elsizes, where, "elsize", 1, 16)
    expected = np.array([DTYPE_SIZE_BYTES[dtype] for dtype in dtypes], np.int64)
    if (wrong := elsize != expected).any():
        at = int(np.argmax(wrong))
        raise ManifestError(f"{where(at)}: elsize of {dtypes[at]} is {expected[at]}, got {elsize[at]}")
    _lists(full_shapes, where, "full_shape", max_length=MAX_RANK)
    ranks = np.fromiter(map(len, full_shapes), np.int64, len(names))
    width = int(ranks.max(initial=1))
    table = TensorTable(
        names=tuple(names),
        dtypes=tuple(dtypes),
        elsize=elsize,
        rank=ranks,
        full_shape=_coordinates(full_shapes, where, "full_shape", width, 1),
        index=index,
    )
    if (fault := tensor_fault(table)) is not None:
        raise ManifestError(fault)
    return table


def _shard_table(tensors: TensorTable, shard_lists: list[Any], agent_name: str) -> ShardTable:
    _lists(shard_lists, lambda i: f"tensor {tensors.names[i]!r}", "shards")
    counts = np.fromiter(map(len, shard_lists), np.int64, len(shard_lists))
    tensor = np.repeat(np.arange(len(tensors)), counts)
    where: Where = lambda row: f"tensor {tensors.names[int(tensor[row])]!r}"  # noqa: E731
    shards = list(chain.from_iterable(shard_lists))
    agents, devices, addrs, offsets, shapes = _fields(
        shards, ("agent_name", "device_id", "addr", "shard_offset", "shape"), where
    )
    _texts(agents, where, "agent_name")
    if not set(agents) <= {agent_name}:
        at = next(i for i, agent in enumerate(agents) if agent != agent_name)
        raise ManifestError(
            f"{where(at)}: agent_name must be the manifest's own, {agent_name!r}, got {_short(agents[at])}"
        )
    rank = tensors.rank[tensor]
    for values, field in ((offsets, "shard_offset"), (shapes, "shape")):
        _lists(values, where, field, max_length=MAX_RANK)
        wrong = np.fromiter(map(len, values), np.int64, len(values)) != rank
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ManifestError(
                f"{where(at)}: {field} {_short(values[at])} does not have the rank of the global shape "
                f"{tensors.shape(int(tensor[at]))}"
            )
    _check_integers(addrs, where, "addr", 0, ADDRESS_SPACE_BYTES - 1)
    digests = [shard.get("digest", "") for shard in shards]
    has_digest = np.fromiter(("digest" in shard for shard in shards), np.bool_, len(shards))
    for at in np.flatnonzero(has_digest).tolist():
        if type(digests[at]) is not str or not _DIGEST(digests[at]):
            raise ManifestError(f"{where(at)}: digest must be 32 hex digits, got {_short(digests[at])}")
    columns = np.zeros((len(shards), DIGEST_BYTES), np.uint8)
    columns[has_digest] = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, DIGEST_BYTES)
    table = ShardTable(
        tensors=tensors,
        tensor=tensor,
        source=np.zeros(len(shards), np.int64),
        offset=_coordinates(offsets, where, "shard_offset", tensors.width, 0),
        shape=_coordinates(shapes, where, "shape", tensors.width, 1),
        addr=np.array(addrs, np.uint64),
        # -1 is how some publishers say "host memory".
        device_id=_integers(devices, where, "device_id", -1, 1 << 20),
        digest=columns,
        has_digest=has_digest,
    )
    if (fault := shard_fault(table)) is not None:
        raise ManifestError(fault)
    return table


# Each helper checks a whole column at the speed of C, and looks for the culprit only when that fails.


def _fields(rows: Sequence[Any], keys: tuple[str, ...], where: Where) -> list[list[Any]]:
    if set(map(type, rows)) - {dict}:
        at = next(i for i, row in enumerate(rows) if type(row) is not dict)
        raise ManifestError(f"{where(at)}: expected an object, got {_short(rows[at])}")
    try:
        columns = list(zip(*map(itemgetter(*keys), rows), strict=True))
    except KeyError:
        at, key = next((i, key) for i, row in enumerate(rows) for key in keys if key not in row)
        raise ManifestError(f"{where(at)}: field {key!r} is missing") from None
    return [list(column) for column in columns] or [[] for _ in keys]


def _texts(values: list[Any], where: Where, field: str, *, allow_empty: bool = False) -> None:
    shortest = 0 if allow_empty else 1

    def fits(value: object) -> bool:
        return type(value) is str and shortest <= len(value) <= MAX_TEXT_CHARS and value.isprintable()

    def all_fit() -> bool:
        if set(map(type, values)) - {str}:
            return False
        distinct = set(values)  # most columns repeat few strings
        lengths = set(map(len, distinct))
        # A lone surrogate is not printable, so what passes can be encoded.
        return not lengths - set(range(shortest, MAX_TEXT_CHARS + 1)) and "".join(distinct).isprintable()

    if not all_fit():
        at = next(i for i, value in enumerate(values) if not fits(value))
        raise ManifestError(
            f"{where(at)}: {field} must be a printable string of {shortest} to {MAX_TEXT_CHARS} characters, "
            f"got {_short(values[at])}"
        )


def _lists(values: list[Any], where: Where, field: str, *, max_length: int | None = None) -> None:
    if set(map(type, values)) - {list}:
        at = next(i for i, value in enumerate(values) if type(value) is not list)
        raise ManifestError(f"{where(at)}: {field} must be a list, got {_short(values[at])}")
    if max_length is not None and max(map(len, values), default=0) > max_length:
        at = next(i for i, value in enumerate(values) if len(value) > max_length)
        raise ManifestError(
            f"{where(at)}: {field} has rank {len(values[at])}, at most {max_length} is accepted"
        )


def _check_integers(values: Sequence[Any], where: Where, field: str, low: int, high: int) -> None:
    if set(map(type, values)) - {int} or (values and not (min(values) >= low and max(values) <= high)):
        at = next(i for i, value in enumerate(values) if type(value) is not int or not low <= value <= high)
        raise ManifestError(
            f"{where(at)}: {field} must be an integer in [{low}, {high}], got {_short(values[at])}"
        )


def _integers(values: Sequence[Any], where: Where, field: str, low: int, high: int) -> Int:
    _check_integers(values, where, field, low, high)
    return np.array(values, np.int64)


def _coordinates(values: list[list[Any]], where: Where, field: str, width: int, fill: int) -> Int:
    def row_of(position: int) -> str:
        rows = chain.from_iterable(repeat(row, len(value)) for row, value in enumerate(values))
        return where(next(row for i, row in enumerate(rows) if i == position))

    _check_integers(list(chain.from_iterable(values)), row_of, field, 0, MAX_EXTENT)
    return padded(values, width, fill)


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # printing it may be refused, or long
    if isinstance(value, list) and (len(value) > 2 * MAX_RANK or set(map(type, value)) - {int}):
        return f"a list of {len(value)}"  # what is in it may be deep or long
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
