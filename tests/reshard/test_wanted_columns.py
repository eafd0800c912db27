"""What a reader tells trainers: only what would make its reads fewer, and be right for all of a name."""

from __future__ import annotations

import numpy as np
import pytest

from modelexpress_rl.column_blocks import LONG_RUN_BYTES, MAX_DECLARED_BLOCKS, MIN_ROWS
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.reshard.wanted_columns import wanted_columns
from tests.reshard.reference import publish

Box = tuple[tuple[int, ...], tuple[int, ...]]


def wanted(tensors: dict[str, tuple[tuple[int, ...], list[Box], list[Box]]]) -> str:
    """Of tensors of bytes: (shape, boxes held, boxes needed) by name."""
    arrays = {
        name: ("torch.uint8", np.zeros((*shape, 1), np.uint8)) for name, (shape, _, _) in tensors.items()
    }
    world = publish(arrays, [[(name, *box) for name, (_, held, _) in tensors.items() for box in held]])
    needs = NeedTable.build(
        [Need(name, "torch.uint8", *box) for name, (_, _, needed) in tensors.items() for box in needed]
    )
    merged = world.merged()
    return str(wanted_columns(plan(needs, merged), needs, merged))


WHOLE: Box = ((0, 0), (32, 48))
HALF: Box = ((0, 24), (32, 24))
THIRD: Box = ((0, 16), (32, 16))
ROWS: Box = ((16, 0), (16, 48))


@pytest.mark.parametrize(
    ("held", "needed", "expected"),
    [
        ([WHOLE], [HALF], "*.mlp.down=2"),
        ([WHOLE], [HALF, THIRD], "*.mlp.down=6"),
        ([ROWS, ((0, 0), (16, 48))], [HALF], "*.mlp.down=2"),  # a trainer that shards rows
        ([WHOLE], [WHOLE], ""),
        ([WHOLE], [ROWS], ""),
        ([((0, 0), (32, 24)), HALF], [HALF], ""),  # held so already
        ([((0, 0), (32, 24)), HALF], [WHOLE], ""),
        ([WHOLE], [((0, 10), (32, 24))], ""),  # at no whole block
        ([WHOLE], [((0, 0), (32, 20))], ""),
        ([WHOLE], [HALF, ((0, 10), (32, 24))], ""),
        ([WHOLE], [((0, 24), (16, 24))], ""),  # cut along both axes: others may take its rows
        ([WHOLE], [], ""),
    ],
)
def test_one_tensor(held: list[Box], needed: list[Box], expected: str) -> None:
    assert wanted({"model.0.mlp.down": ((32, 48), held, needed)}) == expected


def test_few_runs_and_long_ones_are_no_burden() -> None:
    rows, columns = MIN_ROWS - 1, 2 * LONG_RUN_BYTES
    assert wanted({"m.a.w": ((rows, 8), [((0, 0), (rows, 8))], [((0, 0), (rows, 4))])}) == ""
    assert wanted({"m.a.w": ((16, columns), [((0, 0), (16, columns))], [((0, 0), (16, columns // 2))])}) == ""


def test_layers_and_experts_are_asked_for_alike() -> None:
    names = ["model.0.mlp.down", "model.1.mlp.down", "model.1.attn.o", "norm"]
    assert wanted({name: ((32, 48), [WHOLE], [HALF]) for name in names}) == "*.attn.o=2,*.mlp.down=2,norm=2"
    others = {
        "model.0.mlp.down": ((32, 48), [WHOLE], [HALF]),
        "model.1.mlp.down": ((32, 48), [WHOLE], [ROWS]),
    }
    assert wanted(others) == ""


def test_names_that_can_not_be_sent_and_blocks_that_are_too_many_are_left_out() -> None:
    columns = MAX_DECLARED_BLOCKS + 1
    assert wanted({"m.ä.w": ((32, 48), [WHOLE], [HALF])}) == ""
    assert wanted({"m.a.w": ((32, columns), [((0, 0), (32, columns))], [((0, 0), (32, 1))])}) == ""


def test_experts_in_one_tensor() -> None:
    held = [((0, 0, 0), (4, 32, 48))]
    assert wanted({"m.w2.weight": ((4, 32, 48), held, [((0, 0, 24), (4, 32, 24))])}) == "*.w2.weight=2"
    # Some experts, and columns of those: that is cut along another axis, too.
    assert wanted({"m.w2.weight": ((4, 32, 48), held, [((0, 0, 24), (2, 32, 24))])}) == ""
