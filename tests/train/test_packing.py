"""Tensors stored in blocks of columns: a column slice is one run, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard.memory import bytes_at
from modelexpress_rl.reshard.merge import SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan
from modelexpress_rl.timing import RefitRecord, RefitTimings
from modelexpress_rl.train.adapter import SourceBox, StagedWeightVersionShardData
from modelexpress_rl.train.engines.plain import PlainAdapter, PlainBox, PlainTrainerContext
from modelexpress_rl.train.packing import packed
from modelexpress_rl.train.reader_columns import ReaderColumns
from modelexpress_rl.train.staging import Stager
from modelexpress_rl.transport.inprocess import Hub

pytestmark = pytest.mark.anyio

DOWN = "model.layers.0.mlp.down_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def boxes_of(*boxes: PlainBox) -> tuple[SourceBox, ...]:
    adapter = PlainAdapter(PlainTrainerContext(boxes))
    adapter.bind_tensors(boxes)
    return adapter.boxes()


async def copied(
    stager: Stager, boxes: tuple[SourceBox, ...], version_id: str, record: RefitRecord
) -> StagedWeightVersionShardData:
    return await stager.copy(boxes, await stager.generations.reserve(version_id, 5.0), record)


def noise(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(dtype)


class TestColumnBlocks:
    def test_a_number_is_for_row_parallel_weights(self) -> None:
        blocks = ColumnBlocks.of(4)
        assert [blocks.count(name, 96) for name in (DOWN, UP, "x.o_proj.weight", "o_proj.bias")] == [
            4,
            1,
            4,
            1,
        ]

    def test_the_first_pattern_that_fits_counts(self) -> None:
        blocks = ColumnBlocks.of({"*.3.*": 2, "*.o_proj.weight": 8})
        assert [blocks.count(f"layers.{n}.o_proj.weight", 96) for n in (3, 4)] == [2, 8]

    @pytest.mark.parametrize("value", [0, -1, True, 2000, {"": 2}, {"a": "2"}, "4"])
    def test_what_makes_no_sense_is_refused(self, value: Any) -> None:
        with pytest.raises(UsageError, match="column_blocks: expected a number of blocks, or name patterns"):
            ColumnBlocks.of(value)


class TestWhatIsPacked:
    def test_cuts_are_those_of_the_global_tensor(self) -> None:
        data = noise(64, 48)
        (box,) = boxes_of(PlainBox(DOWN, data, full_shape=(64, 128), offset=(0, 40)))
        assert packed([box], ColumnBlocks.of(4))[0].cuts == (0, 24, 48)  # at 64, of 32, 64, 96

    @pytest.mark.parametrize(
        ("box", "count"),
        [
            (PlainBox(UP, noise(64, 128)), 4),  # its readers cut rows
            (PlainBox(DOWN, noise(64, 128)), 3),  # not into equal blocks
            (PlainBox(DOWN, noise(128)), 4),  # no rows
            (PlainBox(DOWN, noise(0, 128)), 4),  # empty
            (PlainBox(DOWN, noise(8, 128)), 4),  # few runs
            (PlainBox(DOWN, noise(16, 1 << 16)), 4),  # long ones
            (PlainBox(DOWN, noise(64, 32), full_shape=(64, 128), offset=(0, 32)), 4),  # a block already
        ],
    )
    def test_what_is_not_worth_it_is_left_alone(self, box: PlainBox, count: int) -> None:
        assert packed(boxes_of(box), ColumnBlocks.of(count)) == {}

    def test_memory_that_is_shared_is_left_alone(self) -> None:
        data = noise(192, 128)
        boxes = boxes_of(
            PlainBox(DOWN, data[:64]),
            PlainBox("tied", data[32:64]),
            PlainBox("b.down_proj.weight", data[64:128]),
        )
        assert list(packed(boxes, ColumnBlocks.of(4))) == [2]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
async def test_a_copy_has_the_bytes_and_a_slice_is_one_run(dtype: Any) -> None:
    down, experts = noise(64, 128, dtype=dtype), noise(4, 32, 64, dtype=dtype)
    up, bias = noise(96, 64, dtype=dtype), noise(7, dtype=dtype)
    boxes = boxes_of(
        PlainBox(UP, up),
        PlainBox(DOWN, down),
        PlainBox("bias", bias),
        PlainBox("experts.down_proj.weight", experts),
    )
    stager = Stager(Hub().agent("trainer"), columns=ReaderColumns(ColumnBlocks.of(4)))
    record = RefitTimings("trainer").begin("v1")
    staged = await copied(stager, boxes, "v1", record)
    down[...], experts[...] = 0, 0  # what is published is the copy
    down, experts = noise(64, 128, dtype=dtype), noise(4, 32, 64, dtype=dtype)

    manifest = manifests.decode(staged.manifest.data)
    assert staged.manifest.total_bytes == sum(box.size_bytes for box in boxes)
    table = manifest.table
    assert len(table) == 1 + 4 + 1 + 4
    whole = {UP: up, DOWN: down, "bias": bias, "experts.down_proj.weight": experts}
    for row in range(len(table)):
        offset, shape = table.box(row)
        part = whole[table.tensors.names[int(table.tensor[row])]][
            tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
        ]
        assert bytes_at(int(table.addr[row]), int(table.size_bytes[row])).tobytes() == part.tobytes()

    merged = merge([SourceManifest.of("s", "w", manifest)])
    for parts in (1, 2, 4):
        for name in (DOWN, "experts.down_proj.weight"):
            shape = (*whole[name].shape[:-1], whole[name].shape[-1] // parts)
            offset = (*(0 for _ in shape[1:]), shape[-1] * (parts - 1))
            made = plan(NeedTable.build([Need(name, boxes[0].dtype, offset, shape)]), merged)
            assert made.amplification == 1.0
            assert all(made.pieces.run_count <= (1 if parts == 4 else 128))
    await stager.aclose()


async def test_the_same_tensors_are_laid_out_once() -> None:
    boxes = boxes_of(PlainBox(DOWN, noise(64, 128)), PlainBox(UP, noise(64, 128)))
    stager = Stager(Hub().agent("trainer"), columns=ReaderColumns(ColumnBlocks.of(4)))
    record = RefitTimings("trainer").begin("v1")
    first = await copied(stager, boxes, "v1", record)
    first.buffer_owner.release()
    again = await copied(stager, boxes, "v2", record)
    assert again.manifest is first.manifest
    await stager.aclose()


async def test_a_copy_lies_in_the_order_of_publication() -> None:
    """So that digests are made, and read, in the order in which the bytes are."""
    whole = np.arange(64 * 300, dtype=np.int32)
    parts = [whole[n * 64 : (n + 1) * 64] for n in range(0, 300, 3)]  # nothing touches
    boxes = boxes_of(*(PlainBox(f"t{n}", part) for n, part in enumerate(reversed(parts))))
    stager = Stager(Hub().agent("trainer"))
    staged = await copied(stager, boxes, "v1", RefitTimings("trainer").begin("v1"))
    table = manifests.decode(staged.manifest.data).table
    assert np.diff(table.addr.astype(np.int64)).tolist() == [256] * 99
    for row, part in enumerate(reversed(parts)):
        assert bytes_at(int(table.addr[row]), 256).tobytes() == part.tobytes()
    await stager.aclose()
