"""The weights of every version, how trainers hold them, and the engine that loads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.reshard.needs import Need
from modelexpress_rl.train.engines.plain import PlainBox

SHAPES = {"w": (8, 6), "b": (8,)}
ROWS = 8
SLOTS = ("s0", "s1")
Array = NDArray[np.float32]


@cache
def weights(version: str) -> Mapping[str, Array]:
    """What a version is: bytes that no other version has, in every element."""
    made = {}
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        stream = b"".join(
            hashlib.sha256(f"{version} {name} {block}".encode()).digest() for block in range(size // 8 + 1)
        )
        made[name] = np.frombuffer(stream[: 4 * size], np.float32).reshape(shape)
    return made


def rows_of(slot: str) -> slice:
    """The rows of every tensor that a slot holds."""
    share = ROWS // len(SLOTS)
    begin = SLOTS.index(slot) * share
    return slice(begin, begin + share)


class Buffer:
    """One slot's share of the weights, in memory of its trainer."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.rows = rows_of(slot)
        count = self.rows.stop - self.rows.start
        sizes = {name: count * int(np.prod(shape[1:])) for name, shape in SHAPES.items()}
        # One piece of memory, so that it never depends on an allocator which tensor comes first.
        whole = np.zeros(sum(sizes.values()), np.float32)
        ends = np.cumsum(list(sizes.values())).tolist()
        self.arrays = {
            name: whole[end - sizes[name] : end].reshape(count, *SHAPES[name][1:])
            for name, end in zip(SHAPES, ends, strict=True)
        }

    def write(self, version: str) -> None:
        """Hold this version."""
        for name, whole in weights(version).items():
            self.arrays[name][...] = whole[self.rows]

    def spoil(self) -> None:
        """What the owner does with memory that is its own again."""
        for array in self.arrays.values():
            array.reshape(-1).view(np.uint8)[...] = 0xA5

    def boxes(self) -> list[PlainBox]:
        """The same, as the trainer's client takes it."""
        return [
            PlainBox(name, array, SHAPES[name], (self.rows.start, *(0,) * (array.ndim - 1)))
            for name, array in self.arrays.items()
        ]


@dataclass
class Engine:
    """An inference engine that holds `rows` of every tensor; it is its context, adapter and loader in one.

    `fails_after` tensors an install stops half-way, once.
    """

    rows: slice
    fails_after: int | None = None
    parameters: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.needs = [
            Need(
                name,
                "torch.float32",
                (self.rows.start, *(0,) * (len(shape) - 1)),
                (self.rows.stop - self.rows.start, *shape[1:]),
            )
            for name, shape in SHAPES.items()
        ]

    def create_adapter(self) -> Engine:
        return self

    def loader(self, published: Mapping[str, PublishedTensor]) -> Engine:
        return self

    def check(self, staged: Sequence[StagedTensor]) -> None:
        return

    def install(self, staged: Sequence[StagedTensor]) -> None:
        for number, tensor in enumerate(staged):
            if self.fails_after == number:
                self.fails_after = None
                raise RuntimeError("the simulation stopped the install half-way")
            self.parameters[tensor.need.name] = tensor.data.tobytes()

    def expected(self, version: str) -> dict[str, bytes]:
        """The parameters that hold this version and nothing else."""
        return {name: whole[self.rows].tobytes() for name, whole in weights(version).items()}
