"""Pieces that were cut bring the same bytes, prove the same cover, and are verified as wholly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.reshard import grid as grids
from modelexpress_rl.reshard import split as split_module
from modelexpress_rl.reshard.geometry import Int
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan, replan
from modelexpress_rl.reshard.proof import prove_plan
from modelexpress_rl.reshard.split import split
from tests.examples import many
from tests.reshard.digested import checker, one_tensor
from tests.reshard.reference import World, need_bytes, pull, worlds


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "WHOLE_BYTES", 0)


def every_step(shape: Int, elsize: Int) -> Int:
    """The finest slabs there could be."""
    axis = np.argmax(shape != 1, axis=1)
    parts = np.ones_like(shape)
    rows = np.arange(len(shape))
    parts[rows, axis] = np.maximum(shape[rows, axis], 1)
    return parts


@many
@given(worlds(), st.sampled_from([1, 16, 200]))
def test_the_same_bytes_come(drawn: tuple[World, list[Need]], limit_bytes: int) -> None:
    world, needs = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_module, "slab_parts", every_step)
        table, merged = NeedTable.build(needs), world.merged()
        before = plan(table, merged)
        after = split(before, merged, limit_bytes)
    prove_plan(after, table, merged)
    assert after.total_bytes == before.total_bytes
    assert after.source_bytes == before.source_bytes
    arena = np.zeros(table.arena_bytes, np.uint8)
    pull(after, arena)
    for number, need in enumerate(needs):
        assert need_bytes(table, arena, number) == world.expected(need)


CASES = [
    ((1024, 512), ((0, 0), (1024, 512)), 8),  # rows
    ((1024, 512), ((0, 128), (1024, 128)), 8),  # columns, strided in the shard
    ((1024, 512), ((256, 0), (512, 512)), 4),  # some rows
    ((1024, 512), ((256, 128), (512, 128)), 4),
    ((1024, 512), ((100, 0), (512, 512)), 1),  # not whole slabs
    ((64, 64, 128), ((0, 0, 0), (64, 64, 128)), 8),
    ((64, 64, 128), ((0, 32, 0), (64, 32, 128)), 8),
    ((1, 1024, 512), ((0, 0, 0), (1, 1024, 512)), 8),
    ((524288,), ((0,), (524288,)), 16),
    ((7, 512, 128), ((0, 0, 0), (7, 512, 128)), 1),  # one slab
]


@pytest.mark.parametrize(("shape", "need", "count"), CASES)
def test_big_pieces_are_cut_where_slabs_end(shape: tuple[int, ...], need: tuple, count: int) -> None:
    world = one_tensor(shape, ((0,) * len(shape), shape), dtype="torch.bfloat16")
    table, merged = NeedTable.build([Need("t", "torch.bfloat16", *need)]), world.merged()
    before = plan(table, merged)
    after = split(before, merged, 32 << 10)
    assert len(after.pieces) == count
    assert len({*after.pieces.size_bytes.tolist()}) == 1
    assert after.descriptors == before.descriptors
    arena = np.zeros(table.arena_bytes, np.uint8)
    pull(after, arena)
    assert need_bytes(table, arena, 0) == world.expected(Need("t", "torch.bfloat16", *need))
    if count > 1:
        checked = checker(world, table, grids.DEFAULT_RULE, limit_bytes=32 << 10)
        assert len(checked.plan.pieces) == len(after.pieces)
        assert checked.verify(arena).unverified_bytes == 0


def test_what_small_pieces_there_are_stays() -> None:
    world = one_tensor((64, 96), ((0, 0), (64, 96)), dtype="torch.uint8")
    made = plan(NeedTable.build([Need("t", "torch.uint8", (0, 0), (64, 96))]), world.merged())
    assert split(made, world.merged(), 64 * 96) is made


def test_what_has_not_landed_of_a_cut_piece_is_planned_again() -> None:
    shape = (1024, 512)
    world = one_tensor(shape, ((0, 0), shape), ((0, 0), shape), dtype="torch.bfloat16")
    table, merged = NeedTable.build([Need("t", "torch.bfloat16", (0, 0), shape)]), world.merged()
    first = split(plan(table, merged), merged, 256 << 10)
    (failed,) = first.source_bytes
    landed = np.arange(len(first.pieces)) % 2 == 0
    arena = np.zeros(table.arena_bytes, np.uint8)
    pull(first, arena, np.flatnonzero(landed))
    again = replan(first, table, merged, failed_sources=[failed], landed=landed)
    assert failed not in again.source_bytes
    assert again.total_bytes == int(first.pieces.size_bytes[~landed].sum())
    pull(again, arena)
    assert need_bytes(table, arena, 0) == world.expected(Need("t", "torch.bfloat16", (0, 0), shape))
