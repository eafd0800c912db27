"""Needs lie in the arena as their sources lie, where that makes reads fewer."""

from __future__ import annotations

import numpy as np

from modelexpress_rl.reshard.arena_order import in_source_order
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.proof import prove_plan
from tests.reshard.reference import World, need_bytes, publish, pull

COUNT, BYTES = 100, 256


def world() -> World:
    """Small tensors, one after the other in the memory of one source."""
    noise = np.random.default_rng(3)
    tensors = {f"t{n}": ("torch.uint8", noise.integers(0, 256, (BYTES, 1), np.uint8)) for n in range(COUNT)}
    return publish(tensors, [[(name, (0,), (BYTES,)) for name in tensors]])


def needs_in(order: list[int]) -> list[Need]:
    return [Need(f"t{n}", "torch.uint8", (0,), (BYTES,)) for n in order]


def test_neighbours_at_the_source_are_read_as_one() -> None:
    here = world()
    wanted = needs_in(np.random.default_rng(4).permutation(COUNT).tolist())
    table, merged = NeedTable.build(wanted), here.merged()
    made = plan(table, merged)
    assert made.descriptors > COUNT // 2
    laid, moved = in_source_order(table, made)
    prove_plan(moved, laid, merged)
    assert moved.descriptors == 1
    arena = np.zeros(laid.arena_bytes, np.uint8)
    pull(moved, arena)
    for i, need in enumerate(wanted):
        assert need_bytes(laid, arena, i) == here.expected(need)


def test_what_gains_nothing_stays() -> None:
    here = world()
    table, merged = NeedTable.build(needs_in(list(range(0, COUNT, 2))[::-1])), here.merged()
    made = plan(table, merged)
    assert in_source_order(table, made) == (table, made)


def test_empty_needs_come_last() -> None:
    here = world()
    wanted = [Need("t0", "torch.uint8", (0,), (0,)), *needs_in([2, 1])]
    table = NeedTable.build(wanted)
    laid, moved = in_source_order(table, plan(table, here.merged()))
    assert laid.local_offset.tolist() == [512, 256, 0]
    assert moved.descriptors == 1
