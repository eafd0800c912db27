"""Plans move the bytes that a gather and a slice would, whatever the meshes; gaps fail by name."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import GeometryError, IncompleteVersionError, UsageError
from modelexpress_rl.reshard.geometry import Shard, ShardTable, Source
from modelexpress_rl.reshard.manifest import Manifest, decode, encode
from modelexpress_rl.reshard.merge import Merged, SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan
from modelexpress_rl.reshard.planner import plan, replan
from modelexpress_rl.reshard.proof import prove_plan
from tests.examples import many
from tests.reshard import model_geometry
from tests.reshard.reference import World, need_bytes, publish, pull, worlds

BF16 = "torch.bfloat16"


def arena_for(needs: NeedTable) -> np.ndarray:
    return np.full(needs.arena_bytes, 0xA5, np.uint8)


def assert_bytes(world: World, needs: list[Need], table: NeedTable, arena: np.ndarray) -> None:
    for i, need in enumerate(needs):
        assert need_bytes(table, arena, i) == world.expected(need), need


@many
@given(worlds(), st.sampled_from([1, 64]), st.integers(0, 3))
def test_any_plan_moves_the_bytes_of_a_gather_and_a_slice(
    drawn: tuple[World, list[Need]], align_bytes: int, spread: int
) -> None:
    world, needs = drawn
    table = NeedTable.build(needs, align_bytes=align_bytes)
    merged = world.merged()
    made = plan(table, merged, spread=spread)
    prove_plan(made, table, merged)
    arena = arena_for(table)
    pull(made, arena)
    assert_bytes(world, needs, table, arena)
    assert made.total_bytes == made.needed_bytes == int(table.size_bytes.sum())
    assert made.amplification == 1.0
    assert made.descriptors == sum(len(made.runs(reads)) for reads in made.reads)
    assert sum(made.source_bytes.values()) == made.total_bytes
    assert made.explain().startswith("this rank reads")


@many
@given(worlds(), st.integers(0, 3))
def test_the_same_arguments_give_the_same_plan(drawn: tuple[World, list[Need]], spread: int) -> None:
    world, needs = drawn
    table = NeedTable.build(needs)
    a, b = (plan(table, world.merged(), spread=spread) for _ in range(2))
    for column in a.pieces.__slots__:
        assert (getattr(a.pieces, column) == getattr(b.pieces, column)).all()


@many
@given(worlds(), st.data())
def test_a_failed_source_is_replaced_by_others_or_named(
    drawn: tuple[World, list[Need]], data: st.DataObject
) -> None:
    world, needs = drawn
    table, merged = NeedTable.build(needs), world.merged()
    first = plan(table, merged)
    failed = data.draw(st.sampled_from(merged.sources))
    landed = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(first.pieces), max_size=len(first.pieces)))
    )
    landed = landed.astype(np.bool_) | (first.pieces.source != merged.sources.index(failed))
    arena = arena_for(table)
    pull(first, arena, np.flatnonzero(landed))
    try:
        second = replan(first, table, merged, failed_sources=[failed], landed=landed)
    except IncompleteVersionError:
        # Then a plan from the start without that source must be impossible too.
        with pytest.raises(IncompleteVersionError):
            plan(table, merged, avoid=[failed])
        return
    assert failed not in second.source_bytes
    assert second.total_bytes == int(first.pieces.size_bytes[~landed].sum())
    pull(second, arena)
    assert_bytes(world, needs, table, arena)


@many
@given(worlds(conflicting=False), st.data())
def test_a_missing_box_fails_by_name_and_box(drawn: tuple[World, list[Need]], data: st.DataObject) -> None:
    world, needs = drawn
    table, merged = NeedTable.build(needs, owner="generator rank 7"), world.merged()
    made = plan(table, merged)
    if not len(made.pieces):
        return
    lost = data.draw(st.integers(0, len(made.pieces) - 1))
    row = int(made.pieces.row[lost])
    offset, shape = merged.shards.box(row)
    name = merged.tensors.names[int(merged.shards.tensor[row])]

    def without(manifest: Manifest) -> Manifest:
        t = manifest.table
        keep = [
            i
            for i in range(len(t))
            if not (t.tensors.names[int(t.tensor[i])] == name and t.box(i) == (offset, shape))
        ]
        columns = {f: getattr(t, f)[keep] for f in t.__slots__ if f != "tensors"}
        return Manifest(manifest.agent_name, "", b"", ShardTable(tensors=t.tensors, **columns))

    half = merge([SourceManifest(m.source, without(m.manifest)) for m in world.manifests])
    with pytest.raises(IncompleteVersionError, match=re.escape(f"tensor {name!r}: generator rank 7")):
        plan(table, half)


@pytest.mark.parametrize(
    ("trainer", "generator"), [((2, 1), (1, 1)), ((2, 4), (4, 1)), ((4, 2), (2, 8)), ((1, 8), (8, 2))]
)
def test_a_mixture_of_experts_model_between_any_parallel_sizes(
    trainer: tuple[int, int], generator: tuple[int, int]
) -> None:
    model = model_geometry.MODELS["tiny-moe"]
    all_tensors = list(model_geometry.tensors(model))
    noise = np.random.default_rng(0)
    tensors = {t.name: (BF16, noise.integers(0, 256, (*t.shape, 2), np.uint8)) for t in all_tensors}
    shards = model_geometry.trainer_shards(all_tensors, model.experts, *trainer)
    world = publish(tensors, [[(all_tensors[i].name, o, s) for i, o, s in boxes] for boxes in shards])
    # What a generator reads is what went over the wire, not what the publisher had in its hands.
    world.manifests = [SourceManifest(m.source, decode(encode(m.manifest))) for m in world.manifests]
    for rank, boxes in enumerate(model_geometry.generator_needs(all_tensors, model.experts, *generator)):
        needs = [Need(all_tensors[i].name, BF16, o, s) for i, o, s in boxes]
        table = NeedTable.build(needs)
        arena = arena_for(table)
        pull(plan(table, world.merged(), spread=rank), arena)
        assert_bytes(world, needs, table, arena)


def held(shards: list[list[Shard]]) -> Merged:
    return merge(
        [
            SourceManifest.of(f"slot-{i}", f"w{i}", Manifest(f"agent-{i}", "", b"", ShardTable.build(rows)))
            for i, rows in enumerate(shards)
        ]
    )


def rows(name: str, begin: int, end: int, *, of: int = 8, addr: int = 1 << 20, dtype: str = BF16) -> Shard:
    return Shard(name, dtype, (of, 4), (begin, 0), (end - begin, 4), addr)


def test_replicas_are_spread_evenly_and_ranks_begin_with_different_holders() -> None:
    names = [f"t{i}" for i in range(40)]
    merged = held([[rows(name, 0, 8) for name in names]] * 4)
    needs = NeedTable.build([Need(name, BF16, (0, 0), (8, 4)) for name in names])
    plans = [plan(needs, merged, spread=rank) for rank in range(4)]
    for made in plans:
        assert set(made.source_bytes.values()) == {640}
    first = [int(made.pieces.source[made.pieces.need == 0][0]) for made in plans]
    assert len(set(first)) == 4


def test_a_holder_that_alone_has_much_is_asked_for_less_of_what_is_replicated() -> None:
    shared = [rows(f"shared{i}", 0, 8) for i in range(10)]
    alone = [rows(f"alone{i}", 0, 8) for i in range(6)]
    merged = held([[*shared, *alone], shared])
    needs = NeedTable.build([Need(s.name, BF16, (0, 0), (8, 4)) for s in [*shared, *alone]])
    assert list(plan(needs, merged).source_bytes.values()) == [8 * 64, 8 * 64]


def test_publishers_that_shard_a_tensor_differently_are_read_once_per_element() -> None:
    merged = held([[rows("t", 0, 5), rows("t", 5, 8)], [rows("t", 0, 3), rows("t", 3, 8)]])
    needs = NeedTable.build([Need("t", BF16, (0, 0), (8, 4))])
    made = plan(needs, merged)
    prove_plan(made, needs, merged)
    assert made.total_bytes == 64


def test_adjacent_shards_become_one_run() -> None:
    shards = [rows("t", 0, 3, addr=4096), rows("t", 3, 8, addr=4096 + 24)]
    made = plan(NeedTable.build([Need("t", BF16, (1, 0), (6, 4))]), held([shards]))
    runs = made.runs(made.reads[0])
    assert (runs.remote_addr.tolist(), runs.local_offset.tolist(), runs.size_bytes.tolist()) == (
        [4104],
        [0],
        [48],
    )


def test_scalars_and_empty_needs() -> None:
    scalar = Shard("s", "torch.float32", (), (), (), 4096)
    merged = held([[scalar, rows("t", 0, 8)]])
    needs = NeedTable.build([Need("s", "torch.float32", (), ()), Need("t", BF16, (2, 0), (0, 4))])
    made = plan(needs, merged)
    assert (made.total_bytes, made.descriptors) == (4, 1)
    nothing = plan(NeedTable.build([]), merged)
    assert (nothing.total_bytes, nothing.amplification, nothing.reads) == (0, 1.0, ())
    assert "reads 0 B" in nothing.explain()


def test_only_plans_a_part() -> None:
    merged = held([[rows("a", 0, 8), rows("b", 0, 8)]])
    needs = NeedTable.build([Need("a", BF16, (0, 0), (8, 4)), Need("b", BF16, (0, 0), (8, 4))])
    made = plan(needs, merged, only=np.array([False, True]))
    assert made.pieces.need.tolist() == [1]
    assert made.needed_bytes == 64


@pytest.mark.parametrize(
    ("need", "error", "message"),
    [
        (
            Need("absent", BF16, (0,), (1,)),
            IncompleteVersionError,
            "'absent': rank 3 needs offset (0,) shape (1,), but none of the 2",
        ),
        (
            Need("t", "torch.float16", (0, 0), (8, 4)),
            GeometryError,
            "'t': rank 3 needs offset (0, 0) shape (8, 4) as torch.float16, worker 'w0'",
        ),
        (Need("t", BF16, (0,), (8,)), GeometryError, "shape (8,), which does not have the rank of"),
        (Need("t", BF16, (4, 0), (5, 4)), GeometryError, "offset (4, 0) shape (5, 4), which lies outside"),
        (
            Need("half", BF16, (2, 0), (6, 4)),
            IncompleteVersionError,
            "nobody who may be read holds offset (5, 0) shape (3, 4) of it (12 of 24 elements missing",
        ),
        (Need("none", BF16, (0, 0), (8, 4)), IncompleteVersionError, "it is published by nobody"),
    ],
)
def test_what_does_not_fit_is_named(need: Need, error: type[Exception], message: str) -> None:
    empty = Shard("none", BF16, (8, 4), (0, 0), (0, 4), 4096)
    merged = held([[rows("t", 0, 4), rows("half", 0, 5), empty], [rows("t", 4, 8)]])
    with pytest.raises(error, match=re.escape(message)):
        plan(NeedTable.build([need], owner="rank 3"), merged)


def test_a_gap_as_big_as_an_overlap_is_still_a_gap() -> None:
    merged = held([[rows("t", 0, 4), rows("t", 2, 6)]])
    with pytest.raises(IncompleteVersionError, match=re.escape("offset (6, 0) shape (2, 4)")):
        plan(NeedTable.build([Need("t", BF16, (0, 0), (8, 4))]), merged)


def test_publishers_that_disagree_are_both_named() -> None:
    with pytest.raises(
        GeometryError, match=r"tensor 't': worker 'w0'.*bfloat16 \(8, 4\), worker 'w1'.*\(9, 4\)"
    ):
        held([[rows("t", 0, 4)], [rows("t", 4, 8, of=9)]])
    with pytest.raises(GeometryError, match=r"tensor 't': worker 'w0'.*bfloat16.*worker 'w1'.*float16"):
        held([[rows("t", 0, 4)], [rows("t", 4, 8, dtype="torch.float16")]])


def test_replicas_with_different_digests_are_refused_by_name() -> None:
    a, b = (Shard("t", BF16, (4,), (0,), (4,), 4096, digest=bytes([i] * 16)) for i in (1, 2))
    plain = Shard("t", BF16, (4,), (0,), (4,), 4096)
    assert len(held([[a], [plain], [a]]).sources) == 3
    with pytest.raises(
        GeometryError, match=r"tensor 't': replicas .* different digests, worker 'w0'.*worker 'w2'"
    ):
        held([[a], [plain], [b]])


def test_arguments_that_cannot_be() -> None:
    source = Source("s", "w", "a")
    one = SourceManifest(source, Manifest("a", "", b"", ShardTable.build([rows("t", 0, 8)])))
    with pytest.raises(UsageError, match="appears twice"):
        merge([one, one])
    with pytest.raises(UsageError, match="needed both as"):
        NeedTable.build([Need("t", BF16, (), ()), Need("t", "torch.float32", (), ())])
    with pytest.raises(UsageError, match="overlaps the place of"):
        NeedTable.build([Need("t", BF16, (), ()), Need("u", BF16, (), ())], local_offsets=[0, 1])
    with pytest.raises(UsageError, match="lies outside"):
        ShardTable.build([rows("t", 0, 9)])
    with pytest.raises(UsageError, match="past the end of memory"):
        ShardTable.build([rows("t", 0, 8, addr=2**64 - 10)])
    needs = NeedTable.build([Need("t", BF16, (0, 0), (8, 4))])
    made = plan(needs, merge([one]))
    with pytest.raises(UsageError, match="expected a mask of 1 pieces"):
        replan(made, needs, merge([one]), failed_sources=[], landed=np.zeros(2, np.bool_))


@pytest.mark.parametrize(
    ("need", "message"),
    [
        (Need("u", "bfloat16", (0,), (1,)), "rank 3 needs unknown dtype 'bfloat16'"),
        (Need("u", BF16, (0,), (1, 1)), "differ in rank"),
        (Need("u", BF16, (0,) * 17, (1,) * 17), "differ in rank"),
        (Need("u", BF16, (-1,), (1,)), "is out of range"),
        (Need("u", BF16, (0.0,), (1,)), "is out of range"),  # type: ignore[arg-type]
        (Need("u", BF16, (0,), (1.5,)), "is out of range"),  # type: ignore[arg-type]
        (Need("u", BF16, (0,), (1 << 49,)), "is out of range"),
        (Need("u", BF16, (1 << 70,), (1,)), "is out of range"),
        (Need("u", BF16, (0, 0), (1 << 40, 1 << 40)), "is too big for an arena"),
    ],
)
def test_a_need_that_is_not_possible_is_named(need: Need, message: str) -> None:
    possible = Need("t", BF16, (0, 0), (8, 4))
    with pytest.raises(UsageError, match=f"tensor 'u': .*{message}"):
        NeedTable.build([possible, need], owner="rank 3")


def test_devices_of_one_source_are_read_apart() -> None:
    shards = [rows("t", 0, 4, addr=4096), rows("t", 4, 8, addr=4096 + 32)]
    merged = held([[shards[0], replace(shards[1], device_id=1)]])
    made = plan(NeedTable.build([Need("t", BF16, (0, 0), (8, 4))]), merged)
    assert [(reads.device_id, reads.total_bytes) for reads in made.reads] == [(0, 32), (1, 32)]
    assert made.descriptors == 2


def test_a_plan_that_was_tampered_with_is_not_proven() -> None:
    merged = held([[rows("t", 0, 4)], [rows("t", 4, 8)]])
    needs = NeedTable.build([Need("t", BF16, (0, 0), (8, 4))])
    made = plan(needs, merged)
    prove_plan(made, needs, merged)

    def taking(pieces: list[int]) -> Plan:
        columns = {f: getattr(made.pieces, f)[pieces] for f in PieceTable.__slots__}
        return replace(made, pieces=PieceTable(**columns))

    with pytest.raises(IncompleteVersionError, match="16 of 32 elements missing"):
        prove_plan(taking([0]), needs, merged)
    with pytest.raises(GeometryError, match=r"'t': this rank needs .* the plan reads an element of it twice"):
        prove_plan(taking([0, 0, 1]), needs, merged)
    elsewhere = replace(made, pieces=replace(made.pieces, row=made.pieces.row[::-1]))
    with pytest.raises(GeometryError, match="outside its shard"):
        prove_plan(elsewhere, needs, merged)
