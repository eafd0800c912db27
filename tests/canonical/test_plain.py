"""0.7.0's format: what it wrote is read, what we write is read back, and no byte can be wrong unseen."""

from __future__ import annotations

import json
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard

from modelexpress_rl.canonical.index import Encoding, Index, check_is, read_index, shard_name, write_index
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.objects import BytesObject, FileObject
from modelexpress_rl.canonical.plain_files import (
    Change,
    Open,
    add_full,
    add_xor_deltas,
    copy_full,
    full_batches,
    published,
    read_full,
    read_xor,
    tied_names,
)
from modelexpress_rl.canonical.shard_writer import ShardWriter
from modelexpress_rl.canonical.tensor_file import make_header, read_header
from modelexpress_rl.canonical.xor import BLOCK_BYTES, Frame, replay
from modelexpress_rl.errors import DigestMismatch, ModelExpressError, ObjectError, PeerError, UsageError
from tests.canonical.weights import GOLDEN, checkpoint, every_broken, golden, in_memory, stepped, xor_version

Q, HEAD, BIAS = (
    "model.layers.0.self_attn.q_proj.weight",
    "lm_head.weight",
    "model.layers.0.mlp.gate.e_score_correction_bias",
)


def after(index: bytes, open_file: Open, base: dict[str, Bytes]) -> dict[str, Bytes]:
    """The weights that an XOR delta makes of others."""
    new = {name: data.copy() for name, data in base.items()}
    for name, frame in read_xor(read_index(index, "index"), open_file).items():
        replay(name, base[name], [frame], new[name])
    return new


def full(index: bytes, open_file: Open) -> dict[str, Bytes]:
    """The weights of a full checkpoint."""
    tensors = {}
    for name, tensor in read_full(read_index(index, "index"), open_file).items():
        tensors[name] = np.empty(tensor.stored.size_bytes, np.uint8)
        copy_full(name, tensor, tensors[name])
    return tensors


def same(left: dict[str, Bytes], right: dict[str, Bytes]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def v1() -> dict[str, Bytes]:
    return after(*golden("v1"), checkpoint(GOLDEN / "seed"))


def test_delta_of_0_7_is_read() -> None:
    seed, new = checkpoint(GOLDEN / "seed"), v1()
    assert sorted(name for name in seed if not np.array_equal(seed[name], new[name])) == sorted(
        [Q, HEAD, BIAS]
    )
    assert 9.0 in new[BIAS].view(np.float32)
    difference = new[Q].view(np.int16) - seed[Q].view(np.int16)
    assert (np.count_nonzero(difference), difference.max()) == (1, 1)


def test_full_checkpoint_of_0_7_is_read() -> None:
    expected = v1()
    expected["model.norm.weight"] = expected["model.norm.weight"].copy()
    expected["model.norm.weight"].view(np.uint16)[1] = 0x4040  # bfloat16 3
    assert same(full(*golden("v2")), expected)


def test_delta_of_ours_equals_that_of_0_7() -> None:
    """The same index, and the same files but for the frames."""
    seed, new = checkpoint(GOLDEN / "seed"), v1()
    ranks = [[Change(n, seed[n], new[n]) for n in seed if (n == Q) == rank] for rank in (False, True)]
    index, files = xor_version("v1", "v0", ranks)
    theirs, opened = golden("v1")
    assert index == theirs
    for name, data in files.items():
        ours, peers = read_header(BytesObject(name, data)), read_header(opened(name))
        assert ours.metadata == peers.metadata
        assert list(ours.tensors) == list(peers.tensors)
    assert same(after(index, in_memory(files), seed), new)


def test_full_checkpoint_of_ours_equals_that_of_0_7() -> None:
    index, opened = golden("v2")
    weights = full(index, opened)
    stored = {name: tensor.stored for name, tensor in read_full(read_index(index, "i"), opened).items()}
    files: dict[str, bytes] = {}
    theirs = json.loads(index)["weight_map"]
    for number in (1, 2):
        name = shard_name(number, 2)
        with ShardWriter() as writer:
            for tensor in (each for each, file in theirs.items() if file == name):
                add_full(writer, tensor, stored[tensor].dtype, stored[tensor].shape, weights[tensor])
            files[name] = b"".join(writer.parts())
        ours, peers = read_header(BytesObject(name, files[name])), read_header(opened(name))
        assert (ours.metadata, ours.tensors) == (peers.metadata, peers.tensors)
    size = sum(data.nbytes for data in weights.values())
    assert write_index(Index(Encoding.FULL, theirs, total_size_bytes=size)) == index
    assert same(full(index, in_memory(files)), weights)


def test_no_byte_of_a_version_can_be_wrong_unseen() -> None:
    """What is damaged is refused with an error of ours, or gives the right bytes all the same."""
    seed, right = checkpoint(GOLDEN / "seed"), v1()
    index, opened = golden("v1")
    name = shard_name(0, 2)
    other = shard_name(1, 2)
    theirs = {each: opened(each).read(0, opened(each).size_bytes) for each in (name, other)}

    def attempt(data: bytes) -> None:
        assert same(after(index, in_memory({**theirs, name: data}), seed), right)

    assert every_broken(theirs[name], attempt, (PeerError,)) > 1.9 * len(theirs[name])


def test_an_index_that_is_damaged_is_refused_or_read() -> None:
    index, opened = golden("v1")

    def attempt(data: bytes) -> None:
        read = read_index(data, "index")
        check_is(read, "v1", "v0", "index")
        read_xor(read, lambda name: opened(name) if name in read_index(index, "i").files else missing(name))

    def missing(name: str) -> BytesObject:
        raise ObjectError(f"{name}: missing")

    assert every_broken(index, attempt, (PeerError,)) > 1.95 * len(index)


@pytest.mark.parametrize("count", [1, 2, 64])
def test_deltas_that_follow_each_other_cost_one_pass(count: int) -> None:
    base = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES + 6, np.uint8)
    versions, frames = [base], []
    for step in range(count):
        versions.append(stepped(versions[-1], 2, 0.001, step))
        index, files = xor_version(f"v{step + 1}", f"v{step}", [[Change("w", versions[-2], versions[-1])]])
        frames.append(read_xor(read_index(index, "i"), in_memory(files))["w"])
    out = np.empty_like(base)
    replay("w", base, frames, out)
    assert np.array_equal(out, versions[-1])


def test_another_base_is_noticed() -> None:
    base = np.zeros(100, np.uint8)
    index, files = xor_version("v1", "v0", [[Change("w", base, base + 1)]])
    frame = read_xor(read_index(index, "i"), in_memory(files))["w"]
    with pytest.raises(DigestMismatch, match=r"tensor 'w' after model-00000-of-00001.*expected adler32"):
        replay("w", base + 7, [frame], base.copy())


def frame_of(data: bytes, result: bytes) -> Frame:
    return Frame(BytesObject("f", data), 0, len(data), f"{zlib.adler32(result):08x}")


@pytest.mark.parametrize("stated", [True, False])
def test_a_frame_of_another_size_is_refused_before_it_is_unpacked(stated: bool) -> None:
    """A few KiB that unpack to 300 MB take no such memory, whether or not the frame says how long it is."""
    stream = zstandard.ZstdCompressor(level=1, write_content_size=stated).compressobj(
        size=300 << 20 if stated else -1
    )
    bomb = b"".join(stream.compress(bytes(1 << 20)) for _ in range(300)) + stream.flush()
    out = np.empty(1000, np.uint8)
    with pytest.raises(ObjectError, match=r"expected a frame of 1000 bytes, it (states|has more)"):
        replay("w", np.zeros(1000, np.uint8), [frame_of(bomb, bytes(1000))], out)
    short = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10))
    with pytest.raises(ObjectError, match="expected a frame of 1000 bytes, it ends after 10"):
        replay("w", np.zeros(1000, np.uint8), [frame_of(short, bytes(1000))], out)


@pytest.mark.parametrize("behind", [b"x", bytes(300_000), zstandard.compress(b"more")])
def test_what_follows_a_frame_is_refused(behind: bytes) -> None:
    data = zstandard.compress(bytes(1000)) + behind
    with pytest.raises(ObjectError, match="tensor 'w'"):
        replay("w", np.zeros(1000, np.uint8), [frame_of(data, bytes(1000))], np.empty(1000, np.uint8))


def test_a_rank_without_changes_has_no_file_and_a_version_may_have_none() -> None:
    base = np.zeros(100, np.uint8)
    index, files = xor_version("v1", "v0", [[], [Change("w", base, base.copy())]])
    assert files == {}
    assert read_xor(read_index(index, "i"), in_memory({})) == {}


def test_an_empty_tensor_and_one_of_no_dimension() -> None:
    with ShardWriter() as writer:
        add_full(writer, "none", "F32", (0, 4), np.empty(0, np.uint8))
        add_full(writer, "one", "F32", (), np.ones(4, np.uint8))
        data = b"".join(writer.parts())
    index = write_index(
        Index(Encoding.FULL, {"none": "a.safetensors", "one": "a.safetensors"}, total_size_bytes=4)
    )
    assert same(
        full(index, in_memory({"a.safetensors": data})),
        {"none": np.empty(0, np.uint8), "one": np.ones(4, np.uint8)},
    )


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "a/b.safetensors", "/x.safetensors", "..", "", "x.bin", "a\\b.safetensors",
     "a\0.safetensors", 7, None, "a\n.safetensors", ".safetensors/.."],
)  # fmt: skip
def test_only_plain_names_of_files(name: object) -> None:
    document = json.loads(golden("v1")[0])
    document["weight_map"][Q] = name
    with pytest.raises(ObjectError, match=r"q_proj.weight' is in .* no plain file name"):
        read_index(json.dumps(document).encode(), "s3://b/v1/index")


@pytest.mark.parametrize(
    ("key", "value"),
    [("delta_encoding", "add"), ("compression_format", "lz4"), ("checksum_format", "crc32"),
     ("version", ""), ("base_version", None), ("delta_encoding", "full"), ("version", 7)],
)  # fmt: skip
def test_what_an_index_says_of_itself(key: str, value: object) -> None:
    document = json.loads(golden("v1")[0])
    document["metadata"][key] = value
    with pytest.raises(ObjectError, match=f"s3://b/index: (a delta's )?{key} must be"):
        read_index(json.dumps(document).encode(), "s3://b/index")


def test_a_version_is_the_one_that_the_control_plane_names() -> None:
    index = read_index(golden("v1")[0], "i")
    check_is(index, "v1", "v0", "i")
    for version, base in (("v1", "v9"), ("v2", "v0"), ("v1", None)):
        with pytest.raises(ObjectError, match=r"expected version .* got 'v1' on 'v0'"):
            check_is(index, version, base, "i")
    checkpoint_index = read_index(golden("v2")[0], "i")
    check_is(checkpoint_index, "v2", None, "i")
    with pytest.raises(ObjectError, match="got a full checkpoint"):
        check_is(checkpoint_index, "v2", "v1", "i")


def test_an_index_that_is_not_the_announced_one() -> None:
    with pytest.raises(ObjectError, match="expected an index of sha256 00"):
        read_index(golden("v1")[0], "i", digest="00")


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[]", "must be a JSON object"),
        (b'{"a":{},"a":{}}', "key 'a' twice"),
        (b'{"a":' * 100_000, "no JSON"),
        (b"{" + b"9" * 5000, "no JSON"),
        (b'{"__metadata__":{"a":1}}', "__metadata__ must map strings"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}', "expected dtype, shape"),
        (b'{"a":{"dtype":"X8","shape":[4],"data_offsets":[0,4]}}', "dtype 'X8' is none of"),
        (b'{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}', "shape must be"),
        (b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "shape must be"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}', "has 4 bytes, but its data has 5"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', "begins at"),
        (b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', "its tensors end at"),
        (b"{}", "its tensors end at"),
    ],
)
def test_headers_are_not_believed(header: bytes, said: str) -> None:
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    with pytest.raises(ObjectError, match=said):
        read_header(BytesObject("f", data))


@pytest.mark.parametrize("length", [0xFFFF_FFFF_FFFF_FFFF, 100_000_001, 5])
def test_a_header_that_is_longer_than_its_file(length: int) -> None:
    with pytest.raises(ObjectError, match="f: "):
        read_header(BytesObject("f", length.to_bytes(8, "little") + b"{}"))


def test_metadata_of_other_writers_is_no_reason_to_refuse() -> None:
    header = make_header([("a", "U8", (2,), 2)], {"format": "pt"})
    assert read_header(BytesObject("f", header + b"ab")).metadata == {"format": "pt"}


def test_a_file_with_other_tensors_than_the_index_says() -> None:
    index, opened = golden("v1")
    document = json.loads(index)
    del document["weight_map"][HEAD]
    with pytest.raises(ObjectError, match=r"tensor 'lm_head.weight' is by the index not in this file"):
        read_xor(read_index(json.dumps(document).encode(), "i"), opened)
    document["weight_map"] |= {HEAD: shard_name(0, 2), "more": shard_name(0, 2)}
    with pytest.raises(ObjectError, match="tensor 'more' is by the index in this file, which lacks it"):
        read_xor(read_index(json.dumps(document).encode(), "i"), opened)


def test_a_delta_is_no_checkpoint_and_the_other_way_round() -> None:
    with pytest.raises(ObjectError, match="expected encoding xor, got full"):
        read_xor(read_index(golden("v2")[0], "i"), golden("v2")[1])
    with pytest.raises(ObjectError, match="expected encoding full, got xor"):
        read_full(read_index(golden("v1")[0], "i"), golden("v1")[1])


def test_misuse_is_named() -> None:
    base = np.zeros(4, np.uint8)
    with ShardWriter() as writer:
        with pytest.raises(UsageError, match="tensor 'w': the base has 4 bytes, the new one 3"):
            add_xor_deltas(writer, [Change("w", base, base[:3])])
        add_xor_deltas(writer, [Change("w", base, base + 1)])
        with pytest.raises(UsageError, match="tensor 'w' is given twice"):
            add_xor_deltas(writer, [Change("w", base, base + 1)])
    with pytest.raises(UsageError, match="no delta"):
        replay("w", base, [], base)


def test_batches_of_a_full_checkpoint() -> None:
    sizes = {"a": 3, "b": 2, "c": 9, "d": 1, "e": 4}
    assert full_batches(sizes, 5) == [["a", "b"], ["c"], ["d", "e"]]
    assert full_batches({}, 5) == []


def test_a_tensor_of_two_ranks_is_an_error() -> None:
    assert published([["a"], [], ["b"]]) == {"a": 0, "b": 2}
    with pytest.raises(ModelExpressError, match="tensor 'a' comes from rank 0 and from rank 2"):
        published([["a"], [], ["a"]])


def test_tied_heads() -> None:
    assert tied_names(b'{"tie_word_embeddings": true}', "config.json") == {HEAD}
    assert tied_names((GOLDEN / "seed" / "config.json").read_bytes(), "config.json") == frozenset()


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(make_header([("a", "U8", (2,), 2)], {}) + b"ab")
    with FileObject(path) as source:
        path.write_bytes(b"")
        with pytest.raises(ObjectError, match="expected 8 bytes from 0, got 0"):
            read_header(source)


def test_large_frames_leave_memory_for_the_disk(tmp_path: Path) -> None:
    """Bytes that do not compress, in tensors of several parts, come back in their order."""
    noise = np.random.default_rng(0)
    base = {name: noise.integers(0, 256, size, np.uint8) for name, size in {"a": 9_000_000, "b": 5}.items()}
    new = {name: noise.integers(0, 256, data.size, np.uint8) for name, data in base.items()}
    with ShardWriter(tmp_path) as writer:
        add_xor_deltas(writer, map(partial(change, base, new), base), threads=2, spool_dir=tmp_path)
        files = {"x.safetensors": b"".join(writer.parts())}
    index = write_index(Index(Encoding.XOR, dict.fromkeys(base, "x.safetensors"), "v1", "v0"))
    assert same(after(index, in_memory(files), base), new)
    assert list(tmp_path.iterdir()) == []


def change(base: dict[str, Bytes], new: dict[str, Bytes], name: str) -> Change:
    return Change(name, base[name], new[name])
