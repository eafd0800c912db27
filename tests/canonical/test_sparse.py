"""Our own deltas: every type, shape and density, chains, slices, and no byte that can be wrong unseen."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexpress_rl.canonical import directory, planes
from modelexpress_rl.canonical.chunk import Chunk, Kind, encode, put_onto
from modelexpress_rl.canonical.grid import Grid, Slice, boxes_of
from modelexpress_rl.canonical.index import (
    Encoding,
    Index,
    Prefix,
    index_digest,
    read_index,
    shard_name,
    write_index,
)
from modelexpress_rl.canonical.joining import advance, squash
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.objects import BytesObject
from modelexpress_rl.canonical.sparse import SparseTensor, byte_ranges, read_sparse
from modelexpress_rl.canonical.sparse_writer import SparseWriter, TypedChange
from modelexpress_rl.canonical.tensor_file import WORD_BYTES, make_header
from modelexpress_rl.errors import DigestMismatch, ObjectError, PeerError, UsageError
from tests.canonical.weights import every_broken, in_memory, stepped

CHUNK_BYTES = 4096
FILE = shard_name(0, 1)


def version(
    changes: Sequence[TypedChange], number: int = 1, chunk_bytes: int = CHUNK_BYTES
) -> tuple[bytes, dict[str, bytes]]:
    """A version of one file: its index and that file."""
    with SparseWriter(threads=2, chunk_bytes=chunk_bytes) as writer:
        writer.add(changes)
        return finished(writer, number, number - 1)


def finished(writer: SparseWriter, number: int, base: int) -> tuple[bytes, dict[str, bytes]]:
    data = b"".join(writer.parts())
    index = Index(
        Encoding.SPARSE,
        dict.fromkeys(writer.names, FILE),
        f"v{number}",
        f"v{base}",
        prefixes={FILE: writer.prefix()} if writer.names else {},
    )
    return write_index(index), {FILE: data}


def deltas_of(index: bytes, files: dict[str, bytes]) -> dict[str, SparseTensor]:
    return read_sparse(read_index(index, "index", digest=index_digest(index)), in_memory(files))


def change(base: Bytes, new: Bytes, dtype: str = "BF16", shape: Any = None, blocks: int = 1) -> TypedChange:
    shape = (base.nbytes // WORD_BYTES[dtype],) if shape is None else shape
    return TypedChange("w", dtype, shape, base, new, blocks)


def delta(base: Bytes, new: Bytes, dtype: str = "BF16", shape: Any = None, blocks: int = 1) -> SparseTensor:
    return deltas_of(*version([change(base, new, dtype, shape, blocks)]))["w"]


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def chain(base: Bytes, shape: Any, count: int, blocks: int = 1) -> tuple[list[Bytes], list[SparseTensor]]:
    versions = [base]
    for step in range(count):
        versions.append(stepped(versions[-1], 2, 0.02, step))
    pairs = pairwise(versions)
    return versions, [delta(before, after, "BF16", shape, blocks) for before, after in pairs]


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.2, 1.0])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "I64"])
def test_every_density_of_every_type(dtype: str, share: float) -> None:
    base = noise(8 * 5000 + 8)
    new = stepped(base, WORD_BYTES[dtype], share, 1)
    out = np.empty_like(base)
    checked = advance([delta(base, new, dtype)], base, out, threads=2)
    assert np.array_equal(out, new)
    assert (checked.verified_bytes, checked.unverified_bytes) == (base.nbytes, 0)


def test_kinds_are_chosen_by_size() -> None:
    base = noise(8 * CHUNK_BYTES)
    new = base.copy()
    words = new.view(np.uint16)
    half = CHUNK_BYTES // 2
    words[half + 5] ^= 1  # the second chunk: one word
    words[2 * half : 3 * half] ^= 3  # the third: all, but alike
    new[3 * CHUNK_BYTES : 4 * CHUNK_BYTES] = noise(CHUNK_BYTES, 9)  # the fourth: all, and noise
    made = delta(base, new)
    assert [Kind(kind) for kind in made.entry.records["kind"][:5]] == [
        Kind.UNCHANGED, Kind.SPARSE, Kind.DENSE, Kind.PLAIN, Kind.UNCHANGED,
    ]  # fmt: skip
    sizes = made.entry.records["size"]
    assert (sizes[0], sizes[3]) == (0, CHUNK_BYTES)
    assert sizes[1] < 30
    assert sizes[2] < 30


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_comes_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["BF16", "F32", "U8", "F64"]))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    blocks = data.draw(st.integers(1, 4))
    size = math.prod(shape) * WORD_BYTES[dtype]
    base = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    new = base.copy()
    for at in data.draw(st.lists(st.integers(0, max(0, size - 1)), max_size=30 if size else 0)):
        new[at] ^= data.draw(st.integers(0, 255))
    index, files = version([change(base, new, dtype, shape, blocks)], chunk_bytes=64)
    found = deltas_of(index, files)
    assert ("w" in found) == (not np.array_equal(base, new))
    if found:
        out = base.copy()
        advance([found["w"]], out, out, threads=1)
        assert np.array_equal(out, new)


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_chain_costs_one_pass_and_can_be_squashed(blocks: int) -> None:
    shape = (60, 512)
    versions, deltas = chain(noise(60 * 512 * 2), shape, 64, blocks)
    out = np.empty_like(versions[0])
    advance(deltas, versions[0], out, threads=2)
    assert np.array_equal(out, versions[-1])
    with SparseWriter(chunk_bytes=CHUNK_BYTES) as writer:
        squash(deltas, writer)
        joined = deltas_of(*finished(writer, 64, 0))["w"]
    advance([joined], versions[0], out, threads=2)
    assert np.array_equal(out, versions[-1])
    sizes = [each.entry.payload_bytes for each in (joined, *deltas)]
    assert sizes[0] < sum(sizes[1:])


def test_a_chain_with_a_chunk_that_is_set_anew() -> None:
    base = noise(3 * CHUNK_BYTES)
    first = stepped(base, 2, 0.01, 1)
    second = noise(3 * CHUNK_BYTES, 5)
    third = stepped(second, 2, 0.01, 2)
    deltas = [delta(base, first), delta(first, second), delta(second, third)]
    assert set(deltas[1].entry.records["kind"]) == {Kind.PLAIN}
    out = base.copy()
    advance(deltas, out, out)
    assert np.array_equal(out, third)
    with SparseWriter() as writer:
        squash(deltas, writer)
        joined = deltas_of(*finished(writer, 3, 0))["w"]
    out = base.copy()
    advance([joined], out, out)
    assert np.array_equal(out, third)


def test_a_chunk_that_says_unchanged_but_states_another_result() -> None:
    """It has no payload whose digest could be wrong."""
    base = noise(2 * CHUNK_BYTES)
    new = base.copy()
    new[0] ^= 1
    made = delta(base, new)
    records = made.entry.records.copy()
    records["result_digest"][1] = records["result_digest"][0]
    lying = replace(made, entry=replace(made.entry, records=records))
    with pytest.raises(DigestMismatch, match="chunk 1: the result"):
        advance([lying], base, base.copy())


def test_deltas_that_do_not_follow_each_other() -> None:
    versions, deltas = chain(noise(5 * CHUNK_BYTES), None, 3)
    out = versions[0].copy()
    with pytest.raises(DigestMismatch, match="tensor 'w': chunk 0 does not follow"):
        advance([deltas[0], deltas[2]], versions[0], out)
    with pytest.raises(DigestMismatch, match=r"chunk \d: the base: expected xxh3-128"):
        advance([deltas[1]], versions[0], out)
    other = delta(versions[1], versions[2], shape=(5 * CHUNK_BYTES // 4, 2), blocks=2)
    with pytest.raises(ObjectError, match="tensor 'w': expected"):
        advance([deltas[0], other], versions[0], out)


SLICES = [
    ((64, 96), Slice((0, 0), (64, 96)), 1),
    ((64, 96), Slice((16, 0), (16, 96)), 1),  # rows
    ((64, 96), Slice((0, 24), (64, 24)), 4),  # columns, as the blocks are
    ((64, 96), Slice((0, 30), (64, 24)), 4),  # columns, across them
    ((64, 96), Slice((5, 7), (1, 1)), 3),
    ((8, 16, 96), Slice((2, 4, 0), (3, 8, 96)), 1),  # rows of some experts
    ((8, 16, 96), Slice((0, 4, 48), (8, 4, 48)), 2),
    ((8, 16, 96), Slice((2, 0, 0), (3, 16, 96)), 1),  # whole experts: one run of rows
    ((6000,), Slice((1500,), (1500,)), 1),
    ((64, 96), Slice((5, 0), (0, 96)), 1),
]


@pytest.mark.parametrize(("shape", "part", "blocks"), SLICES)
def test_a_slice_is_advanced_from_its_own_ranges_alone(shape: Any, part: Slice, blocks: int) -> None:
    """Whatever is not in the ranges is taken away from the object first."""
    base = noise(math.prod(shape) * 2)
    versions, _ = chain(base, shape, 2)
    cut = tuple(slice(begin, begin + extent) for begin, extent in zip(part.offset, part.shape, strict=True))

    def held(data: Bytes) -> Bytes:
        return np.ascontiguousarray(data.view(np.uint16).reshape(shape)[cut]).reshape(-1).view(np.uint8)

    deltas = []
    for before, after in pairwise(versions):
        index, files = version([change(before, after, shape=shape, blocks=blocks)])
        whole = deltas_of(index, files)["w"]
        kept = np.zeros(len(files[FILE]), bool)
        kept[: read_index(index, "i").prefixes[FILE].size_bytes] = True
        for begin, end in byte_ranges(whole, part, gap_bytes=0):
            kept[begin:end] = True
        data = np.where(kept, np.frombuffer(files[FILE], np.uint8), 0).astype(np.uint8)
        deltas.append(deltas_of(index, {FILE: data.tobytes()})["w"])
    out = held(base).copy()
    checked = advance(deltas, held(base), out, part=part)
    assert np.array_equal(out, held(versions[-1]))
    assert checked.verified_bytes + checked.unverified_bytes == out.nbytes
    if part.shape in ((64, 96), (64, 24)) and part.offset[-1] != 30:
        assert checked.unverified_bytes == 0


def test_a_quarter_of_a_tensor_needs_a_quarter_of_the_bytes() -> None:
    base = noise(256 * 4096 * 2)
    new = stepped(base, 2, 0.02, 1)
    for part, blocks in ((Slice((64, 0), (64, 4096)), 1), (Slice((0, 1024), (256, 1024)), 4)):
        made = deltas_of(
            *version([change(base, new, shape=(256, 4096), blocks=blocks)], chunk_bytes=64 << 10)
        )["w"]
        all_of_it, some = (
            sum(end - begin for begin, end in byte_ranges(made, each, gap_bytes=0)) for each in (None, part)
        )
        assert 0.23 < some / all_of_it < 0.27


def test_nearby_ranges_are_one() -> None:
    base = noise(64 * CHUNK_BYTES)
    made = delta(base, stepped(base, 2, 0.02, 1), shape=(64, CHUNK_BYTES // 2), blocks=4)
    part = Slice((16, 0), (16, CHUNK_BYTES // 2))
    assert len(byte_ranges(made, Slice((0, CHUNK_BYTES // 8), (64, CHUNK_BYTES // 8)), gap_bytes=0)) == 1
    exact = byte_ranges(made, part, gap_bytes=0)
    assert len(exact) == 4
    assert len(byte_ranges(made, part)) == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_boxes_cover_a_slice_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offset = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    extent = tuple(data.draw(st.integers(0, full - at)) for full, at in zip(shape, offset, strict=True))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    cut = numbers[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
    matrix = numbers.reshape(-1, shape[-1] if len(shape) > 1 else 1)
    boxes = boxes_of(shape, Slice(offset, extent))
    got = [matrix[box.row : box.row_end, box.column : box.column_end].ravel() for box in boxes]
    assert np.array_equal(np.concatenate(got) if got else np.empty(0), cut.ravel())


def test_chunks_of_a_matrix_wider_than_a_chunk() -> None:
    grid = Grid.of((3, 10_000), 1024)
    assert (grid.rows_per_chunk, grid.down, grid.count) == (1, 3, 30)
    covered = np.zeros((3, 10_000), int)
    for number in range(grid.count):
        box = grid.box(number)
        covered[box.row : box.row_end, box.column : box.column_end] += 1
    assert np.all(covered == 1)


def test_no_byte_of_a_version_can_be_wrong_unseen() -> None:
    base = noise(600)
    new = stepped(base, 2, 0.1, 1)
    new[:64] = noise(64, 3)
    index, files = version([change(base, new)], chunk_bytes=64)

    def attempt(data: bytes) -> None:
        out = base.copy()
        advance([deltas_of(index, {FILE: data})["w"]], out, out, threads=1)
        assert np.array_equal(out, new)

    assert every_broken(files[FILE], attempt, (PeerError,)) == 2 * len(files[FILE])


def test_no_byte_of_a_directory_does_more_than_be_refused() -> None:
    """Also where whoever wrote it made the digests anew."""
    base = noise(600)
    with SparseWriter(chunk_bytes=64) as writer:
        writer.add([change(base, stepped(base, 2, 0.1, 1))])
        data = b"".join(writer.parts())
        prefix = writer.prefix().size_bytes

    def attempt(listed: bytes) -> None:
        directory.decode(listed, "d")

    begin = int.from_bytes(data[:8], "little") + 8
    every_broken(data[begin:prefix], attempt, (PeerError,))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_payload_with_the_right_digest_does_no_more_than_be_refused(data: st.DataObject) -> None:
    """A publisher that is hostile or wrong: no crash, no allocation, nothing but errors of ours."""
    words = noise(256).view(np.uint16)
    good = encode(words, stepped(words.view(np.uint8), 2, 0.05, 1).view(np.uint16))
    payload = bytearray(good.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    bad = Chunk(
        data.draw(st.sampled_from(list(Kind))),
        data.draw(st.sampled_from([good.changed, 0, 1, 129, 1 << 31])),
        data.draw(st.sampled_from([good.gap_bytes, 0, 2, 4, 255])),
        bytes(payload[: data.draw(st.integers(0, len(payload)))]),
        b"",
        b"",
    )
    with contextlib.suppress(ObjectError):
        put_onto(bad, words.copy(), "w")


def test_files_that_the_index_does_not_mean() -> None:
    base = noise(600)
    index, files = version([change(base, base + 1)])
    with pytest.raises(DigestMismatch, match=r"model-00000-of-00001.safetensors: expected sha256"):
        deltas_of(index, {FILE: files[FILE][:100] + b"x" + files[FILE][101:]})
    with pytest.raises(ObjectError, match="model-00000"):
        deltas_of(index, {FILE: files[FILE] + b"more"})
    parsed = read_index(index, "i")
    both = Index(Encoding.SPARSE, {"w": FILE, "x": FILE}, "v1", "v0", prefixes=parsed.prefixes)
    with pytest.raises(ObjectError, match="tensor 'x' is by the index in this file, which lacks it"):
        read_sparse(both, in_memory(files))
    with pytest.raises(ObjectError, match="expected encoding sparse, got full"):
        read_sparse(Index(Encoding.FULL, {}), in_memory(files))


def test_a_file_without_a_directory() -> None:
    data = make_header([("w", "U8", (2,), 2)], {}) + b"ab"
    prefix = Prefix(len(data), hashlib.sha256(data).hexdigest())
    with pytest.raises(ObjectError, match="expected a directory"):
        read_sparse(
            Index(Encoding.SPARSE, {"w": FILE}, "v1", "v0", prefixes={FILE: prefix}), in_memory({FILE: data})
        )


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    for stated in (True, False):
        stream = zstandard.ZstdCompressor(level=1, write_content_size=stated).compressobj(
            size=200 << 20 if stated else -1
        )
        bomb = b"".join(stream.compress(bytes(1 << 20)) for _ in range(200)) + stream.flush()
        packed = (planes.ZSTD << 30 | len(bomb)).to_bytes(4, "little") + bomb
        with pytest.raises(ObjectError, match=r"w: plane 0: expected (100 bytes|a frame of 100 bytes)"):
            planes.unpack(memoryview(packed), [100], "w")


def test_misuse_is_named() -> None:
    base = noise(64)
    with SparseWriter() as writer:
        with pytest.raises(UsageError, match="tensor 'w': BF16 of shape"):
            writer.add([change(base, base, shape=(5,))])
        with pytest.raises(UsageError, match="the base has 64 bytes, the new one 60"):
            writer.add([change(base, base[:60])])
        with pytest.raises(UsageError, match="the name is reserved"):
            writer.add([TypedChange(directory.NAME, "U8", (64,), base, base + 1)])
        with pytest.raises(ObjectError, match="dtype 'Q4' is none of"):
            writer.add([TypedChange("w", "Q4", (64,), base, base)])
        assert writer.names == []
    made = delta(base, base + 1)
    with pytest.raises(UsageError, match="the slice has 32 bytes, the memory 64"):
        advance([made], base, base.copy(), part=Slice((0,), (16,)))


def test_unaligned_memory_and_read_only_bases() -> None:
    """As a checkpoint that is mapped from a file may be."""
    base = np.frombuffer(b"x" + noise(600).tobytes(), np.uint8)[1:]
    new = stepped(base.copy(), 2, 0.05, 1)
    memory = np.empty(601, np.uint8)[1:]
    advance([delta(base, new)], base, memory)
    assert np.array_equal(memory, new)


def test_a_source_that_gives_less_than_it_has() -> None:
    base = noise(600)
    index, files = version([change(base, base + 1)])

    class Short(BytesObject):
        def read(self, begin: int, end: int) -> bytes:
            return super().read(begin, end)[: None if begin == 0 else -1]

    made = read_sparse(read_index(index, "i"), lambda name: Short(name, files[name]))["w"]
    with pytest.raises(ObjectError, match="chunks of tensor 'w': expected"):
        advance([made], base, base.copy())
