"""Digests come out as described, survive the wire, and are refused where they were damaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import ManifestError, StateError, UsageError
from modelexpress_rl.reshard import grid as grids
from modelexpress_rl.reshard.digests import (
    DigestTable,
    GridRule,
    decode_digests,
    digest_table,
    encode_digests,
    tile_parts,
)
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.grid import BANDS, GRID, GROUPS, LEVELS, TILES, Selection, digest_grid
from modelexpress_rl.reshard.hashing import (
    ShardDigests,
    ShardHasher,
    decode_answer,
    encode_answer,
    is_answer,
)
from modelexpress_rl.reshard.memory import as_bytes, bytes_at
from tests.examples import many
from tests.reshard.digested import FINE, digest_tables, memory_of, one_tensor

SHA = "ab" * 32


def test_memory_is_viewed_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    view = as_bytes(tensor)
    assert bytes_at(tensor.data_ptr(), 12).tobytes() == view.tobytes()
    view[:] = 0
    assert not tensor.any()
    assert as_bytes(torch.tensor(1.0)).shape == (4,)
    assert as_bytes(np.zeros((2, 2), np.float32)).shape == (16,)
    for wrong in (tensor.t(), np.zeros((4, 4))[:, 1:], torch.empty(2, device="meta")):
        with pytest.raises(UsageError, match="weight: expected"):
            as_bytes(wrong, name="weight")


@pytest.mark.parametrize(
    ("shape", "elsize", "parts"),
    [
        ((768, 2048), 2, [8, 8]),  # 3 MiB: 48 KiB tiles
        ((2048, 7168), 2, [16, 16]),
        ((4096, 2048), 2, [16, 16]),
        ((2048,), 2, [8]),
        ((100,), 2, [1]),
        ((6, 4096), 1, [2, 8]),
        ((0, 4096), 2, [1, 1]),
    ],
)
def test_the_grid(shape: tuple[int, ...], elsize: int, parts: list[int]) -> None:
    assert tile_parts(np.array([shape]), np.array([elsize])).tolist() == [parts]


def test_digests_are_xxh3_of_bands_and_then_of_tiles() -> None:
    world = one_tensor((16, 64), ((0, 0), (16, 64)), dtype="torch.uint8")
    table = digest_tables(world)[world.manifests[0].source]
    data = world.tensors["t"][1][..., 0]
    bands = [data[i : i + 2] for i in range(0, 16, 2)]
    tiles = [band[:, j : j + 32] for band in bands for j in (0, 32)]
    assert table.parts.tolist() == [[8, 2]]
    expected = [xxhash.xxh3_128_digest(tile.tobytes()) for tile in [*bands, *tiles]]
    assert table.digests.tobytes() == b"".join(expected)


def test_threads_change_nothing_and_wrong_memory_is_named() -> None:
    world = one_tensor((64, 96), ((0, 0), (32, 96)), ((32, 0), (32, 96)), dtype="torch.uint8")
    manifest, memory = world.manifests[0].manifest, memory_of(world, 0)
    a, b = (digest_table(manifest.table, memory, threads=n) for n in (1, 2))
    assert a.digests.tobytes() == b.digests.tobytes()
    with pytest.raises(UsageError, match=r"tensor 't': expected 3072 flat bytes, got uint8 \(3071,\)"):
        digest_table(manifest.table, lambda row: memory(row)[1:])


def shard_table() -> tuple[ShardTable, DigestTable]:
    shards = [
        Shard("t", "torch.uint8", (64, 64), (0, 0), (32, 64), 4096),
        Shard("u", "torch.uint8", (), (), (), 8),
    ]
    table = ShardTable.build(shards)
    return table, digest_table(table, lambda row: np.ones(int(table.size_bytes[row]), np.uint8))


def test_encoded_digests_come_back() -> None:
    table, made = shard_table()
    again = decode_digests(encode_digests(made, SHA), table, SHA)
    assert again.digests.tobytes() == made.digests.tobytes()
    assert (again.rule, again.start.tolist()) == (made.rule, made.start.tolist())


def test_digests_of_another_manifest_are_refused() -> None:
    table, made = shard_table()
    data = encode_digests(made, SHA)
    with pytest.raises(ManifestError, match="made for manifest abab"):
        decode_digests(data, table, "cd" * 32)
    with pytest.raises(ManifestError, match="the manifest has 0 shards"):
        decode_digests(data, ShardTable.build([]), SHA)
    huge = encode_digests(replace(made, rule=GridRule(min_tile_bytes=64)), SHA)
    with pytest.raises(ManifestError, match="digests: 5 for 2 shards, the manifest has 2 shards of"):
        decode_digests(huge, table, SHA)


@many
@given(st.integers(0, 150), st.binary(max_size=4), st.integers(0, 8))
def test_damaged_digests_are_refused(at: int, inserted: bytes, removed: int) -> None:
    table, made = shard_table()
    data = encode_digests(made, SHA)
    damaged = data[:at] + inserted + data[at + removed :]
    if damaged == data:
        return
    with pytest.raises(ManifestError):
        decode_digests(damaged, table, SHA)


def hasher_of(
    *arrays: np.ndarray, fixed: bool = True, rule: GridRule = FINE
) -> tuple[ShardHasher, ShardTable]:
    shards = [
        Shard(f"t{i}", "torch.uint8", array.shape, (0,) * array.ndim, array.shape, 4096)
        for i, array in enumerate(arrays)
    ]
    table = ShardTable.build(shards)
    return ShardHasher(table, lambda row: arrays[row].reshape(-1), fixed=fixed, rule=rule), table


def hashed(hasher: ShardHasher) -> ShardDigests:
    made = ShardDigests(hasher)
    for unit in range(len(hasher.units)):
        hasher.hash_slabs(unit, made, lambda: False)
    return made


def everything(hasher: ShardHasher) -> Selection:
    return Selection(0, np.ones(hasher.grid.count.shape, np.bool_))


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("whole_bytes", [0, 256 << 10])
def test_levels_are_xxh3_of_their_parts(
    fixed: bool, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "WHOLE_BYTES", whole_bytes)
    data = np.random.default_rng(2).integers(0, 256, (4, 8, 64), np.uint8)
    hasher, _ = hasher_of(data, fixed=fixed, rule=GridRule(64, 4, 64, 4))
    slabs, bands, tiles = [4, 1, 1], [4, 4, 1], [4, 4, 2]
    if whole_bytes:
        slabs, bands, tiles = [1, 1, 1], [4, 8, 1], [4, 8, 4]
    assert hasher.grid.parts[:, 0].tolist() == [slabs, bands, tiles]
    made = hashed(hasher)
    for level in (BANDS, TILES):
        hasher.hash_parts(level, [0], made, lambda: False)
    for level, parts in enumerate((slabs, bands, tiles)):
        cut = data.reshape(
            parts[0], 4 // parts[0], parts[1], 8 // parts[1], parts[2], 64 // parts[2]
        ).transpose(0, 2, 4, 1, 3, 5)
        expected = [xxhash.xxh3_128_digest(cut[at].tobytes()) for at in np.ndindex(*parts)]
        assert made.get(level, 0).tobytes() == b"".join(expected)


def test_levels_that_repeat_a_coarser_one_are_absent() -> None:
    arrays = [
        np.zeros(shape, np.uint8) for shape in [(0, 8), (7,), (1 << 20,), (1024, 1024), (64, 96), (1, 640)]
    ]
    hasher, _ = hasher_of(*arrays, rule=GridRule())
    assert hasher.grid.count.T.tolist() == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [16, 0, 0, 0],
        [8, 0, 64, 0],
        [1, 8, 64, 0],
        [1, 0, 8, 1],
    ]


def test_bytes_that_changed_after_the_capture_are_refused() -> None:
    data = np.random.default_rng(2).integers(0, 256, (64, 96), np.uint8)
    other = data.copy()
    hasher, _ = hasher_of(other, data)
    made = hashed(hasher)
    data[63, 95] ^= 1
    hasher.hash_parts(TILES, [0], made, lambda: False)
    with pytest.raises(StateError, match=r"tensor 't1', offset \(0, 0\) .* changed after they were captured"):
        hasher.hash_parts(TILES, [1], made, lambda: False)


def test_hashing_ends_when_it_is_told_to() -> None:
    first, _ = hasher_of(np.zeros((64, 96), np.uint8), np.zeros(7, np.uint8))
    for hasher in (first, hasher_of(np.zeros(7, np.uint8), fixed=False)[0]):
        with pytest.raises(StateError, match="ended"):
            hasher.hash_slabs(0, ShardDigests(hasher), lambda: True)
    with pytest.raises(StateError, match="ended"):
        first.hash_parts(TILES, [0], hashed(first), lambda: True)


def test_wrong_memory_is_named() -> None:
    table = ShardTable.build([Shard("t", "torch.uint8", (8,), (0,), (8,), 4096)])
    with pytest.raises(UsageError, match=r"tensor 't': expected 8 flat bytes, got uint8 \(7,\)"):
        ShardHasher(table, lambda row: np.zeros(7, np.uint8), fixed=True)


selections = st.integers(1, 40).flatmap(
    lambda rows: st.tuples(
        st.just(rows),
        st.integers(0, rows),
        st.lists(st.lists(st.booleans(), min_size=LEVELS, max_size=LEVELS), max_size=rows),
    )
)


@many
@given(selections)
def test_selections_come_back(drawn: tuple[int, int, list[list[bool]]]) -> None:
    rows, first, wanted = drawn
    wanted = wanted[: rows - first]
    selection = Selection(first, np.array(wanted, np.bool_).reshape(-1, LEVELS).T)
    again = Selection.of_bitmaps(first, len(wanted), selection.bitmaps(), rows)
    assert (again.first_row, again.wanted.tolist()) == (first, selection.wanted.tolist())
    assert again.name == selection.name


@pytest.mark.parametrize(
    ("first", "count", "bits"),
    [(-1, 2, b"\1"), (3, 2, b"\1"), (0, -1, b""), (0, 4, b"\1\1"), (1 << 60, 1 << 60, b"\1"), (0, 5, b"\1")],
)
def test_impossible_selections_are_refused(first: int, count: int, bits: bytes) -> None:
    with pytest.raises(UsageError, match="digests: "):
        Selection.of_bitmaps(first, count, [bits, b"", b"", b""], 4)


def test_an_answer_is_bound_to_what_was_asked_and_to_the_manifest() -> None:
    hasher, _ = hasher_of(np.ones((64, 96), np.uint8), np.ones((64, 96), np.uint8))
    made, ask = hashed(hasher), everything(hasher)
    ask.wanted[GROUPS] = False  # the only one is the second row's
    one = Selection(0, ask.wanted[:, :1])
    other = Selection(1, ask.wanted[:, :1])
    data = encode_answer(made.gather(one), one, SHA)
    assert is_answer(data)
    assert decode_answer(data, one, hasher.grid, SHA).tobytes() == made.gather(one).tobytes()
    with pytest.raises(ManifestError, match="not those that were asked for"):
        decode_answer(data, other, hasher.grid, SHA)
    with pytest.raises(ManifestError, match="not those that were asked for"):
        decode_answer(data, one, hasher.grid, "cd" * 32)
    with pytest.raises(ManifestError, match=r"expected .* of them"):
        decode_answer(data, ask, hasher.grid, SHA)
    for at in range(len(data)):
        with pytest.raises(ManifestError):
            decode_answer(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], one, hasher.grid, SHA)
        with pytest.raises(ManifestError):
            decode_answer(data[:at], one, hasher.grid, SHA)


def test_the_grid_has_a_number_that_goes_with_its_rule() -> None:
    """Readers and publishers cut alike where they agree on the number: change both together."""
    shards = [
        Shard(f"t{i}", "torch.bfloat16", shape, (0,) * len(shape), shape, 4096)
        for i, shape in enumerate([(152064, 2048), (128, 768, 2048), (2048,), (64, 32), (3, 1024, 1024), ()])
    ]
    parts = digest_grid(ShardTable.build(shards)).parts[:, :, :].transpose(1, 0, 2).tolist()
    assert GRID == 2
    assert parts == [
        [[1, 32, 1], [1, 32, 1], [1, 32, 32]],
        [[16, 1, 1], [16, 16, 1], [16, 16, 16]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 8]],
        [[1, 1, 1], [1, 8, 1], [1, 8, 8]],
        [[1, 1, 1], [1, 8, 1], [1, 8, 8]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    ]
