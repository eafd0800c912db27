"""A reader finds any flipped byte in what it verifies, names it, and covers what meshes usually cut."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import DigestMismatch, UsageError
from modelexpress_rl.reshard import digests as digests_module
from modelexpress_rl.reshard import grid as grids
from modelexpress_rl.reshard import verify_parts
from modelexpress_rl.reshard.digests import DEFAULT_RULE, GridRule
from modelexpress_rl.reshard.grid import BANDS, PARTS, SLABS, TILES
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.verify import Verified
from tests.examples import many
from tests.reshard.digested import FINE, answering, checker, one_tensor, pulled
from tests.reshard.reference import World, publish, pull, worlds


@pytest.fixture(params=["selected", "slabs", "whole"])
def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Selected digests, the same with small shards cut into slabs too, and whole tables."""
    if request.param == "slabs":
        monkeypatch.setattr(grids, "WHOLE_BYTES", 0)
    return bool(request.param == "whole")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("whole_bytes", [0, 256 << 10])
@many
@given(drawn=worlds())
def test_what_was_read_right_is_verified_in_any_geometry(
    drawn: tuple[World, list[Need]], whole: bool, whole_bytes: int
) -> None:
    world, needs = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "WHOLE_BYTES", whole_bytes)
        check, arena = pulled(world, NeedTable.build(needs), whole=whole)
    covered = check.verify(arena)
    assert covered == check.coverage
    assert covered.verified_bytes + covered.unverified_bytes == check.plan.total_bytes
    by_piece = Verified(0, 0)
    for piece in range(len(check.plan.pieces)):
        by_piece += check.verify_piece(arena, piece)
    assert by_piece == covered


SHAPES = [
    ((4096,), [((0,), (4096,))], ((0,), (4096,))),
    ((4096,), [((0,), (2048,)), ((2048,), (2048,))], ((1024,), (2048,))),
    ((64, 96), [((0, 0), (64, 96))], ((0, 0), (64, 96))),  # all
    ((64, 96), [((0, 0), (64, 96))], ((16, 0), (16, 96))),  # rows: bands
    ((64, 96), [((0, 0), (64, 96))], ((0, 24), (64, 24))),  # columns: tiles, strided in the shard
    ((64, 96), [((0, 0), (64, 48)), ((0, 48), (64, 48))], ((0, 0), (64, 96))),  # strided in the arena
    ((8, 32, 64), [((0, 0, 0), (8, 32, 64))], ((0, 8, 0), (8, 8, 64))),  # a middle axis
    ((8, 32, 64), [((0, 0, 0), (8, 32, 64))], ((2, 0, 0), (4, 32, 64))),  # the first axis
    ((8, 32, 64), [((0, 0, 0), (4, 32, 64)), ((4, 0, 0), (4, 32, 64))], ((0, 0, 32), (8, 32, 32))),
    ((1, 64, 96), [((0, 0, 0), (1, 64, 96))], ((0, 16, 0), (1, 16, 96))),
]


@pytest.mark.parametrize(("shape", "boxes", "need"), SHAPES)
@pytest.mark.parametrize("block_bytes", [100, 512 << 10])
def test_every_flipped_byte_is_found_and_named(
    shape: tuple[int, ...],
    boxes: list,
    need: tuple,
    block_bytes: int,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digests_module, "BLOCK_BYTES", block_bytes)
    world = one_tensor(shape, *boxes, dtype="torch.bfloat16")
    needs = NeedTable.build([Need("t", "torch.bfloat16", *need)], owner="rank 2")
    check, arena = pulled(world, needs, whole=whole)
    assert check.verify(arena) == Verified(int(needs.size_bytes[0]), 0)
    places = range(len(arena)) if len(arena) < 1000 else np.random.default_rng(3).integers(0, len(arena), 200)
    for at in places:
        arena[at] ^= 0x10
        with pytest.raises(DigestMismatch, match=r"tensor 't': offset .* read by rank 2 .* worker 'w[01]'"):
            check.verify(arena)
        arena[at] ^= 0x10


_BIG = [(4096,), (1024, 512), (2048, 256), (16, 256, 128)]
_SMALL = [(256,), (64, 16)]  # of which a whole table cuts no shard


@pytest.mark.parametrize(
    ("shape", "whole"), [*((shape, False) for shape in _BIG + _SMALL), *((shape, True) for shape in _BIG)]
)
@pytest.mark.parametrize("parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", [0, -1])
def test_slices_by_2_4_and_8_are_wholly_verified(
    shape: tuple[int, ...], parallel: int, axis: int, whole: bool
) -> None:
    world = one_tensor(shape, ((0,) * len(shape), shape), dtype="torch.bfloat16")
    part = list(shape)
    part[axis] //= parallel
    for rank in range(parallel):
        offset = [0] * len(shape)
        offset[axis] = rank * part[axis]
        needs = NeedTable.build([Need("t", "torch.bfloat16", tuple(offset), tuple(part))])
        check, arena = pulled(world, needs, DEFAULT_RULE, whole=whole)
        assert check.verify(arena) == Verified(int(needs.size_bytes[0]), 0)


def test_the_box_named_holds_the_wrong_byte(whole: bool) -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.uint8")
    needs = NeedTable.build([Need("t", "torch.uint8", (8, 0), (56, 96))])
    check, arena = pulled(world, needs, whole=whole)
    arena[9 * 96] ^= 1
    with pytest.raises(DigestMismatch, match=re.escape("offset (16, 0) shape (8, 96)")):
        check.verify(arena)


@many
@given(worlds(conflicting=False), st.data())
def test_a_flip_in_a_wholly_verified_piece_is_found(
    drawn: tuple[World, list[Need]], data: st.DataObject
) -> None:
    world, needs = drawn
    check, arena = pulled(world, NeedTable.build(needs))
    p = check.plan.pieces
    verified = np.zeros(len(p), np.int64)
    for verifier in check.verifiers.values():
        verified[verifier.first : verifier.first + len(verifier.pieces)] = verifier.parts.verified_bytes
    whole = np.flatnonzero((verified == p.size_bytes) & (p.size_bytes > 0))
    if not len(whole):
        return
    runs = check.plan.runs(np.array([data.draw(st.sampled_from(whole.tolist()))]))
    run = data.draw(st.integers(0, len(runs) - 1))
    at = int(runs.local_offset[run]) + data.draw(st.integers(0, int(runs.size_bytes[run]) - 1))
    arena[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DigestMismatch):
        check.verify(arena)


def test_a_part_that_a_need_cuts_is_counted_as_unverified(whole: bool) -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.uint8")
    check, arena = pulled(world, NeedTable.build([Need("t", "torch.uint8", (4, 0), (56, 96))]), whole=whole)
    assert check.verify(arena) == Verified(48 * 96, 8 * 96)
    arena[0] ^= 1  # in rows 4 to 7, of the part of rows 0 to 7
    check.verify(arena)


def test_a_small_arena_is_refused() -> None:
    world = one_tensor((64,), ((0,), (64,)), dtype="torch.uint8")
    check, _ = pulled(world, NeedTable.build([Need("t", "torch.uint8", (0,), (64,))]))
    with pytest.raises(UsageError, match="expected 64 flat bytes"):
        check.verify(np.zeros(63, np.uint8))


def test_a_verifier_serves_every_version_of_a_structure() -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.bfloat16")
    needs = NeedTable.build([Need("t", "torch.bfloat16", (0, 0), (64, 48))])
    check, arena = pulled(world, needs)
    world.buffers[0][:] ^= 0xFF
    check.fetch(answering(world))
    with pytest.raises(DigestMismatch):
        check.verify(arena)
    pull(check.plan, arena)
    assert check.verify(arena).unverified_bytes == 0


def wanted(check: object, level: int) -> set[int]:
    (verifier,) = check.verifiers.values()  # type: ignore[attr-defined]
    return {int(ask.first_row + row) for ask in verifier.asks for row in np.flatnonzero(ask.wanted[level])}


def test_only_what_can_be_used_is_asked_for() -> None:
    data = np.random.default_rng(1).integers(0, 256, (1024, 512, 2), np.uint8)
    tensors = dict.fromkeys("abcd", ("torch.bfloat16", data))
    world = publish(tensors, [[(name, (0, 0), (1024, 512)) for name in "abcd"]])
    needs = NeedTable.build(
        [
            Need("d", "torch.bfloat16", (0, 0), (1024, 512)),
            Need("b", "torch.bfloat16", (0, 128), (1024, 128)),
            Need("c", "torch.bfloat16", (512, 0), (512, 512)),
        ]
    )
    check, arena = pulled(world, needs, DEFAULT_RULE)
    assert (wanted(check, SLABS), wanted(check, BANDS), wanted(check, TILES)) == ({2, 3}, set(), {1})
    assert check.verify(arena).unverified_bytes == 0


def test_the_first_pieces_need_the_first_answers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_parts, "ASK_BYTES", 128 << 10)
    monkeypatch.setattr(verify_parts, "MAX_ASK_BYTES", 256 << 10)
    data = np.random.default_rng(1).integers(0, 256, (256, 256, 1), np.uint8)
    names = [f"t{i}" for i in range(16)]
    world = publish(
        dict.fromkeys(names, ("torch.uint8", data)), [[(name, (0, 0), (256, 256)) for name in names]]
    )
    needs = NeedTable.build([Need(name, "torch.uint8", (0, 0), (256, 256)) for name in names])
    check, arena = pulled(world, needs, DEFAULT_RULE)
    (verifier,) = check.verifiers.values()
    assert [ask.wanted.shape[1] for ask in verifier.asks] == [2, 4, 4, 4, 2]
    assert verifier.asked.tolist() == [1] * 2 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 2
    (digests,) = check.digests.values()
    early = digests.copy()
    early[verifier.ask_start[1] :] = 0
    assert verifier.asks_for(slice(0, 2)) == 1
    assert verifier.verify(arena, early, slice(0, 2)) == Verified(128 << 10, 0)
    with pytest.raises(DigestMismatch):
        verifier.verify(arena, early, slice(0, 3))


def test_every_level_is_of_use() -> None:
    levels = set()
    for shape, box in [
        ((64, 96), ((0, 0), (64, 96))),
        ((64, 96), ((16, 0), (16, 96))),
        ((64, 96), ((0, 24), (64, 24))),
    ]:
        world = one_tensor(shape, ((0, 0), shape), dtype="torch.bfloat16")
        check = checker(world, NeedTable.build([Need("t", "torch.bfloat16", *box)]), FINE)
        (verifier,) = check.verifiers.values()
        levels |= set(verifier.parts.level.tolist())
    assert levels == set(PARTS)


def test_rules_of_other_cuts_are_followed(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.bfloat16")
    needs = NeedTable.build([Need("t", "torch.bfloat16", (16, 0), (16, 96))])
    monkeypatch.setattr(grids, "WHOLE_BYTES", 0)
    for rule in (GridRule(), FINE, GridRule(64, 2, 64, 2)):
        check, arena = pulled(world, needs, rule, whole=whole)
        assert check.verify(arena).unverified_bytes == (0 if rule.coarse_parts == 8 else 16 * 96 * 2)


def test_a_verifier_checks_the_arena_that_it_is_given() -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.uint8")
    check, first = pulled(world, NeedTable.build([Need("t", "torch.uint8", (0, 0), (64, 96))]))
    second = first.copy()
    for good, bad in ((first, second), (second, first)):
        bad[5] ^= 1
        check.verify(good)
        with pytest.raises(DigestMismatch):
            check.verify(bad)
        bad[5] ^= 1
