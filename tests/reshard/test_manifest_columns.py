"""Columnar manifests: the facts of version 1 in a few bytes, and nothing hostile costs more than it may."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard import manifest as version_1
from modelexpress_rl.reshard import manifest_columns as columns
from modelexpress_rl.reshard.columns import Reader, distinct_rows, packed, packed_bits
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest
from tests.examples import many
from tests.reshard import model_geometry
from tests.reshard.documents import damaged, manifests

DATA = Path(__file__).parent.parent / "data"
GOLDEN = (DATA / "manifest_v1.json").read_bytes()


def columns_of(manifest: Manifest) -> dict[str, Any]:
    table = manifest.table
    tensors = {f.name: getattr(table.tensors, f.name) for f in dataclasses.fields(table.tensors)}
    shards = {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if f.name != "tensors"}
    found = {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in (tensors | shards).items()}
    dtypes = {name: v.dtype for name, v in (tensors | shards).items() if isinstance(v, np.ndarray)}
    head = {"agent": manifest.agent_name, "at": manifest.metadata_endpoint, "meta": manifest.agent_meta}
    return found | {"column dtypes": dtypes} | head


@many
@given(manifests())
def test_it_says_what_version_1_says(manifest: Manifest) -> None:
    data, document = columns.encode(manifest), version_1.encode(manifest)
    assert (columns.is_columnar(data), columns.is_columnar(document)) == (True, False)
    again = columns.decode_announced(data, version_1.digest(document))
    assert columns_of(again) == columns_of(version_1.decode(document))
    assert version_1.encode(again) == document
    assert columns.encode(again) == data
    assert columns.encodings(manifest) == (document, data)
    assert version_1.encode(manifest, max_bytes=len(document)) == document
    with pytest.raises(ManifestError, match=f"{len(document)} bytes in version 1, at most"):
        version_1.encode(manifest, max_bytes=len(document) - 1)


def test_the_golden_manifest_survives_byte_for_byte() -> None:
    data = columns.encode(version_1.decode(GOLDEN))
    assert len(data) < len(GOLDEN) / 2
    assert columns.body_bytes(data) == len(body_of(data)) > len(data)
    assert columns.body_bytes(GOLDEN) == len(GOLDEN)
    assert version_1.encode(columns.decode(data)[0]) == GOLDEN
    # What was written once stays readable; a compressor may write other bytes one day.
    assert version_1.encode(columns.decode((DATA / "manifest_columns_1.bin").read_bytes())[0]) == GOLDEN


@pytest.mark.parametrize(
    ("model", "tp", "ep", "most_bytes"), [("qwen3-30b-a3b", 4, 16, 400_000), ("llama-8b", 8, 1, 30_000)]
)
def test_manifests_of_a_big_model_are_small(model: str, tp: int, ep: int, most_bytes: int) -> None:
    shape = model_geometry.MODELS[model]
    tensors = list(model_geometry.tensors(shape))
    noise = np.random.default_rng(0)
    size = 0
    for boxes in model_geometry.trainer_shards(tensors, shape.experts, tp, ep):
        # Nothing is known of addresses but that allocators align them.
        addresses = (1 << 46) + 512 * noise.integers(0, 1 << 28, len(boxes))
        shards = [
            Shard(tensors[i].name, "torch.bfloat16", tensors[i].shape, offset, box, int(addr))
            for (i, offset, box), addr in zip(boxes, addresses, strict=True)
        ]
        size += len(columns.encode(Manifest("agent", "host:1", bytes(1000), ShardTable.build(shards))))
    assert size < most_bytes


def test_what_was_announced_is_what_it_must_say() -> None:
    manifest = version_1.decode(GOLDEN)
    moved = dataclasses.replace(
        manifest, table=dataclasses.replace(manifest.table, addr=manifest.table.addr + np.uint64(1))
    )
    announced = version_1.digest(GOLDEN)
    assert columns.decode_announced(columns.encode(manifest), announced).agent_name == "agent-0"
    with pytest.raises(ManifestError, match=f"in version 1 it has sha256 .*{announced}' was announced"):
        columns.decode_announced(columns.encode(moved), announced)


# What a peer may send.


def body_of(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data[8:])


def framed(body: bytes, *, size: int | None = None, level: int = 1) -> bytes:
    frame = zstandard.ZstdCompressor(level=level).compress(body)
    return columns.MAGIC + struct.pack("<I", len(body) if size is None else size) + frame


def judged(data: bytes) -> None:
    """It is refused, or is a manifest like any other; either way at no cost of the sender's choosing."""
    tracemalloc.start()
    try:
        manifest, _ = columns.decode(data, max_bytes=1 << 20)
        document = version_1.encode(manifest, max_bytes=1 << 20)
    except ManifestError:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 400 << 20
    assert columns_of(version_1.decode(document)) == columns_of(manifest)


@many
@given(manifests(), st.data())
def test_any_damage_is_refused_or_a_manifest(manifest: Manifest, data: st.DataObject) -> None:
    judged(data.draw(damaged(columns.encode(manifest))))


@many
@given(manifests(), st.data())
def test_any_damage_before_compression_is_refused_or_a_manifest(
    manifest: Manifest, data: st.DataObject
) -> None:
    judged(framed(data.draw(damaged(body_of(columns.encode(manifest))))))


@many
@given(manifests(), st.data())
def test_any_counts_are_refused_or_a_manifest(manifest: Manifest, data: st.DataObject) -> None:
    body = bytearray(body_of(columns.encode(manifest)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = 4 * data.draw(st.integers(0, 8))
        value = data.draw(st.sampled_from([0, 1, 2, 255, 1 << 16, (1 << 19) - 1, 1 << 19, (1 << 32) - 1]))
        body[at : at + 4] = struct.pack("<I", value)
    judged(framed(bytes(body)))


@many
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_refused_or_a_manifest(data: bytes, compressed: bool) -> None:
    judged(framed(data) if compressed else columns.MAGIC + data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"MXC1", "4 bytes are too few"),
        (GOLDEN, "expected to begin with b'MXC1'"),
        (framed(b"", size=1 << 31), "at most 33554432 bytes are accepted, got 2147483648"),
        (framed(bytes(1 << 26)), "at most 33554432 bytes are accepted, got 67108864"),
        (framed(bytes(1 << 26), size=1 << 20), "its frame is not of the 1048576 bytes"),
        (framed(bytes(100), size=200), "its frame is not of the 200 bytes"),
        (framed(bytes(100)) + b"more", "can't be decompressed"),
        (framed(bytes(100))[:-3], "can't be decompressed"),
        (columns.MAGIC + bytes(100), "can't be decompressed|its frame"),
        (framed(bytes(40)), "0 axes and 0 lines don't fit"),
        (framed(bytes(7)), "the counts takes? 40 bytes, 7 are left"),
    ],
)
def test_what_is_no_frame_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        columns.decode(data)


def test_a_frame_that_does_not_say_its_size_is_refused() -> None:
    body = body_of(columns.encode(version_1.decode(GOLDEN)))
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    with pytest.raises(ManifestError, match="its frame is not of the"):
        columns.decode(columns.MAGIC + struct.pack("<I", len(body)) + frame)


class Written:
    """A body written field by field, right but for what a test changes."""

    def __init__(self) -> None:
        self.counts = {
            "tensors": 1, "shards": 1, "kinds": 1, "boxes": 1, "lines": 4, "dtypes": 1, "width": 2,
            "with_digests": 0, "first_addr": 4096, "meta_bytes": 0, "text_bytes": -1,
        }  # fmt: skip
        self.texts = b"agent\n\ntorch.float32\nt"
        self.kinds = [[0], [2], [4], [8]]  # dtype, rank, global shape
        self.boxes = [[0], [1], [0], [2], [8]]  # kind, offset, shape
        self.kind, self.shards, self.box, self.device, self.jumps = [0], [1], [0], [0], list[int]()
        self.tail = b""

    def bytes(self) -> bytes:
        counts = dict(self.counts)
        if counts["text_bytes"] < 0:
            counts["text_bytes"] = len(self.texts)
        flat = [[x for column in table for x in column] for table in (self.kinds, self.boxes)]
        lists = [*flat, self.kind, self.shards, self.box, self.device, self.jumps]
        body = b"".join(packed(np.array(values, np.int64)) for values in lists)
        head = struct.pack("<IIIIIBBBxQII", *counts.values())
        return framed(head + self.texts + body + self.tail)


def test_what_is_written_by_hand_is_read() -> None:
    manifest, _ = columns.decode(Written().bytes())
    assert manifest.table.box(0) == ((1, 0), (2, 8))
    assert manifest.table.addr.tolist() == [4096]


def change(**fields: Any) -> Callable[[Written], None]:
    def apply(written: Written) -> None:
        for name, value in fields.items():
            if isinstance(value, int):
                written.counts[name] = value
            else:
                setattr(written, name, value)

    return apply


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change(tensors=1 << 20), "at most 524288 tensors are accepted, got 1048576"),
        (change(shards=1 << 20), "at most 524288 shards are accepted"),
        (change(kinds=2), "at most 1 kinds are accepted, got 2"),
        (change(boxes=2), "at most 1 boxes are accepted, got 2"),
        (change(dtypes=200), "dtypes are accepted, got 200"),
        (change(width=17), "at most 16 axes are accepted, got 17"),
        (change(width=0), "0 axes"),
        (change(shards=500_000, width=5), "at most 2097152 coordinates are accepted, got 2500000"),
        (change(with_digests=7), "at most 1 kinds of digests are accepted, got 7"),
        (change(lines=9), "9 lines don't fit the counts"),
        (change(texts=b"agent\n\ntorch.float32"), "expected 4 lines, got 3"),
        (change(meta_bytes=1 << 31), "the agent's metadata takes 2147483648 bytes"),
        (change(text_bytes=1 << 31), "the texts takes 2147483648 bytes"),
        (change(texts=b"agent\n\ntorch.float32\n\xff"), "not UTF-8"),
        (change(texts=b"agent\n\ntorch.float32\n\xed\xa0\x80"), "not UTF-8"),
        (change(texts=b"agent\n\ntorch.float32\n" + b"x" * 1025), "at most 1024 characters, got 'xxx"),
        (change(texts="agent\n\ntorch.float32\n\u2028".encode()), "a text must be printable"),
        (change(texts=b"agent\n\ntorch.float32\na\tb"), "a text must be printable"),
        (change(texts=b"\n\ntorch.float32\nt"), "the agent's name, or a tensor's, is empty"),
        (change(texts=b"agent\n\ntorch.float32\n"), "the agent's name, or a tensor's, is empty"),
        (change(texts=b"agent\n\nfloat32\nt"), "dtype 'float32' is not known"),
        (change(kinds=[[1], [2], [4], [8]]), r"dtypes of kinds must be integers in \[0, 0\], got 1"),
        (change(kinds=[[0], [3], [4], [8]]), r"ranks of kinds must be integers in \[0, 2\], got 3"),
        (change(kinds=[[0], [2], [-4], [8]]), "global shapes must be integers in .*, got -4"),
        (change(kinds=[[0], [1], [4], [8]]), "an extent before its first axis"),
        (change(kinds=[[0], [1], [1], [8]], boxes=[[0], [0], [0], [1], [8]]), "no tensor has the 2 axes"),
        (change(kinds=[[0], [2], [1 << 40], [1 << 40]]), "tensor 't': full_shape .* is more than"),
        (change(boxes=[[1], [1], [0], [2], [8]]), "kinds of boxes must be integers"),
        (
            change(boxes=[[0], [3], [0], [2], [8]]),
            r"offset \[3, 0\] and shape \[2, 8\] lies outside .* \[4, 8",
        ),
        (change(boxes=[[0], [-1], [0], [2], [8]]), "lies outside the global shape"),
        (change(boxes=[[0], [1], [0], [-1], [8]]), "lies outside the global shape"),
        (change(boxes=[[0], [(1 << 63) - 1], [0], [2], [8]]), "lies outside the global shape"),
        (change(kind=[5]), "kinds of tensors must be integers"),
        (change(box=[5]), "boxes of shards must be integers"),
        (change(device=[-2]), "devices must be integers in .*, got -2"),
        (change(first_addr=(1 << 64) - 10), "tensor 't': addr 18446744073709551606 plus 64 bytes"),
        (change(tail=b"x"), "1 bytes too many at its end"),
        (change(with_digests=1), "digests takes 1 bytes, 0 are left"),
        (change(with_digests=1, tail=b"\1" + bytes(15)), "digests takes 16 bytes, 15 are left"),
    ],
)
def test_a_wrong_field_is_named(apply: Callable[[Written], None], message: str) -> None:
    written = Written()
    apply(written)
    with pytest.raises(ManifestError, match=message):
        columns.decode(written.bytes())


def two_tensors() -> Written:
    written = Written()
    written.counts |= {"tensors": 2, "shards": 2, "kinds": 2, "boxes": 2, "lines": 5}
    written.texts = b"agent\n\ntorch.float32\nt\nu"
    written.kinds = [[0, 0], [2, 1], [4, 1], [8, 9]]
    written.boxes = [[0, 1], [1, 0], [0, 3], [2, 1], [8, 2]]
    written.kind, written.shards, written.box, written.device = [0, 1], [1, 1], [0, 1], [0, 0]
    written.jumps = [16]
    return written


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change(texts=b"agent\n\ntorch.float32\nt\nt"), "tensor 't': appears twice"),
        (change(box=[0, 0]), "tensor 'u': a shard's box is not one of this tensor's dtype and shape"),
        (change(shards=[2, 1]), "2 shards, but its tensors have 3"),
        (change(shards=[-1, 3]), "numbers of shards must be integers"),
        (change(boxes=[[0, 1], [1, 1], [0, 3], [2, 0], [8, 2]]), "lies outside the global shape"),
        (change(jumps=[-(1 << 12) - 64 - 4]), "tensor 'u': addr 18446744073709551612 plus 8 bytes"),
    ],
)
def test_a_wrong_field_of_two_tensors_is_named(apply: Callable[[Written], None], message: str) -> None:
    written = two_tensors()
    manifest, _ = columns.decode(written.bytes())
    assert manifest.table.box(1) == ((3,), (2,))
    assert manifest.table.addr.tolist() == [4096, 4096 + 64 + 16]
    apply(written)
    with pytest.raises(ManifestError, match=message):
        columns.decode(written.bytes())


def test_few_bytes_can_not_claim_much_memory() -> None:
    """As many shards as are allowed, in columns that take no bytes, and names that version 1 repeats."""
    shards = columns.MAX_CELLS // 16
    written = Written()
    written.counts |= {"shards": shards, "width": 16}
    written.texts = b"a" * 1024 + b"\n\ntorch.float32\nt"
    kinds, boxes = [0, 16, *[1] * 16], [*[0] * 17, *[1] * 16]
    body = b"".join(packed(np.array(values)) for values in (kinds, boxes, [0], [shards]))
    body += 3 * packed(np.array([0]))
    counts = struct.pack("<IIIIIBBBxQII", *{**written.counts, "text_bytes": len(written.texts)}.values())
    data = framed(counts + written.texts + body)
    assert len(data) < 300
    tracemalloc.start()
    try:
        manifest, facts = columns.decode(data)
        assert len(manifest.table) == shards
        with pytest.raises(ManifestError, match="bytes in version 1, at most 33554432 are accepted"):
            version_1.encode(manifest, facts=facts, max_bytes=version_1.MAX_MANIFEST_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_what_is_too_big_for_columns_is_served_in_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = version_1.decode(GOLDEN)
    monkeypatch.setattr(columns, "MAX_ROWS", 1)
    with pytest.raises(ManifestError, match="at most 1 tensors are accepted, got 2"):
        columns.encode(manifest)
    assert columns.encodings(manifest) == (GOLDEN, None)
    monkeypatch.undo()
    monkeypatch.setattr(columns, "MAX_MANIFEST_BYTES", 100)
    assert columns.encodings(manifest) == (GOLDEN, None)


INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@many
@given(st.lists(st.integers(0, 300) | INT64, max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_column_is_read_as_it_was_packed(values: list[int], flags: list[bool]) -> None:
    reader = Reader(packed(np.array(values, np.int64)) + packed_bits(np.array(flags, np.bool_)))
    assert reader.column(len(values), "values").tolist() == values
    assert reader.bits(len(flags), "flags").tolist() == flags
    reader.end()


@many
@given(st.lists(st.tuples(st.integers(0, 2), INT64 | st.integers(0, 1)), max_size=20))
def test_rows_are_told_apart(rows: list[tuple[int, int]]) -> None:
    table = np.array(rows, np.int64).reshape(-1, 2)
    first, number = distinct_rows(table)
    assert len(first) == len(set(rows))
    assert (table[first][number] == table).all()


def test_rows_whose_hashes_collide_are_told_apart() -> None:
    # 1 * factor**2 + 0 * factor, and 0 * factor**2 + factor * factor.
    rows = np.array([[1, 0], [0, 0x9E3779B97F4A7C15], [1, 0]], np.uint64).view(np.int64)
    first, number = distinct_rows(rows)
    assert len(first) == 2
    assert (rows[first][number] == rows).all()
