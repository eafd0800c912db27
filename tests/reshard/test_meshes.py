"""Plans between random meshes: any axes sharded, several at once, unevenly, with replicas and stages.

Each test is one of the things that a plan must handle; the bytes are those of a gather and a slice. Views of
bigger parameters, casts and an engine's own loaders are in tests/inference/capture, fused layouts in
test_fused_layouts.py, overlapping and missing boxes in test_planner.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import GeometryError, IncompleteVersionError
from modelexpress_rl.reshard.manifest import digest
from modelexpress_rl.reshard.manifest_columns import decode_announced, encodings
from modelexpress_rl.reshard.merge import SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.plan import Plan
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.proof import prove_plan
from tests.examples import many
from tests.reshard.reference import ELSIZE, Piece, World, need_bytes, publish, pull

Shape = tuple[int, ...]
REPLICATED = -1


def part_of(extent: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, extent) of one part: the first ones are bigger, the last ones may be empty."""
    size = -(-extent // parts)
    begin = min(index * size, extent)
    return begin, min(size, extent - begin)


def box_of(shape: Shape, mesh: Shape, placement: Sequence[int], rank: Sequence[int]) -> tuple[Shape, Shape]:
    """What a rank of a mesh holds, where mesh axis m shards tensor axis `placement[m]`, in order."""
    offset, size = [0] * len(shape), list(shape)
    for parts, axis, index in zip(mesh, placement, rank, strict=True):
        if axis != REPLICATED:
            begin, size[axis] = part_of(size[axis], parts, index)
            offset[axis] += begin
    return tuple(offset), tuple(size)


def ranks_of(mesh: Shape) -> Iterator[Shape]:
    return itertools.product(*map(range, mesh))


@st.composite
def tensors(draw: st.DrawFn, *, most: int = 4) -> dict[str, tuple[str, np.ndarray]]:
    """Tensors of rank 0 to 4 in several dtypes, some axes of no extent."""
    noise = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    made = {}
    for number in range(draw(st.integers(1, most))):
        dtype = draw(st.sampled_from(sorted(ELSIZE)))
        shape = tuple(draw(st.lists(st.integers(0 if number else 1, 7), max_size=4)))
        made[f"t{number}"] = dtype, noise.integers(0, 256, (*shape, ELSIZE[dtype]), np.uint8)
    return made


@st.composite
def placements(draw: st.DrawFn, mesh: Shape, shape: Shape) -> list[int]:
    axes = st.sampled_from([REPLICATED, *range(len(shape))])
    return [draw(axes) for _ in mesh]


meshes = st.sampled_from(
    [mesh for n in (1, 2, 3) for mesh in itertools.product((1, 2, 3, 4), repeat=n) if np.prod(mesh) <= 8]
)


def held(whole: dict[str, tuple[str, np.ndarray]], mesh: Shape, data: st.DataObject) -> list[list[Piece]]:
    """What each rank of a mesh holds, where every tensor is placed in its own way."""
    ranks: list[list[Piece]] = [[] for _ in ranks_of(mesh)]
    for name, (_, values) in whole.items():
        shape = values.shape[:-1]
        placement = data.draw(placements(mesh, shape), label=name)
        for boxes, rank in zip(ranks, ranks_of(mesh), strict=True):
            boxes.append((name, *box_of(shape, mesh, placement, rank)))
    return ranks


def over_the_wire(world: World) -> World:
    """What a reader of the manifests has: decoded from columns that version 1 binds."""
    read = []
    for source in world.manifests:
        document, columns = encodings(source.manifest)
        assert columns is not None
        read.append(SourceManifest(source.source, decode_announced(columns, digest(document))))
    world.manifests = read
    return world


def refit(world: World, boxes: Sequence[Piece], *, spread: int = 0) -> Plan:
    """Plan, prove, pull by address, and compare with a gather and a slice."""
    needs = [Need(name, world.tensors[name][0], offset, shape) for name, offset, shape in boxes]
    table, merged = NeedTable.build(needs, owner=f"rank {spread}"), world.merged()
    made = plan(table, merged, spread=spread)
    prove_plan(made, table, merged)
    assert made.total_bytes == made.needed_bytes
    arena = np.full(table.arena_bytes, 0xA5, np.uint8)
    pull(made, arena)
    for number, need in enumerate(needs):
        assert need_bytes(table, arena, number) == world.expected(need), need
    return made


@many
@given(tensors(), meshes, meshes, st.data())
def test_any_axes_of_any_mesh_to_any_other(
    whole: dict[str, tuple[str, np.ndarray]], trainer: Shape, generator: Shape, data: st.DataObject
) -> None:
    """Any axis, several at once, uneven and empty shards, scalars and vectors, replicas along mesh axes."""
    world = over_the_wire(publish(whole, held(whole, trainer, data)))
    for rank, boxes in enumerate(held(whole, generator, data)):
        refit(world, boxes, spread=rank)


@many
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 7))
def test_replicas_are_each_read_once_and_evenly(count: int, copies: int, spread: int) -> None:
    noise = np.random.default_rng(count)
    whole = {f"t{i}": ("torch.uint8", noise.integers(0, 256, (8, 1), np.uint8)) for i in range(count)}
    boxes: list[Piece] = [(name, (0,), (8,)) for name in whole]
    made = refit(publish(whole, [boxes] * copies), boxes, spread=spread)
    loads = [*made.source_bytes.values(), *[0] * (copies - len(made.source_bytes))]
    assert max(loads) - min(loads) <= 8


@many
@given(tensors(most=2), meshes, st.data())
def test_replicas_whose_digests_differ_are_refused_by_name(
    whole: dict[str, tuple[str, np.ndarray]], mesh: Shape, data: st.DataObject
) -> None:
    boxes = held(whole, mesh, data)
    world = publish(whole, [*boxes, *boxes])

    def digested(source: SourceManifest, other: int) -> SourceManifest:
        table = source.manifest.table
        columns = np.zeros((len(table), 16), np.uint8)
        columns[:, 0] = other
        marked = replace(table, digest=columns, has_digest=np.ones(len(table), np.bool_))
        return SourceManifest(source.source, replace(source.manifest, table=marked))

    same = [digested(source, 0) for source in world.manifests]
    merge(same)
    last = data.draw(st.integers(0, len(same) - 1))
    odd = [*same[:last], digested(world.manifests[last], 1), *same[last + 1 :]]
    if not world.manifests[last].manifest.table.total_bytes:
        merge(odd)  # nobody reads an empty shard
        return
    with pytest.raises(GeometryError, match=r"tensor 't\d': replicas of offset .* have different digests"):
        merge(odd)


@many
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.data())
def test_grouped_experts_by_expert_and_tensor_parallelism(
    ep: int, per_rank: int, tp: int, ffn: int, generator_ep: bool, data: st.DataObject
) -> None:
    """Three axes: experts by EP, their rows or columns by TP; read as whole experts, or sliced by TP."""
    experts = ep * per_rank
    noise = np.random.default_rng(experts)
    whole = {
        "w13": ("torch.bfloat16", noise.integers(0, 256, (experts, 2 * ffn, 5, 2), np.uint8)),
        "w2": ("torch.bfloat16", noise.integers(0, 256, (experts, 5, ffn, 2), np.uint8)),
    }
    cut = {"w13": 1, "w2": 2}
    shapes = {name: values.shape[:-1] for name, (_, values) in whole.items()}
    ranks: list[list[Piece]] = [
        [(name, *box_of(shape, (ep, tp), (0, cut[name]), rank)) for name, shape in shapes.items()]
        for rank in ranks_of((ep, tp))
    ]
    world = over_the_wire(publish(whole, ranks))
    size = data.draw(st.integers(1, 4))
    for rank in range(size):
        axes = dict.fromkeys(whole, 0) if generator_ep else cut
        boxes: list[Piece] = [
            (name, *box_of(shape, (size,), (axes[name],), (rank,))) for name, shape in shapes.items()
        ]
        refit(world, boxes, spread=rank)


@many
@given(tensors(most=6), st.integers(1, 3), meshes, st.data())
def test_pipeline_stages_and_a_tensor_that_two_of_them_own(
    whole: dict[str, tuple[str, np.ndarray]], stages: int, mesh: Shape, data: st.DataObject
) -> None:
    """Tied embeddings: the first and the last stage both hold them, under one name that is loaded twice."""
    names = list(whole)
    shared = names[0]
    sources: list[list[Piece]] = []
    for stage in range(stages):
        begin, count = part_of(len(names), stages, stage)
        own = {*names[begin : begin + count], *([shared] if stage in (0, stages - 1) else [])}
        sources += held({name: whole[name] for name in whole if name in own}, mesh, data)
    world = over_the_wire(publish(whole, sources))
    everything: list[Piece] = [
        (name, (0,) * (values.ndim - 1), values.shape[:-1]) for name, (_, values) in whole.items()
    ]
    refit(world, everything)
    tied = refit(world, [*everything, everything[0]])
    assert tied.needed_bytes == tied.total_bytes


@many
@given(tensors(), meshes, st.data())
def test_a_rank_that_did_not_publish_is_missed_by_name(
    whole: dict[str, tuple[str, np.ndarray]], mesh: Shape, data: st.DataObject
) -> None:
    boxes = held(whole, mesh, data)
    lost = data.draw(st.integers(0, len(boxes) - 1))
    world = publish(whole, [rank for number, rank in enumerate(boxes) if number != lost])
    left = {piece for number, rank in enumerate(boxes) for piece in rank if number != lost}
    gone = [piece for piece in boxes[lost] if np.prod(piece[2]) and piece not in left]
    everything: list[Piece] = [
        (name, (0,) * (values.ndim - 1), values.shape[:-1]) for name, (_, values) in whole.items()
    ]
    if not gone:
        refit(world, everything)
        return
    with pytest.raises(IncompleteVersionError, match=re.escape(f"tensor {gone[0][0]!r}: rank 0 needs")):
        refit(world, everything)


@many
@given(
    tensors(most=2),
    meshes.filter(lambda mesh: np.prod(mesh) > 1),
    st.sampled_from(["dtype", "rank", "shape"]),
    st.data(),
)
def test_a_publisher_that_means_another_tensor_is_named(
    whole: dict[str, tuple[str, np.ndarray]], mesh: Shape, what: str, data: st.DataObject
) -> None:
    """Another dtype, rank or global shape under the same name, at one publisher of several."""
    world = publish(whole, held(whole, mesh, data))
    last = world.manifests[-1]
    tensors_of = last.manifest.table.tensors
    match what:
        case "dtype":
            other = {"torch.uint8": "torch.int8", "torch.bfloat16": "torch.float16"}
            dtypes = tuple(other.get(dtype, "torch.int16") for dtype in tensors_of.dtypes)
            changed = replace(tensors_of, dtypes=dtypes)
        case "rank":
            changed = replace(tensors_of, rank=tensors_of.rank + 1)
        case _:
            changed = replace(tensors_of, full_shape=tensors_of.full_shape + 1)
    table = replace(last.manifest.table, tensors=changed)
    odd = SourceManifest(last.source, replace(last.manifest, table=table))
    with pytest.raises(GeometryError, match=r"tensor 't0': worker 'w0'.* says .*, worker 'w\d+'"):
        merge([*world.manifests[:-1], odd])
