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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard.geometry import (
    ADDRESS_SPACE_BYTES,
    DIGEST_BYTES,
    DTYPE_SIZE_BYTES,
    MAX_DEVICE,
    MAX_RANK,
    MIN_DEVICE,
    Bool,
    Int,
    ShardTable,
    TensorTable,
    shard_fault,
    tensor_fault,
)
from modelexpress_rl.reshard.manifest_facts import Facts
from modelexpress_rl.reshard.manifest_fields import (
    Where,
    check_integers,
    coordinates,
    fields,
    integers,
    lists,
    short,
    texts,
)

SCHEMA = "mx.reshard.shard_table.v1"
MAX_MANIFEST_BYTES = 32 << 20
# Every list and object of a manifest comes with field names: the smallest shard has 3 brackets in 78
# characters. Denser documents are refused before parsing, so that "[[],[],...]" can't become many
# times its size in Python objects.
MIN_BYTES_PER_BRACKET = 12
_DIGEST = re.compile(r"[0-9a-f]{32}").fullmatch


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


def encode(manifest: Manifest, *, facts: Facts | None = None, max_bytes: int | None = None) -> bytes:
    """Write a manifest in version 1, tensors in table order and shards in row order within them.

    `facts` are those of its table, where they are known.

    Raises:
        ManifestError: it would have more than `max_bytes`; then nothing of that size was made.
    """
    table = manifest.table
    facts = facts or Facts.of(table)
    tensors, shards = len(table.tensors), len(table)
    top = json.dumps(
        {
            "schema": SCHEMA,
            "agent_name": manifest.agent_name,
            "metadata_endpoint": manifest.metadata_endpoint,
            "agent_meta_b64": base64.b64encode(manifest.agent_meta).decode("ascii"),
        }
    )
    # Three texts begin a tensor, and three are a shard; nothing is done for each but to put them in place.
    written = np.empty(1 + 3 * (tensors + shards) + 1, object)
    written[0], written[-1] = f'{top[:-1]}, "tensors": [', "]}]}" if tensors else "]}"
    before = np.cumsum(facts.shards) - facts.shards
    at = 1 + 3 * (np.arange(tensors) + before)
    names, kinds = _escaped(table.tensors.names), _texts_of_kinds(facts)
    written[at] = ']}, {"name": "'
    written[at[:1]] = '{"name": "'
    written[at + 1] = _objects(names)
    written[at + 2] = _objects(kinds)[facts.kind]
    begins = np.zeros(shards, np.bool_)
    begins[before[facts.shards > 0]] = True
    at = 1 + 3 * (np.arange(shards) + facts.tensor + 1)
    agents, agent = _texts_of_agent(manifest.agent_name, table.device_id[facts.order], begins)
    boxes = _texts_of_boxes(facts)
    written[at] = _objects(agents)[agent]
    written[at + 1] = _objects(list(map(str, table.addr[facts.order].tolist())))
    written[at + 2] = _objects(boxes)[facts.box]
    longest = _longest(agents) + 20 + _longest(boxes)
    if table.has_digest.any():
        longest += _add_digests(written, at + 2, table, facts.order)
    if max_bytes is not None:
        size = (
            len(written[0])
            + len(written[-1])
            + sum(map(len, names))
            + tensors * (14 + _longest(kinds))
            + shards * longest
        )
        # That is at least as much as it has, and costs less than counting.
        if size > max_bytes and (size := sum(map(len, written.tolist()))) > max_bytes:
            raise ManifestError(f"manifest: {size} bytes in version 1, at most {max_bytes} are accepted")
    return "".join(written.tolist()).encode("ascii")


def _objects(values: Sequence[str]) -> NDArray[np.object_]:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _escaped(names: Sequence[str]) -> Sequence[str]:
    """As they stand between quotation marks."""
    joined = "".join(names)
    if joined.isascii() and '"' not in joined and "\\" not in joined:
        return names  # they are printable
    return [_quoted(name)[1:-1] for name in names]


def _texts_of_kinds(facts: Facts) -> list[str]:
    """What goes between a tensor's name and its shards."""
    return [
        f'", "dtype": {_quoted(facts.dtypes[dtype])}, "elsize": {DTYPE_SIZE_BYTES[facts.dtypes[dtype]]}, '
        f'"full_shape": {shape[facts.width - rank :]}, "shards": ['
        for dtype, rank, shape in zip(
            facts.kind_dtype.tolist(), facts.kind_rank.tolist(), facts.kind_shape.tolist(), strict=True
        )
    ]


def _texts_of_agent(agent_name: str, device_id: Int, begins: Bool) -> tuple[list[str], Int]:
    """What goes before a shard's address, and which of it before each."""
    if (device_id == device_id[:1]).all():  # as it mostly is
        devices, number = device_id[:1], np.zeros(len(device_id), np.int64)
    else:
        devices, number = np.unique(device_id, return_inverse=True)
    texts = [
        f'{comma}{{"agent_name": {_quoted(agent_name)}, "device_id": {device}, "addr": '
        for device in devices.tolist()
        for comma in (", ", "")
    ]
    return texts, 2 * number.reshape(-1) + begins


def _texts_of_boxes(facts: Facts) -> list[str]:
    """What goes after a shard's address."""
    skipped = (facts.width - facts.kind_rank[facts.box_kind]).tolist()
    return [
        f', "shard_offset": {offset[skip:]}, "shape": {shape[skip:]}}}'
        for skip, offset, shape in zip(
            skipped, facts.box_offset.tolist(), facts.box_shape.tolist(), strict=True
        )
    ]


def _add_digests(written: NDArray[np.object_], at: Int, table: ShardTable, order: Int) -> int:
    """Write digests into the last text of each shard that has one; return by how much that grows."""
    has = table.has_digest[order]
    digests = [f', "digest": "{row.tobytes().hex()}"}}' for row in table.digest[order][has]]
    ends = written[at[has]].tolist()
    written[at[has]] = _objects([end[:-1] + digest for end, digest in zip(ends, digests, strict=True)])
    return _longest(digests)


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
        for column in fields(
            [document], ("schema", "agent_name", "metadata_endpoint", "agent_meta_b64", "tensors"), top
        )
    )
    if schema != SCHEMA:
        raise ManifestError(f"manifest: schema must be {SCHEMA!r}, got {short(schema)}")
    texts([agent_name], top, "agent_name")
    texts([endpoint], top, "metadata_endpoint", allow_empty=True)
    agent_meta = _base64(meta_b64)
    lists([raw_tensors], top, "tensors")
    names, dtypes, elsizes, full_shapes, shard_lists = fields(
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
        raise ManifestError(f"manifest: agent_meta_b64 must be a string, got {short(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ManifestError(f"manifest: agent_meta_b64 is not base64: {error}") from error


def _tensor_table(
    names: list[Any], dtypes: list[Any], elsizes: list[Any], full_shapes: list[Any]
) -> TensorTable:
    texts(names, lambda i: f"tensor number {i}", "name")
    index = dict(zip(names, range(len(names)), strict=True))
    if len(index) != len(names):
        repeated = next(name for i, name in enumerate(names) if index[name] != i)
        raise ManifestError(f"tensor {repeated!r}: appears twice")
    where: Where = lambda i: f"tensor {names[i]!r}"  # noqa: E731
    texts(dtypes, where, "dtype")
    if not set(dtypes) <= DTYPE_SIZE_BYTES.keys():
        at = next(i for i, dtype in enumerate(dtypes) if dtype not in DTYPE_SIZE_BYTES)
        raise ManifestError(f"{where(at)}: dtype {short(dtypes[at])} is not known")
    elsize = integers(elsizes, where, "elsize", 1, 16)
    expected = np.array([DTYPE_SIZE_BYTES[dtype] for dtype in dtypes], np.int64)
    if (wrong := elsize != expected).any():
        at = int(np.argmax(wrong))
        raise ManifestError(f"{where(at)}: elsize of {dtypes[at]} is {expected[at]}, got {elsize[at]}")
    lists(full_shapes, where, "full_shape", max_length=MAX_RANK)
    ranks = np.fromiter(map(len, full_shapes), np.int64, len(names))
    width = int(ranks.max(initial=1))
    table = TensorTable(
        names=tuple(names),
        dtypes=tuple(dtypes),
        elsize=elsize,
        rank=ranks,
        full_shape=coordinates(full_shapes, where, "full_shape", width, 1),
        index=index,
    )
    if (fault := tensor_fault(table)) is not None:
        raise ManifestError(fault)
    return table


def _shard_table(tensors: TensorTable, shard_lists: list[Any], agent_name: str) -> ShardTable:
    lists(shard_lists, lambda i: f"tensor {tensors.names[i]!r}", "shards")
    counts = np.fromiter(map(len, shard_lists), np.int64, len(shard_lists))
    tensor = np.repeat(np.arange(len(tensors)), counts)
    where: Where = lambda row: f"tensor {tensors.names[int(tensor[row])]!r}"  # noqa: E731
    shards = list(chain.from_iterable(shard_lists))
    agents, devices, addrs, offsets, shapes = fields(
        shards, ("agent_name", "device_id", "addr", "shard_offset", "shape"), where
    )
    texts(agents, where, "agent_name")
    if not set(agents) <= {agent_name}:
        at = next(i for i, agent in enumerate(agents) if agent != agent_name)
        raise ManifestError(
            f"{where(at)}: agent_name must be the manifest's own, {agent_name!r}, got {short(agents[at])}"
        )
    rank = tensors.rank[tensor]
    for values, field in ((offsets, "shard_offset"), (shapes, "shape")):
        lists(values, where, field, max_length=MAX_RANK)
        wrong = np.fromiter(map(len, values), np.int64, len(values)) != rank
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ManifestError(
                f"{where(at)}: {field} {short(values[at])} does not have the rank of the global shape "
                f"{tensors.shape(int(tensor[at]))}"
            )
    check_integers(addrs, where, "addr", 0, ADDRESS_SPACE_BYTES - 1)
    digests = [shard.get("digest", "") for shard in shards]
    has_digest = np.fromiter(("digest" in shard for shard in shards), np.bool_, len(shards))
    for at in np.flatnonzero(has_digest).tolist():
        if type(digests[at]) is not str or not _DIGEST(digests[at]):
            raise ManifestError(f"{where(at)}: digest must be 32 hex digits, got {short(digests[at])}")
    columns = np.zeros((len(shards), DIGEST_BYTES), np.uint8)
    columns[has_digest] = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, DIGEST_BYTES)
    table = ShardTable(
        tensors=tensors,
        tensor=tensor,
        source=np.zeros(len(shards), np.int64),
        offset=coordinates(offsets, where, "shard_offset", tensors.width, 0),
        shape=coordinates(shapes, where, "shape", tensors.width, 1),
        addr=np.array(addrs, np.uint64),
        # -1 is how some publishers say "host memory".
        device_id=integers(devices, where, "device_id", MIN_DEVICE, MAX_DEVICE),
        digest=columns,
        has_digest=has_digest,
    )
    if (fault := shard_fault(table)) is not None:
        raise ManifestError(fault)
    return table
