"""Columnar manifests: the facts of version 1 as packed columns, between our own ends.

    "MXC1" | uint32 size of the body | one zstd frame: the body

    body: counts | agent metadata | texts (agent, endpoint, dtypes, tensor names), a line each
          | kinds (dtype, rank, global shape) | boxes (kind, offset, shape)
          | a kind and a number of shards for each tensor | a box, a device and an address for each shard
          | digests

Few kinds and boxes make up a model, so a tensor is a name and a number, a shard two numbers and how far
its address lies from the end of the shard before. Integers are little-endian; see `columns` for how a
column is packed.

Decoding gives what decoding version 1 gives, rows in the same order, so version 1 can be written again
from it: its sha256, which the control plane carries, binds this encoding too. Nothing is trusted before:
the size of the body is bounded before it is decompressed, counts before columns are made of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import zstandard

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard.columns import Reader, packed, packed_bits
from modelexpress_rl.reshard.geometry import (
    DIGEST_BYTES,
    DTYPE_SIZE_BYTES,
    MAX_DEVICE,
    MAX_EXTENT,
    MAX_RANK,
    MIN_DEVICE,
    Bool,
    Bytes,
    Int,
    ShardTable,
    TensorTable,
    UInt,
    tensor_fault,
    volumes,
)
from modelexpress_rl.reshard.manifest import MAX_MANIFEST_BYTES, Manifest, digest
from modelexpress_rl.reshard.manifest import encode as encode_version_1
from modelexpress_rl.reshard.manifest_facts import Facts
from modelexpress_rl.reshard.manifest_fields import MAX_TEXT_CHARS, short

NAME = "columns-1"  # what a reader asks for
MAGIC = b"MXC1"
MAX_ROWS = 1 << 19  # tensors, and shards; version 1 holds about as many in its 32 MiB
MAX_CELLS = 1 << 21  # rows times rank: what an offset or a shape may take
_LEVEL = 3
_PRINTABLE_ASCII = bytes(range(0x20, 0x7F)) + b"\n"
_PREFIX = struct.Struct("<4sI")
_COUNTS = struct.Struct("<IIIIIBBBxQII")


@dataclass(frozen=True, slots=True)
class _Counts:
    """The beginning of a body: how many there are of what."""

    tensors: int
    shards: int
    kinds: int
    boxes: int
    lines: int
    dtypes: int
    width: int
    with_digests: int
    first_addr: int
    meta_bytes: int
    text_bytes: int

    def check(self) -> None:
        """What the columns will take is bounded by this, not by what they say."""
        for what, count, limit in (
            ("tensors", self.tensors, MAX_ROWS),
            ("shards", self.shards, MAX_ROWS),
            ("kinds", self.kinds, self.tensors),
            ("boxes", self.boxes, self.shards),
            ("dtypes", self.dtypes, len(DTYPE_SIZE_BYTES)),
            ("axes", self.width, MAX_RANK),
            ("coordinates", max(self.tensors, self.shards) * self.width, MAX_CELLS),
            ("kinds of digests", self.with_digests, 1),
        ):
            if count > limit:
                raise ManifestError(f"manifest: at most {limit} {what} are accepted, got {count}")
        if self.width < 1 or self.lines != 2 + self.dtypes + self.tensors:
            raise ManifestError(f"manifest: {self.width} axes and {self.lines} lines don't fit the counts")


def is_columnar(data: bytes) -> bool:
    """Whether this is a columnar manifest, or else one of version 1."""
    return data.startswith(MAGIC)


def body_bytes(data: bytes) -> int:
    """How much there is to read in a manifest of either encoding: columns say what they decompress to."""
    if is_columnar(data) and len(data) >= _PREFIX.size:
        return int(_PREFIX.unpack_from(data)[1])
    return len(data)


def encode(manifest: Manifest, *, facts: Facts | None = None) -> bytes:
    """Write a manifest in columns, tensors in table order and shards in row order within them.

    `facts` are those of its table, where they are known.

    Raises:
        ManifestError: it is too big for this encoding; version 1 may hold it.
    """
    table = manifest.table
    facts = facts or Facts.of(table)
    addr, size_bytes = table.addr[facts.order], table.size_bytes[facts.order].astype(np.uint64)
    has_digest = table.has_digest[facts.order]
    lines = [manifest.agent_name, manifest.metadata_endpoint, *facts.dtypes, *table.tensors.names]
    text = "\n".join(lines).encode()
    counts = _Counts(
        tensors=len(table.tensors),
        shards=len(table),
        kinds=len(facts.kind_rank),
        boxes=len(facts.box_kind),
        lines=len(lines),
        dtypes=len(facts.dtypes),
        width=facts.width,
        with_digests=int(has_digest.any()),
        first_addr=int(addr[0]) if len(addr) else 0,
        meta_bytes=len(manifest.agent_meta),
        text_bytes=len(text),
    )
    counts.check()
    kinds = np.column_stack([facts.kind_dtype, facts.kind_rank, facts.kind_shape])
    boxes = np.column_stack([facts.box_kind, facts.box_offset, facts.box_shape])
    parts = [
        _COUNTS.pack(*(getattr(counts, name) for name in _Counts.__slots__)),
        manifest.agent_meta,
        text,
        packed(kinds.T.reshape(-1)),
        packed(boxes.T.reshape(-1)),
        packed(facts.kind),
        packed(facts.shards),
        packed(facts.box),
        packed(table.device_id[facts.order]),
        packed((addr[1:] - addr[:-1] - size_bytes[:-1]).view(np.int64)),
    ]
    if counts.with_digests:
        parts += [packed_bits(has_digest), table.digest[facts.order][has_digest].tobytes()]
    body = b"".join(parts)
    if len(body) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"manifest: at most {MAX_MANIFEST_BYTES} bytes are accepted, got {len(body)}")
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(body)
    return _PREFIX.pack(MAGIC, len(body)) + frame


def encodings(manifest: Manifest) -> tuple[bytes, bytes | None]:
    """A manifest in version 1, and in columns where they can hold it."""
    facts = Facts.of(manifest.table)
    try:
        columns = encode(manifest, facts=facts)
    except ManifestError:
        columns = None
    return encode_version_1(manifest, facts=facts), columns


def decode(data: bytes, *, max_bytes: int = MAX_MANIFEST_BYTES) -> tuple[Manifest, Facts]:
    """Read a columnar manifest, of at most `max_bytes` when decompressed, and the facts of its table.

    Raises:
        ManifestError: it is too big, damaged, or says what can't be; the message names the tensor where
            it is about one.
    """
    body = Reader(_decompressed(data, max_bytes))
    counts = _Counts(*_COUNTS.unpack(body.take(_COUNTS.size, "the counts")))
    counts.check()
    agent_meta = bytes(body.take(counts.meta_bytes, "the agent's metadata"))
    agent_name, endpoint, dtypes, names = _texts(bytes(body.take(counts.text_bytes, "the texts")), counts)
    facts, size_bytes = _facts(body, counts, dtypes)
    tensors = _tensor_table(names, facts)
    tensor = facts.tensor
    if (wrong := facts.box_kind[facts.box] != facts.kind[tensor]).any():
        name = names[int(tensor[np.argmax(wrong)])]
        raise ManifestError(f"tensor {name!r}: a shard's box is not one of this tensor's dtype and shape")
    # -1 is how some publishers say "host memory".
    device_id = _numbers(body, counts.shards, "devices", MIN_DEVICE, MAX_DEVICE)
    addr = _addresses(body, counts, size_bytes[facts.box], tensors, tensor)
    has_digest, digests = _digests(body, counts)
    body.end()
    table = ShardTable(
        tensors=tensors,
        tensor=tensor,
        source=np.zeros(counts.shards, np.int64),
        offset=facts.box_offset[facts.box],
        shape=facts.box_shape[facts.box],
        addr=addr,
        device_id=device_id,
        digest=digests,
        has_digest=has_digest,
    )
    return Manifest(agent_name, endpoint, agent_meta, table), facts


def decode_announced(data: bytes, announced: str, *, max_bytes: int = MAX_MANIFEST_BYTES) -> Manifest:
    """Read a columnar manifest that says what the version 1 whose sha256 is `announced` says.

    Raises:
        ManifestError: as `decode`, or it says something else.
    """
    manifest, facts = decode(data, max_bytes=max_bytes)
    found = digest(encode_version_1(manifest, facts=facts, max_bytes=max_bytes))
    if found != announced:
        raise ManifestError(f"manifest: in version 1 it has sha256 {found}, {announced!r} was announced")
    return manifest


def _decompressed(data: bytes, max_bytes: int) -> bytes:
    if len(data) < _PREFIX.size:
        raise ManifestError(f"manifest: {len(data)} bytes are too few")
    magic, size = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ManifestError(f"manifest: expected to begin with {MAGIC!r}, got {magic!r}")
    if max(size, len(data)) > max_bytes:
        raise ManifestError(f"manifest: at most {max_bytes} bytes are accepted, got {max(size, len(data))}")
    frame = memoryview(data)[_PREFIX.size :]
    try:
        # What the frame says of its size is compared first: memory is taken by it.
        if zstandard.frame_content_size(frame) != size:
            raise ManifestError(f"manifest: its frame is not of the {size} bytes that it announces")
        body = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ManifestError(f"manifest: it can't be decompressed: {error}") from error
    if len(body) != size:
        raise ManifestError(f"manifest: {size} bytes announced, {len(body)} decompressed")
    return body


def _texts(text: bytes, counts: _Counts) -> tuple[str, str, list[str], list[str]]:
    breaks = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    if len(breaks) != counts.lines - 1:
        raise ManifestError(f"manifest: expected {counts.lines} lines, got {len(breaks) + 1}")
    try:
        lines = text.decode("utf-8").split("\n")
    except ValueError as error:  # a lone surrogate is no UTF-8 either
        raise ManifestError(f"manifest: its texts are not UTF-8: {error}") from error
    # Most texts are short and ASCII, and many: what is, is seen from the bytes.
    longest = int(np.diff(breaks, prepend=-1, append=len(text)).max()) - 1
    if longest > MAX_TEXT_CHARS or text.translate(None, _PRINTABLE_ASCII):
        for line in lines:
            if not line.isprintable() or len(line) > MAX_TEXT_CHARS:
                raise ManifestError(
                    f"manifest: a text must be printable, of at most {MAX_TEXT_CHARS} characters, "
                    f"got {short(line)}"
                )
    dtypes, names = lines[2 : 2 + counts.dtypes], lines[2 + counts.dtypes :]
    if not lines[0] or "" in names:
        raise ManifestError("manifest: the agent's name, or a tensor's, is empty")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPE_SIZE_BYTES]
    if unknown:
        raise ManifestError(f"manifest: dtype {short(unknown[0])} is not known")
    return lines[0], lines[1], dtypes, names


def _facts(body: Reader, counts: _Counts, dtypes: list[str]) -> tuple[Facts, Int]:
    """The facts, and the size of each box in bytes."""
    width = counts.width
    columns = 2 + width
    kinds = body.column(counts.kinds * columns, "kinds").reshape(columns, counts.kinds).T
    kind_dtype, kind_rank, kind_shape = kinds[:, 0], kinds[:, 1], np.ascontiguousarray(kinds[:, 2:])
    _within(kind_dtype, "dtypes of kinds", 0, counts.dtypes - 1)
    _within(kind_rank, "ranks of kinds", 0, width)
    _within(kind_shape, "global shapes", 0, MAX_EXTENT)
    if (kind_shape[_padding(kind_rank, width)] != 1).any():
        raise ManifestError("manifest: a global shape has an extent before its first axis")
    columns = 1 + 2 * width
    boxes = body.column(counts.boxes * columns, "boxes").reshape(columns, counts.boxes).T
    box_kind = boxes[:, 0]
    offset, shape = np.ascontiguousarray(boxes[:, 1 : 1 + width]), np.ascontiguousarray(boxes[:, 1 + width :])
    _within(box_kind, "kinds of boxes", 0, counts.kinds - 1)
    full = kind_shape[box_kind]
    outside = (offset < 0) | (shape < 0) | (offset > full) | (shape > full - offset)
    outside |= _padding(kind_rank[box_kind], width) & ((offset != 0) | (shape != 1))
    if outside.any():
        at = int(np.argmax(outside.any(axis=1)))
        raise ManifestError(
            f"manifest: a box of offset {offset[at].tolist()} and shape {shape[at].tolist()} lies outside "
            f"the global shape {full[at].tolist()}"
        )
    kind = _numbers(body, counts.tensors, "kinds of tensors", 0, counts.kinds - 1)
    shards = _numbers(body, counts.tensors, "numbers of shards", 0, counts.shards)
    if int(shards.sum()) != counts.shards:
        raise ManifestError(f"manifest: {counts.shards} shards, but its tensors have {int(shards.sum())}")
    box = _numbers(body, counts.shards, "boxes of shards", 0, counts.boxes - 1)
    facts = Facts(
        dtypes=tuple(dtypes),
        kind_dtype=kind_dtype,
        kind_rank=kind_rank,
        kind_shape=kind_shape,
        kind=kind,
        shards=shards,
        box_kind=box_kind,
        box_offset=offset,
        box_shape=shape,
        box=box,
        order=np.arange(counts.shards),
    )
    elsize = np.array([DTYPE_SIZE_BYTES[dtype] for dtype in dtypes], np.int64)
    return facts, volumes(shape) * elsize[kind_dtype[box_kind]]


def _tensor_table(names: list[str], facts: Facts) -> TensorTable:
    index = dict(zip(names, range(len(names)), strict=True))
    if len(index) != len(names):
        repeated = next(name for i, name in enumerate(names) if index[name] != i)
        raise ManifestError(f"tensor {repeated!r}: appears twice")
    elsize = np.array([DTYPE_SIZE_BYTES[dtype] for dtype in facts.dtypes], np.int64)
    dtype = facts.kind_dtype[facts.kind]
    spelled = np.empty(len(facts.dtypes), object)
    spelled[:] = facts.dtypes
    table = TensorTable(
        names=tuple(names),
        dtypes=tuple(spelled[dtype].tolist()),
        elsize=elsize[dtype],
        rank=facts.kind_rank[facts.kind],
        full_shape=facts.kind_shape[facts.kind],
        index=index,
    )
    if table.width != max(1, int(table.rank.max(initial=1))):
        raise ManifestError(f"manifest: no tensor has the {table.width} axes that boxes are written with")
    if (fault := tensor_fault(table)) is not None:
        raise ManifestError(fault)
    return table


def _addresses(body: Reader, counts: _Counts, size_bytes: Int, tensors: TensorTable, tensor: Int) -> UInt:
    jumps = body.column(max(counts.shards - 1, 0), "addresses").view(np.uint64)
    sizes = size_bytes.astype(np.uint64)
    addr = np.full(counts.shards, counts.first_addr, np.uint64)
    addr[1:] += np.cumsum(sizes[:-1] + jumps)  # modulo 2**64: any address is one, and may be wrong
    past = addr > np.uint64(0xFFFFFFFFFFFFFFFF) - sizes
    if past.any():
        at = int(np.argmax(past))
        raise ManifestError(
            f"tensor {tensors.names[int(tensor[at])]!r}: addr {int(addr[at])} plus {int(size_bytes[at])} "
            "bytes is past the end of memory"
        )
    return addr


def _digests(body: Reader, counts: _Counts) -> tuple[Bool, Bytes]:
    columns = np.zeros((counts.shards, DIGEST_BYTES), np.uint8)
    if not counts.with_digests:
        return np.zeros(counts.shards, np.bool_), columns
    has_digest = body.bits(counts.shards, "digests")
    data = body.take(int(has_digest.sum()) * DIGEST_BYTES, "digests")
    columns[has_digest] = np.frombuffer(data, np.uint8).reshape(-1, DIGEST_BYTES)
    return has_digest, columns


def _padding(rank: Int, width: int) -> Bool:
    """Which coordinates of boxes of these ranks lie before their first axis."""
    padding: Bool = np.arange(width) < width - rank[:, None]
    return padding


def _numbers(body: Reader, count: int, what: str, low: int, high: int) -> Int:
    values = body.column(count, what)
    _within(values, what, low, high)
    return values


def _within(values: Int, what: str, low: int, high: int) -> None:
    if values.size and not (values.min() >= low and values.max() <= high):
        wrong = values[(values < low) | (values > high)]
        raise ManifestError(
            f"manifest: {what} must be integers in [{low}, {high}], got {int(wrong.reshape(-1)[0])}"
        )
