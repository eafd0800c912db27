"""The cases of the `transfer` benchmark: what a trainer holds, and what a generator needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from modelexpress_rl.reshard.needs import Need

Box = tuple[tuple[int, ...], tuple[int, ...]]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
TENSOR_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of int32: the boxes that the trainer holds, and the one that is needed."""

    name: str
    shape: tuple[int, int]
    held: tuple[Box, ...]
    need: Box


@dataclass(frozen=True, slots=True)
class Case:
    """`tensors(bytes)` makes tensors of which about so many bytes are needed."""

    name: str
    tensors: Callable[[int], list[Tensor]]
    mode: str = "IN_PLACE"
    column_blocks: dict[str, int] = field(default_factory=dict)


def values(number: int, tensor: Tensor, box: Box, step: int) -> Ints:
    """The bytes of a box at a step: no two tensors, steps or places are alike."""
    (row, column), (rows, columns) = box
    first = number * 7919 + step * 104729
    grid = np.arange(row, row + rows, dtype=np.int32)[:, None] * np.int32(tensor.shape[1])
    out: Ints = grid + np.arange(column, column + columns, dtype=np.int32) + np.int32(first)
    return out


def needs(tensors: list[Tensor]) -> list[Need]:
    """What the generator loads."""
    return [Need(each.name, "torch.int32", *each.need) for each in tensors]


def _several(total_bytes: int, need_bytes: int, make: Callable[[str], Tensor]) -> list[Tensor]:
    return [make(f"layers.{n}.down_proj.weight") for n in range(max(1, total_bytes // need_bytes))]


def _aligned(total_bytes: int) -> list[Tensor]:
    box = ((0, 0), (TENSOR_BYTES // 4096, 1024))
    return _several(total_bytes, TENSOR_BYTES, lambda name: Tensor(name, box[1], (box,), box))


def _row_split(total_bytes: int) -> list[Tensor]:
    """The trainer holds two halves, the generator needs what lies between their quarters."""
    rows, columns = TENSOR_BYTES * 2 // 4096, 1024
    held = tuple(((half * rows // 2, 0), (rows // 2, columns)) for half in (0, 1))
    need = ((rows // 4, 0), (rows // 2, columns))
    return _several(total_bytes, TENSOR_BYTES, lambda name: Tensor(name, (rows, columns), held, need))


def _columns(row_bytes: int, numerator: int, denominator: int) -> Callable[[int], list[Tensor]]:
    """The generator needs a part of the columns of rows that the trainer holds whole."""

    def make(total_bytes: int) -> list[Tensor]:
        columns = row_bytes // 4
        rows = TENSOR_BYTES * denominator // numerator // row_bytes // 32 * 32
        held: Box = ((0, 0), (rows, columns))
        need: Box = ((0, 0), (rows, columns * numerator // denominator))
        need_bytes = need[1][0] * need[1][1] * 4
        return _several(total_bytes, need_bytes, lambda name: Tensor(name, held[1], (held,), need))

    return make


def _column_shards(row_bytes: int) -> Callable[[int], list[Tensor]]:
    """The trainer holds halves of the columns, the generator needs all: rows so long, half of it a run."""

    def make(total_bytes: int) -> list[Tensor]:
        rows, columns = TENSOR_BYTES // row_bytes, row_bytes // 4
        held = tuple(((0, half * columns // 2), (rows, columns // 2)) for half in (0, 1))
        need: Box = ((0, 0), (rows, columns))
        return _several(total_bytes, TENSOR_BYTES, lambda name: Tensor(name, (rows, columns), held, need))

    return make


def _many_small(_: int) -> list[Tensor]:
    box: Box = ((0, 0), (4, 256))
    return [Tensor(f"layers.{n}.norm.weight", box[1], (box,), box) for n in range(20_000)]


CASES = (
    Case("aligned", _aligned),
    Case("row_split", _row_split),
    Case("column_exact", _column_shards(64 << 10)),
    Case("column_staged", _column_shards(8 << 10)),
    Case("column_packed", _columns(4 << 10, 1, 2), "COPY_TO_HOST", {"*": 2}),
    Case("many_small", _many_small, "COPY_TO_HOST"),
)
MORE_CASES = (
    Case("column_half_exact", _columns(64 << 10, 1, 2)),
    Case("column_half_staged", _columns(2 << 10, 1, 2)),
    Case("column_most_staged", _columns(4 << 10, 7, 8)),
    Case("many_small_in_place", _many_small),
)


def case(name: str) -> Case:
    """The case of a name."""
    return next(each for each in (*CASES, *MORE_CASES) if each.name == name)


def held_values(tensors: list[Tensor], step: int) -> Iterator[Ints]:
    """What the trainer holds at a step, box after box."""
    for number, tensor in enumerate(tensors):
        for box in tensor.held:
            yield values(number, tensor, box, step)
