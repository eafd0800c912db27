"""Digests find any flipped byte in what they cover, name it, and cover what meshes usually cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import DigestMismatch, GeometryError, ManifestError, UsageError
from modelexpress_rl.reshard import digests as digests_module
from modelexpress_rl.reshard.digests import (
    DigestTable,
    GridRule,
    decode_digests,
    digest_table,
    encode_digests,
    tile_parts,
)
from modelexpress_rl.reshard.geometry import Shard, ShardTable, Source
from modelexpress_rl.reshard.memory import as_bytes, bytes_at
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.verify import Verified, Verifier, refuse_disagreeing_replicas
from tests.reshard.reference import World, address, many, publish, pull, worlds

FINE = GridRule(min_tile_bytes=64, fine_tile_bytes=64)
SHA = "ab" * 32


def memory_of(world: World, number: int) -> Callable[[int], np.ndarray]:
    table, buffer = world.manifests[number].manifest.table, world.buffers[number]

    def memory(row: int) -> np.ndarray:
        at = int(table.addr[row]) - address(buffer)
        return buffer[at : at + int(table.size_bytes[row])]

    return memory


def published_digests(world: World, rule: GridRule = FINE) -> dict[Source, DigestTable]:
    return {
        m.source: digest_table(m.manifest.table, memory_of(world, i), rule=rule)
        for i, m in enumerate(world.manifests)
    }


def one_tensor(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> World:
    elsize = {"torch.bfloat16": 2, "torch.float32": 4, "torch.uint8": 1}[dtype]
    data = np.random.default_rng(1).integers(0, 256, (*shape, elsize), np.uint8)
    return publish({"t": (dtype, data)}, [[("t", offset, size)] for offset, size in boxes])


def pulled(world: World, needs: NeedTable) -> tuple[Verifier, np.ndarray]:
    merged = world.merged()
    made = plan(needs, merged)
    arena = np.zeros(needs.arena_bytes, np.uint8)
    pull(made, arena)
    return Verifier.of(made, needs, merged, published_digests(world)), arena


@many
@given(worlds())
def test_what_was_read_right_is_verified_in_any_geometry(drawn: tuple[World, list[Need]]) -> None:
    world, needs = drawn
    verifier, arena = pulled(world, NeedTable.build(needs))
    covered = verifier.verify(arena)
    assert covered == verifier.coverage
    assert covered.verified_bytes + covered.unverified_bytes == verifier.plan.total_bytes
    by_piece = Verified(0, 0)
    for piece in range(len(verifier.plan.pieces)):
        by_piece += verifier.verify(arena, np.array([piece]))
    assert by_piece == covered


SHAPES = [
    ((4096,), [((0,), (4096,))], ((0,), (4096,))),
    ((4096,), [((0,), (2048,)), ((2048,), (2048,))], ((1024,), (2048,))),
    ((64, 96), [((0, 0), (64, 96))], ((0, 0), (64, 96))),  # whole: bands
    ((64, 96), [((0, 0), (64, 96))], ((16, 0), (16, 96))),  # rows: some bands
    ((64, 96), [((0, 0), (64, 96))], ((0, 24), (64, 24))),  # columns: tiles, strided in the shard
    ((64, 96), [((0, 0), (64, 48)), ((0, 48), (64, 48))], ((0, 0), (64, 96))),  # strided in the arena
    ((8, 32, 64), [((0, 0, 0), (8, 32, 64))], ((0, 8, 0), (8, 8, 64))),  # a middle axis
    ((8, 32, 64), [((0, 0, 0), (4, 32, 64)), ((4, 0, 0), (4, 32, 64))], ((0, 0, 32), (8, 32, 32))),
]


@pytest.mark.parametrize(("shape", "boxes", "need"), SHAPES)
@pytest.mark.parametrize("block_bytes", [100, 512 << 10])
def test_every_flipped_byte_is_found_and_named(
    shape: tuple[int, ...], boxes: list, need: tuple, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests_module, "BLOCK_BYTES", block_bytes)
    world = one_tensor(shape, *boxes, dtype="torch.bfloat16")
    needs = NeedTable.build([Need("t", "torch.bfloat16", *need)], owner="rank 2")
    verifier, arena = pulled(world, needs)
    assert verifier.verify(arena) == Verified(int(needs.size_bytes[0]), 0)
    places = range(len(arena)) if len(arena) < 3000 else np.random.default_rng(3).integers(0, len(arena), 300)
    for at in places:
        arena[at] ^= 0x10
        with pytest.raises(DigestMismatch, match=r"tensor 't': offset .* read by rank 2 .* worker 'w[01]'"):
            verifier.verify(arena)
        arena[at] ^= 0x10


def test_the_box_named_holds_the_wrong_byte() -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.uint8")
    verifier, arena = pulled(world, NeedTable.build([Need("t", "torch.uint8", (0, 0), (64, 96))]))
    arena[17 * 96] ^= 1
    with pytest.raises(DigestMismatch, match=re.escape("offset (16, 0) shape (8, 96)")):
        verifier.verify(arena)


@many
@given(worlds(conflicting=False), st.data())
def test_a_flip_in_a_wholly_verified_piece_is_found(
    drawn: tuple[World, list[Need]], data: st.DataObject
) -> None:
    world, needs = drawn
    verifier, arena = pulled(world, NeedTable.build(needs))
    p = verifier.plan.pieces
    whole = np.flatnonzero((verifier.grid.verified_bytes == p.size_bytes) & (p.size_bytes > 0))
    if not len(whole):
        return
    runs = verifier.plan.runs(np.array([data.draw(st.sampled_from(whole.tolist()))]))
    run = data.draw(st.integers(0, len(runs) - 1))
    at = int(runs.local_offset[run]) + data.draw(st.integers(0, int(runs.size_bytes[run]) - 1))
    arena[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DigestMismatch):
        verifier.verify(arena)


def test_a_tile_that_a_need_cuts_is_counted_as_unverified() -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.uint8")
    verifier, arena = pulled(world, NeedTable.build([Need("t", "torch.uint8", (4, 0), (56, 96))]))
    assert verifier.verify(arena) == Verified(48 * 96, 8 * 96)
    arena[0] ^= 1  # in rows 4 to 7, of the tile of rows 0 to 7
    verifier.verify(arena)


def test_a_source_without_digests_is_unverified() -> None:
    world = one_tensor((64,), ((0,), (64,)), dtype="torch.uint8")
    merged = world.merged()
    needs = NeedTable.build([Need("t", "torch.uint8", (0,), (64,))])
    verifier = Verifier.of(plan(needs, merged), needs, merged, {})
    assert verifier.verify(np.zeros(64, np.uint8)) == Verified(0, 64)
    with pytest.raises(UsageError, match="expected 64 flat bytes"):
        verifier.verify(np.zeros(63, np.uint8))


def test_a_verifier_is_renewed_for_the_next_version() -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.bfloat16")
    needs = NeedTable.build([Need("t", "torch.bfloat16", (0, 0), (64, 48))])
    verifier, arena = pulled(world, needs)
    world.buffers[0][:] ^= 0xFF
    after = verifier.renewed(published_digests(world))
    with pytest.raises(DigestMismatch):
        after.verify(arena)
    pull(verifier.plan, arena)
    assert after.verify(arena).unverified_bytes == 0
    with pytest.raises(UsageError, match="not of the structure"):
        verifier.renewed(published_digests(world, GridRule()))


def test_replicas_that_differ_are_refused_before_anything_is_read() -> None:
    world = one_tensor((64, 96), *[((0, 0), (64, 96))] * 3, dtype="torch.bfloat16")
    digests = published_digests(world)
    refuse_disagreeing_replicas(world.merged(), digests)
    world.buffers[2][5000] ^= 1
    changed = published_digests(world)
    with pytest.raises(GeometryError, match=r"tensor 't': replicas of .* differ, worker 'w1'.* worker 'w2'"):
        refuse_disagreeing_replicas(world.merged(), changed)
    silent = {source: table for source, table in changed.items() if source.worker_id != "w2"}
    refuse_disagreeing_replicas(world.merged(), silent)
    otherwise = published_digests(world, GridRule())[world.manifests[2].source]
    refuse_disagreeing_replicas(world.merged(), {**silent, world.manifests[2].source: otherwise})


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
    table = published_digests(world)[world.manifests[0].source]
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
