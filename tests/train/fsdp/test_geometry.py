"""Placements against torch's own cutting, and views against torch's own views, by random cases."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.fsdp.context import FSDPTrainerContext
from modelexpress_rl.train.engines.fsdp.pieces import Piece, contiguous, contiguous_count
from modelexpress_rl.train.engines.fsdp.placement import Block, Layout, Part, part_of
from modelexpress_rl.train.engines.fsdp.trace import Native, pieces_of, trace
from tests.train.fsdp import support
from tests.train.fsdp.support import assemble, differing, numbered, parts_of_boxes, rank_of, sharded

PLACED = {
    "1-D": ((2,), (Shard(0),)),
    "1-D, last dimension": ((4,), (Shard(-1),)),
    "replicated": ((2,), (Replicate(),)),
    "2-D": ((2, 2), (Shard(0), Shard(1))),
    "2-D, one dimension twice": ((2, 2), (Shard(0), Shard(0))),
    "FSDP over TP": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "FSDP over TP, other dimension": ((2, 2), (Shard(0), Shard(1))),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "strided by itself": ((2, 2), (_StridedShard(0, split_factor=3), Replicate())),
    "3-D": ((2, 2, 2), (Shard(1), Replicate(), Shard(0))),
}
SHAPES = [(8, 4), (7, 5), (1, 3), (5, 9, 2), (2, 2)]


@pytest.mark.parametrize("case", PLACED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_all_ranks_hold_is_the_tensor(case: str, shape: tuple[int, ...]) -> None:
    sizes, placements = PLACED[case]
    full = numbered(*shape)
    world_size = int(torch.tensor(sizes).prod())
    ranks = []
    for rank in range(world_size):
        with rank_of(world_size, rank):
            tensor = sharded(full, init_device_mesh("cpu", sizes), placements)
            adapter = FSDPTrainerContext(wire_dtype=None).create_adapter()
            assert adapter.bind_tensors({"w": tensor}) == f"publisher:global-rank:{rank}"
            ranks.append(parts_of_boxes(adapter.boxes()))
            held = sum(part.values.numel() for part in ranks[-1])
            assert held == tensor.to_local().numel()
    assert differing(assemble(ranks), {"w": full}) == []


def test_a_tensor_may_be_cut_in_an_order_of_its_own() -> None:
    full = numbered(9, 2)
    ranks = []
    for rank in range(4):
        with rank_of(4, rank):
            mesh = init_device_mesh("cpu", (2, 2))
            strided = sharded(full, mesh, (_StridedShard(0, split_factor=2), Shard(0)))
            spec = DTensorSpec(
                mesh,
                (Shard(0), Shard(0)),
                TensorMeta(full.shape, full.stride(), full.dtype),
                shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
            )
            tensor = DTensor(strided.to_local(), spec, requires_grad=False)
            adapter = FSDPTrainerContext(wire_dtype=None, tensors={"w": tensor}).create_adapter()
            ranks.append(parts_of_boxes(adapter.boxes()))
    assert differing(assemble(ranks), {"w": full}) == []


def at_rank(shape: tuple[int, ...], placement: Any, size: int, rank: int) -> Layout:
    return Layout(shape, (placement,), (size,), (0,), (rank,))


class TestPlacement:
    def test_partial_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"is placed as Partial.*redistribute it"):
            part_of(at_rank((4,), Partial(), 2, 0))

    def test_an_unknown_placement_is_refused(self) -> None:
        class Odd:
            def is_replicate(self) -> bool:
                return False

            is_partial = is_replicate

        with pytest.raises(UsageError, match=r"placement .*Odd.* is of an unknown kind"):
            part_of(at_rank((4,), Odd(), 2, 0))

    def test_runs_that_adjoin_are_one_block(self) -> None:
        part = part_of(at_rank((6, 3), _StridedShard(0, split_factor=2), 1, 0))
        assert part == Part((6, 3), (Block((0, 0), (6, 3), (0, 0)),))
        part = part_of(at_rank((8,), _StridedShard(0, split_factor=2), 2, 1))
        assert part == Part((4,), (Block((2,), (2,), (0,)), Block((6,), (2,), (2,))))


def random_shapes(rng: random.Random) -> dict[str, tuple[int, ...]]:
    return {
        f"n{number}": tuple(rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
        for number in range(2)
    }


def random_conversion(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A few operations in a row, the same ones for the same seed; those that can't be done are left out."""
    rng = random.Random(seed)
    pool = list(tensors.values())
    for _ in range(rng.randint(1, 5)):
        tensor = rng.choice(pool)
        try:
            pool += random_operation(tensor, rng)
        except (IndexError, ValueError, RuntimeError):
            continue
    return {f"o{number}": tensor for number, tensor in enumerate(pool)}


def random_operation(tensor: torch.Tensor, rng: random.Random) -> list[torch.Tensor]:
    operations: list[Any] = [
        lambda: [tensor.clone()],
        lambda: [tensor.contiguous()],
        lambda: [tensor.unsqueeze(0)],
        lambda: [tensor.reshape(-1)],
        lambda: [tensor[::2]],
        lambda: [tensor.unsqueeze(0).expand(2, *tensor.shape)],
        lambda: [tensor.permute(rng.sample(range(tensor.ndim), tensor.ndim))],
        lambda: [tensor.reshape(rng.choice([1, 2, 3, 4]), -1)],
        lambda: [torch.stack([tensor, tensor], rng.randrange(tensor.ndim + 1))],
        lambda: list(tensor.chunk(2, rng.randrange(tensor.ndim))),
    ]
    if tensor.ndim:
        dim = rng.randrange(tensor.ndim)
        begin = rng.randrange(tensor.shape[dim])
        length = rng.randint(1, tensor.shape[dim] - begin)
        flat = rng.randrange(tensor.numel())
        operations += [
            lambda: [tensor.narrow(dim, begin, length)],
            lambda: [tensor.select(dim, begin)],
            lambda: list(tensor.split(length, dim)),
            lambda: [tensor.reshape(-1)[flat : flat + length]],
            lambda: [torch.cat([tensor, tensor.narrow(dim, begin, length)], dim)],
        ]
    found: list[torch.Tensor] = rng.choice(operations)()
    return found


@pytest.mark.parametrize(
    "seeds", [range(n, n + 100) for n in range(0, 400, 100)], ids=lambda r: f"from {r[0]}"
)
def test_a_traced_conversion_gives_what_torch_gives(seeds: range) -> None:
    refused = sum(_compare(seed) for seed in seeds)
    assert refused < len(seeds), "nearly everything that is a view must be possible"


def _compare(seed: int) -> int:
    """Cut the tensors at random, publish a random conversion of all parts; how many were refused."""
    rng = random.Random(seed)
    shapes = random_shapes(rng)
    published = trace(
        lambda tensors: random_conversion(tensors, seed),
        tuple((name, shape, torch.float32) for name, shape in shapes.items()),
    )
    full = {name: numbered(*shape, start=1000 * at) for at, (name, shape) in enumerate(shapes.items(), 1)}
    wanted = random_conversion(full, seed)
    parts: list[support.Part] = []
    refused: set[str] = set()
    for native, offset, local in _cells(full, rng):
        for name, view in published.items():
            piece = Piece(native, offset, tuple(local.shape), local.storage_offset(), local.stride())

            def held(one: Native, piece: Piece = piece) -> list[Piece]:
                return [piece] if one.name == piece.native else []

            try:
                found = pieces_of(name, view, held)
            except UsageError as error:
                if "across its dimensions" not in str(error):
                    raise
                refused.add(name)
                continue
            boxes = [box for one in found for box in contiguous(one)]
            assert len(boxes) == sum(contiguous_count(one) for one in found)
            at = local.untyped_storage().data_ptr()
            parts += [
                support.Part(name, "torch.float32", view.sizes, box.offset, box.shape, at + 4 * box.start)
                for box in boxes
            ]
    kept = [part for part in parts if part.name not in refused]
    assert sum(part.values.numel() for part in kept) == sum(
        tensor.numel() for name, tensor in wanted.items() if name not in refused
    )
    assert differing(assemble([kept]), {n: t for n, t in wanted.items() if n not in refused}) == []
    return len(refused)


def _cells(full: dict[str, torch.Tensor], rng: random.Random) -> Any:
    for name, tensor in full.items():
        cuts = [
            sorted({0, extent, *(rng.randint(0, extent) for _ in range(rng.choice([0, 1, 2])))})
            for extent in tensor.shape
        ]
        for cell in itertools.product(*(itertools.pairwise(one) for one in cuts)):
            local = tensor[tuple(slice(begin, end) for begin, end in cell)].clone()
            if local.ndim == 2 and rng.random() < 0.4:
                local = local.T.contiguous().T
            yield name, tuple(begin for begin, _ in cell), local
