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
from modelexpress_rl.train.reader_columns import ReaderColumns
from modelexpress_rl.transport.inprocess import Hub
from tests.train.mixed_bytes import trainer_of
from tests.train.support import MODEL, Orchestrator, control_plane

DOWN, UP = "model.layers.0.down_proj.weight", "model.layers.0.up_proj.weight"
ROWS, COLUMNS = 64, 96


def test_what_readers_declare_adds_up() -> None:
    columns = ReaderColumns()
    assert columns.blocks == ColumnBlocks()
    columns.hear("*.o_proj.weight=4,*.down_proj.weight=4")
    columns.hear("*.down_proj.weight=6")
    assert columns.blocks.count("a.o_proj.weight") == 4
    assert columns.blocks.count("a.down_proj.weight") == 12
    before = columns.blocks
    columns.hear("*.down_proj.weight=2")
    columns.hear(str(before))
    columns.hear("")
    assert columns.blocks is before


def test_a_configuration_counts_alone() -> None:
    for configured in (ColumnBlocks(), ColumnBlocks.of(1), ColumnBlocks.of(4)):
        columns = ReaderColumns(configured)
        columns.hear("*.down_proj.weight=2")
        assert columns.blocks is configured


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
    assert columns.blocks == ColumnBlocks()


def test_many_readers_can_not_make_it_grow_without_bound() -> None:
    columns = ReaderColumns()
    for prime in (2, 3, 5, 7, 11, 13, 61):
        columns.hear(f"a.w={prime}")
    assert columns.blocks.count("a.w") == 30
    for number in range(3):
        columns.hear(",".join(f"w{number}.{n}=2" for n in range(MAX_DECLARED_RULES)))
    assert len(columns.blocks.rules) == MAX_DECLARED_RULES


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
    # Whole rows, or many runs, until the trainer knows; then six blocks of columns, no byte for nothing.
    assert read_for_one_needed == [[4 / 3, 1.5], *[[1.0, 1.0] if column_blocks is None else [4 / 3, 1.5]] * 2]
