"""Pieces read by whole rows bring the bytes of a gather and a slice, verified as they landed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import DigestMismatch
from modelexpress_rl.reshard import row_staging
from modelexpress_rl.reshard import row_staging_wire as wires
from modelexpress_rl.reshard.arena_order import in_source_order
from modelexpress_rl.reshard.cost import DEFAULT_COST, TransportCost
from modelexpress_rl.reshard.geometry import Bytes
from modelexpress_rl.reshard.grid import digest_grid
from modelexpress_rl.reshard.hashing import decode_answer
from modelexpress_rl.reshard.merge import Merged
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan, replan
from modelexpress_rl.reshard.proof import prove_plan
from modelexpress_rl.reshard.row_staging import Choice, choose
from modelexpress_rl.reshard.row_staging_wire import Wire, wire
from modelexpress_rl.reshard.verify import Verified, Verifier
from tests.examples import many
from tests.reshard.digested import SHA, answering, one_tensor
from tests.reshard.reference import World, need_bytes, pull, worlds

RUNS_ARE_DEAR = TransportCost(wire_bytes_per_s=1e9, run_s=1.0, read_s=1e-6, copy_bytes_per_s=1e9)
RUNS_ARE_FREE = TransportCost(wire_bytes_per_s=1e9, run_s=1e-15, read_s=1e-6, copy_bytes_per_s=1e9)


def arena_of(made: Wire) -> Bytes:
    return np.full(made.arena_bytes, 0xA5, np.uint8)


def pull_wire(made: Wire, arena: Bytes) -> None:
    """Read everything as a round does: exact pieces at any time, batches one after the other."""
    staged = np.zeros(len(made.plan.pieces), np.bool_)
    for batch in made.batches:
        staged[batch.first : batch.last] = True
    pull(made.plan, arena, np.flatnonzero(~staged))
    for batch in made.batches:
        pull(made.plan, arena, np.arange(batch.first, batch.last))
        for _, target, source in made.copies.views(arena, batch.copies):
            np.copyto(target, source)


def staged(
    world: World, needs: list[Need], cost: TransportCost = RUNS_ARE_DEAR
) -> tuple[NeedTable, Merged, Choice, Wire]:
    table, merged = NeedTable.build(needs, owner="rank 2"), world.merged()
    choice = choose(plan(table, merged), merged, cost)
    return table, merged, choice, wire(choice, table, merged)


def assert_bytes(world: World, needs: list[Need], table: NeedTable, arena: Bytes) -> None:
    for i, need in enumerate(needs):
        assert need_bytes(table, arena, i) == world.expected(need), need


@many
@given(worlds(), st.integers(1, 200), st.sampled_from([RUNS_ARE_DEAR, RUNS_ARE_FREE, DEFAULT_COST]))
def test_any_choice_moves_the_bytes_of_a_gather_and_a_slice(
    drawn: tuple[World, list[Need]], part_bytes: int, cost: TransportCost
) -> None:
    world, needs = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_staging, "SCRATCH_BYTES", part_bytes)
        patch.setattr(wires, "SCRATCH_BYTES", part_bytes)
        table, merged = NeedTable.build(needs), world.merged()
        table, planned = in_source_order(table, plan(table, merged))
        prove_plan(planned, table, merged)
        choice = choose(planned, merged, cost, max_read_bytes=1 << 12)
        prove_plan(choice.plan, table, merged)
        made = wire(choice, table, merged)
    arena = arena_of(made)
    pull_wire(made, arena)
    assert_bytes(world, needs, table, arena)
    assert made.plan.needed_bytes == int(table.size_bytes.sum())
    assert sum(each.total_bytes for each in made.plan.reads) == made.plan.total_bytes
    if made.scratch is not None:
        rows = made.plan.pieces.local_offset >= made.scratch.begin
        assert int(made.plan.pieces.size_bytes[rows].max()) <= made.scratch.part_bytes


@many
@given(worlds(conflicting=False), st.data())
def test_what_has_not_landed_is_planned_again(drawn: tuple[World, list[Need]], data: st.DataObject) -> None:
    world, needs = drawn
    table, merged, choice, made = staged(world, needs)
    landed = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(made.plan.pieces), max_size=len(made.plan.pieces))),
        np.bool_,
    )
    arena = arena_of(made)
    pull_wire(made, arena)
    left = np.flatnonzero(~landed[made.brought_by])
    pieces = choice.plan.pieces
    for piece in left.tolist():  # what a read that failed may have written
        runs = choice.plan.runs(np.array([piece]))
        for at, size in zip(runs.local_offset.tolist(), runs.size_bytes.tolist(), strict=True):
            arena[at : at + size] = 0
    again = replan(choice.plan, table, merged, failed_sources=(), landed=landed[made.brought_by])
    assert again.total_bytes == int(pieces.size_bytes[left].sum())
    limit = made.scratch.part_bytes if made.scratch else 0
    rest = wire(choose(again, merged, RUNS_ARE_DEAR, max_read_bytes=limit), table, merged, made.scratch)
    assert rest.arena_bytes <= len(arena)
    pull_wire(rest, arena)
    assert_bytes(world, needs, table, arena)


def columns(rows: int, width: int, first: int, count: int) -> tuple[World, list[Need]]:
    world = one_tensor((rows, width), ((0, 0), (rows, width)), dtype="torch.bfloat16")
    return world, [Need("t", "torch.bfloat16", (0, first), (rows, count))]


def test_short_runs_are_read_by_rows_and_long_ones_exactly() -> None:
    short, needs = columns(512, 256, 64, 64)
    _, _, choice, made = staged(short, needs, DEFAULT_COST)
    assert (choice.read >= 0).all()
    assert (made.plan.amplification, made.plan.descriptors) == (4.0, 1)
    assert (made.staged_bytes, made.copied_bytes) == (512 * 512, 512 * 128)
    long, needs = columns(4, 1 << 17, 1 << 16, 1 << 16)
    _, _, choice, made = staged(long, needs, DEFAULT_COST)
    assert (choice.read < 0).all()
    assert made.scratch is None
    assert (made.plan.amplification, made.plan.descriptors) == (1.0, 4)


def test_a_shard_that_is_wanted_whole_costs_no_byte_more() -> None:
    """Trainers that shard the last axis, and a reader of all of it: strided only in the arena."""
    world = one_tensor((512, 128), ((0, 0), (512, 64)), ((0, 64), (512, 64)), dtype="torch.bfloat16")
    table, _, choice, made = staged(world, [Need("t", "torch.bfloat16", (0, 0), (512, 128))], DEFAULT_COST)
    assert choice.plan.descriptors == 1024
    assert (made.plan.amplification, made.plan.descriptors) == (1.0, 2)
    arena = arena_of(made)
    pull_wire(made, arena)
    assert_bytes(world, [Need("t", "torch.bfloat16", (0, 0), (512, 128))], table, arena)


def test_pieces_that_want_the_same_rows_share_their_read() -> None:
    world = one_tensor((512, 128), ((0, 0), (512, 128)), dtype="torch.bfloat16")
    halves = [Need("t", "torch.bfloat16", (0, at), (512, 64)) for at in (0, 64)]
    table, _, choice, made = staged(world, halves, DEFAULT_COST)
    assert choice.read.tolist() == [0, 0]
    assert (made.plan.amplification, made.plan.descriptors) == (1.0, 1)
    arena = arena_of(made)
    pull_wire(made, arena)
    assert_bytes(world, halves, table, arena)


def test_reads_are_cut_where_digests_end_and_fit_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_staging, "SCRATCH_BYTES", 300 << 10)
    monkeypatch.setattr(wires, "SCRATCH_BYTES", 300 << 10)
    world, needs = columns(4096, 128, 0, 32)  # 1 MiB: 8 slabs of 128 KiB
    table, _, _, made = staged(world, needs)
    assert made.scratch is not None
    assert made.scratch.part_bytes == 300 << 10
    rows = made.plan.pieces
    assert rows.shape[:, 0].tolist() == [1024] * 4
    assert [batch.part for batch in made.batches] == [0, 1, 0, 1]
    arena = arena_of(made)
    pull_wire(made, arena)
    assert_bytes(world, needs, table, arena)


def verifier(world: World, merged: Merged, made: Wire) -> tuple[Verifier, Bytes]:
    (source,) = merged.sources
    publisher = answering(world)[source]
    check = Verifier.of(made.plan, made.needs, merged, slice(0, len(made.plan.pieces)), publisher.hasher.grid)
    answers = [decode_answer(publisher.answer(ask), ask, publisher.hasher.grid, SHA) for ask in check.asks]
    return check, np.concatenate(answers)


def test_every_flipped_byte_of_whole_rows_is_found_and_named() -> None:
    """Also one that is not needed: what is verified is what landed."""
    world, needs = columns(64, 96, 5, 7)
    _, merged, _, made = staged(world, needs)
    check, digests = verifier(world, merged, made)
    arena = arena_of(made)
    pull_wire(made, arena)
    assert check.verify(arena, digests) == Verified(64 * 96 * 2, 0)
    assert made.scratch is not None
    for at in range(made.scratch.begin, made.scratch.begin + 64 * 96 * 2, 61):
        arena[at] ^= 1
        with pytest.raises(DigestMismatch, match=r"tensor 't': offset .* read by rank 2 .* worker 'w0'"):
            check.verify(arena, digests)
        arena[at] ^= 1


def test_columns_that_no_digest_of_columns_fits_are_verified_as_rows() -> None:
    world, needs = columns(64, 96, 5, 7)
    table, merged, choice, _ = staged(world, needs)
    grid = digest_grid(world.manifests[0].manifest.table)
    exact = Verifier.of(choice.plan, table, merged, slice(0, 1), grid)
    assert exact.coverage().verified_bytes < 64 * 7 * 2


def test_rows_that_fit_no_scratch_are_read_exactly() -> None:
    world, needs = columns(64, 96, 5, 7)
    table, merged = NeedTable.build(needs), world.merged()
    choice = choose(plan(table, merged), merged, RUNS_ARE_DEAR, max_read_bytes=100)
    assert (choice.read < 0).all()
    assert choice.plan.total_bytes == choice.plan.needed_bytes
