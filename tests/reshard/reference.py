"""Random meshes with real memory, and the plain way to refit: gather every tensor, then slice it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest
from modelexpress_rl.reshard.merge import Merged, SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.plan import Plan

ELSIZE = {"torch.uint8": 1, "torch.bfloat16": 2, "torch.float32": 4, "torch.float64": 8}
Axis = list[int]  # the cuts of one axis: 0, ..., extent


@dataclass
class World:
    """Tensors as plain arrays (bytes in a last axis of elsize), sources that hold copies of boxes."""

    tensors: dict[str, tuple[str, NDArray[np.uint8]]]
    manifests: list[SourceManifest]
    buffers: list[NDArray[np.uint8]] = field(default_factory=list)

    def merged(self) -> Merged:
        return merge(self.manifests)

    def expected(self, need: Need) -> bytes:
        """Gather and slice."""
        whole = self.tensors[need.name][1]
        box = tuple(slice(a, a + n) for a, n in zip(need.offset, need.shape, strict=True))
        return whole[box].tobytes()


def address(array: NDArray[np.uint8]) -> int:
    return int(array.ctypes.data)


def pull(plan: Plan, arena: NDArray[np.uint8], rows: NDArray[np.int64] | None = None) -> None:
    """Copy runs the way a transport would: by address, knowing nothing of boxes."""
    if rows is not None:
        groups = [plan.runs(rows)]
    else:
        groups = [plan.runs(reads) for reads in plan.reads]
    for runs in groups:
        for remote, local, size in zip(
            runs.remote_addr.tolist(), runs.local_offset.tolist(), runs.size_bytes.tolist(), strict=True
        ):
            assert local + size <= len(arena)
            ctypes.memmove(address(arena) + local, remote, size)


def need_bytes(needs: NeedTable, arena: NDArray[np.uint8], need: int) -> bytes:
    at = int(needs.local_offset[need])
    return arena[at : at + int(needs.size_bytes[need])].tobytes()


Piece = tuple[str, tuple[int, ...], tuple[int, ...]]


def publish(
    tensors: dict[str, tuple[str, NDArray[np.uint8]]], sources: list[list[Piece]], *, gap_bytes: int = 0
) -> World:
    """Give each source real memory with a copy of each of its boxes (name, offset, shape)."""
    world = World(tensors, [])
    for number, boxes in enumerate(sources):
        copies = []
        for name, offset, shape in boxes:
            whole = tensors[name][1]
            copies.append(whole[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))].tobytes())
        memory = np.zeros(sum(len(c) + gap_bytes for c in copies) + 1, np.uint8)
        shards, at = [], 0
        for (name, offset, shape), copy in zip(boxes, copies, strict=True):
            memory[at : at + len(copy)] = np.frombuffer(copy, np.uint8)
            dtype, whole = tensors[name]
            shards.append(
                Shard(
                    name, dtype, whole.shape[:-1], offset, shape, address(memory) + at, device_id=number % 2
                )
            )
            at += len(copy) + gap_bytes
        world.buffers.append(memory)
        table = ShardTable.build(shards)
        agent = f"agent-{number}"
        world.manifests.append(
            SourceManifest.of(f"slot-{number}", f"w{number}", Manifest(agent, "", b"", table))
        )
    return world


def cut(extent: int, draw: st.DrawFn) -> Axis:
    """Cut an axis at random, unevenly, sometimes into empty parts."""
    count = draw(st.integers(1, 3))
    return [
        0,
        *sorted(draw(st.lists(st.integers(0, extent), min_size=count - 1, max_size=count - 1))),
        extent,
    ]


@st.composite
def worlds(draw: st.DrawFn, *, conflicting: bool = True) -> tuple[World, list[Need]]:
    """A world whose sources hold every element, and needs of random boxes.

    Tensors of rank 0 to 4 are cut along several axes into uneven, sometimes empty boxes, dealt out to
    sources with replicas; with `conflicting`, some are published once more in another cutting.
    """
    source_count = draw(st.integers(1, 4))
    sources: list[list[Piece]] = [[] for _ in range(source_count)]
    tensors: dict[str, tuple[str, NDArray[np.uint8]]] = {}
    needs: list[Need] = []
    noise = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    for number in range(draw(st.integers(1, 4))):
        name = f"layer.{number}.weight"
        dtype = draw(st.sampled_from(sorted(ELSIZE)))
        shape = tuple(draw(st.lists(st.integers(0 if number else 1, 6), max_size=4)))
        tensors[name] = (dtype, noise.integers(0, 256, (*shape, ELSIZE[dtype]), np.uint8))
        for _ in range(draw(st.integers(1, 2)) if conflicting else 1):
            cuts = [cut(extent, draw) for extent in shape]
            for index in np.ndindex(*(len(axis) - 1 for axis in cuts)):
                offset = tuple(axis[i] for axis, i in zip(cuts, index, strict=True))
                size = tuple(axis[i + 1] - axis[i] for axis, i in zip(cuts, index, strict=True))
                holders = draw(st.sets(st.integers(0, source_count - 1), min_size=1, max_size=2))
                for holder in sorted(holders):
                    sources[holder].append((name, offset, size))
        for _ in range(draw(st.integers(0, 3))):
            offset = tuple(draw(st.integers(0, extent)) for extent in shape)
            size = tuple(
                draw(st.integers(0, extent - begin)) for extent, begin in zip(shape, offset, strict=True)
            )
            needs.append(Need(name, dtype, offset, size))
        if draw(st.booleans()):
            needs.append(Need(name, dtype, (0,) * len(shape), shape))
    return publish(tensors, sources, gap_bytes=draw(st.sampled_from([0, 8]))), needs
