"""Readers say which columns they want, and the next copy is laid out for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import anyio
import numpy as np
import pytest

from modelexpress_rl.column_blocks import MAX_DECLARED_BLOCKS, MAX_DECLARED_RULES, ColumnBlocks
from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.reshard.needs import Need
from modelexpress_rl.train.reader_columns import MAX_USELESS_RULES, ReaderColumns
from modelexpress_rl.transport.inprocess import Hub
from tests.train.mixed_bytes import trainer_of
from tests.train.support import MODEL, Orchestrator, control_plane

DOWN, UP = "model.layers.0.down_proj.weight", "model.layers.0.up_proj.weight"
ROWS, COLUMNS = 64, 96


TENSORS = {f"model.layers.{n}.{name}.weight": 96 for n in range(3) for name in ("o_proj", "down_proj")}
O_PROJ, DOWN_PROJ = list(TENSORS)[:2]


def tensors() -> dict[str, int]:
    return TENSORS


def settled(columns: ReaderColumns) -> ColumnBlocks:
    columns.settle(tensors)
    return columns.blocks


def count(columns: ReaderColumns, name: str) -> int:
    return settled(columns).count(name, TENSORS[name])


def test_what_readers_declare_adds_up() -> None:
    columns = ReaderColumns()
    assert settled(columns) == ColumnBlocks()
    columns.hear("*.o_proj.weight=4,*.down_proj.weight=4")
    columns.hear("*.down_proj.weight=6")
    assert (count(columns, O_PROJ), count(columns, DOWN_PROJ)) == (4, 12)
    before = settled(columns)
    columns.hear("*.down_proj.weight=2")
    columns.hear("*.down_proj.weight=6")
    columns.hear("")
    assert settled(columns) is before


def test_what_is_heard_counts_from_the_next_version_on() -> None:
    columns = ReaderColumns()
    before = columns.blocks
    columns.hear("*.o_proj.weight=4")
    assert columns.blocks is before
    assert settled(columns) is not before


def test_a_configuration_counts_alone() -> None:
    for configured in (ColumnBlocks(), ColumnBlocks.of(1), ColumnBlocks.of(4)):
        columns = ReaderColumns(configured)
        columns.hear("*.down_proj.weight=2")
        assert settled(columns) is configured


@pytest.mark.parametrize(
    "hostile",
    [
        "*.o_proj.weight=61",  # 96 columns are no 61 blocks
        "*.o_proj.weight=64",
        "*=5,o*=7",
        ",".join(f"n{n}=3" for n in range(MAX_DECLARED_RULES)),
    ],
)
def test_one_reader_s_odd_wishes_take_nothing_from_the_others(hostile: str) -> None:
    columns = ReaderColumns()
    for _ in range(3):
        columns.hear(hostile)
        assert settled(columns) == ColumnBlocks()
    columns.hear("*.o_proj.weight=4")
    assert count(columns, O_PROJ) == 4


def test_a_wish_for_all_names_does_not_hide_a_closer_one() -> None:
    columns = ReaderColumns()
    columns.hear("*=2,*.o_proj.weight=3")
    assert (count(columns, O_PROJ), count(columns, DOWN_PROJ)) == (6, 2)


def test_blocks_that_together_are_too_many_are_those_that_came_first() -> None:
    columns = ReaderColumns()
    columns.hear("*.o_proj.weight=48")
    columns.hear("*.o_proj.weight=32")
    assert count(columns, O_PROJ) == 48


def test_who_only_wishes_for_nonsense_is_no_longer_heard() -> None:
    columns = ReaderColumns()
    asked: list[int] = []

    def counted() -> dict[str, int]:
        asked.append(1)
        return TENSORS

    for number in range(100):
        columns.hear(",".join(f"w{number}.{n}=2" for n in range(MAX_DECLARED_RULES)))
        columns.settle(counted)
    assert len(asked) == MAX_USELESS_RULES // MAX_DECLARED_RULES


@pytest.mark.parametrize(
    "text",
    [
        "4",
        "=",
        "a=",
        "a=x",
        "a=0",
        "a=-4",
        "a=1",
        f"a={MAX_DECLARED_BLOCKS + 1}",
        "a b=4",
        "ä=4",
        f"{'a' * 129}=4",
        "[!a]=4",
        "," * 1000,
        "x" * 100_000,
    ],
)
def test_what_makes_no_sense_is_ignored(text: str) -> None:
    columns = ReaderColumns()
    columns.hear(text)
    assert settled(columns) == ColumnBlocks()


class Engine:
    """Needs a slice of the columns of one tensor, and the whole of the other."""

    def __init__(self, part: int, parts: int) -> None:
        self.column = part * COLUMNS // parts
        shape = (ROWS, COLUMNS // parts)
        self.needs: Sequence[Need] = [
            Need(DOWN, "torch.float32", (0, self.column), shape),
            Need(UP, "torch.float32", (0, 0), (ROWS, COLUMNS)),
        ]
        self.held: list[np.ndarray] = []

    def create_adapter(self) -> Engine:
        return self

    def loader(self, _: Mapping[str, PublishedTensor]) -> Engine:
        return self

    def check(self, staged: Sequence[StagedTensor]) -> None:
        pass

    def install(self, staged: Sequence[StagedTensor]) -> None:
        self.held = [
            each.data.view(np.float32).reshape(need.shape).copy()
            for need, each in zip(self.needs, staged, strict=True)
        ]


@pytest.mark.anyio
@pytest.mark.parametrize("column_blocks", [None, 1])
async def test_the_second_version_is_laid_out_as_its_readers_want_it(
    column_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    hub = Hub()

    async def agent_of(_: object) -> object:
        return hub.agent("trainer")

    weights = {DOWN: np.zeros((ROWS, COLUMNS), np.float32), UP: np.zeros((ROWS, COLUMNS), np.float32)}
    read_for_one_needed: list[list[float]] = []
    async with control_plane() as address, AsyncExitStack() as stack:
        orchestrator = Orchestrator(address)
        stack.push_async_callback(orchestrator.plane.aclose)
        made = trainer_of(
            address,
            agent_of,  # type: ignore[arg-type]
            staging_mode="COPY_TO_HOST",
            column_blocks=column_blocks,
        )
        trainer = await stack.enter_async_context(made)
        await trainer.bind_tensors(weights)
        engines = [Engine(0, 2), Engine(2, 3)]
        clients = [
            await stack.enter_async_context(
                await AsyncModelExpressGeneratorClient.initialize(
                    ModelExpressGeneratorConfig(engine_context=engine, model_name=MODEL, server_url=address),
                    agent=hub.agent(f"reader {number}"),
                )
            )
            for number, engine in enumerate(engines)
        ]
        for step in (1, 2, 3):
            for number, weight in enumerate(weights.values()):
                weight[...] = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) + step * 10_000 + number
            await orchestrator.create(str(step))
            staged = await trainer.publish_version(str(step))
            read_for_one_needed.append([])
            for engine, client in zip(engines, clients, strict=True):
                read = await client.stage_weight(str(step))
                read_for_one_needed[-1].append(float(read.metrics["amplification"]))
                assert read.metrics["unverified_bytes"] == 0
                await client.apply_weight(read)
                width = engine.held[0].shape[1]
                assert np.array_equal(engine.held[0], weights[DOWN][:, engine.column : engine.column + width])
                assert np.array_equal(engine.held[1], weights[UP])
            await orchestrator.release(str(step))
            with anyio.fail_after(10):
                await staged.source_reuse_ready.wait()
    # Whole rows until the trainer knows; then six blocks of columns, no byte for nothing.
    settled_at = [[1.0, 1.0] if column_blocks is None else [4 / 3, 1.5]]
    assert read_for_one_needed == [[4 / 3, 1.5], *settled_at * 2]
