"""A trainer that goes on at once, and a generator that is slower: what the tests of mixed bytes share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from modelexpress_rl.errors import VersionGone
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.transport.port import Agent
from tests.train.support import MODEL, SLOT, Orchestrator
from tests.train.versions import Module, pattern, patterns

Read = Callable[[int], Awaitable[bool]]
"""Reads a version and looks at every element of it; whether it was still there."""


@dataclass
class Scene:
    """A job whose trainer trains, and whose generator takes the newest version each time."""

    orchestrator: Orchestrator
    trainer: AsyncModelExpressTrainerClient
    read: Read
    ready: list[int] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    overtaken: list[int] = field(default_factory=list)
    most: dict[str, float] = field(default_factory=dict)
    trained: bool = False
    versions: int = 0

    async def run(self, versions: int) -> None:
        """Train this many versions, each read or superseded."""
        self.versions = versions
        async with anyio.create_task_group() as group:
            group.start_soon(self._generate)
            await self._train(versions)
            self.trained = True

    @property
    def ended(self) -> int:
        """How many versions have been published, or never will be."""
        return len(self.ready) + len(self.skipped) + len(self.overtaken)

    async def _train(self, versions: int) -> None:
        weights = patterns(0)
        await self.trainer.bind_tensors(weights)
        for number in range(1, versions + 1):
            for name, weight in weights.items():
                weight[...] = pattern(name, number)
                await anyio.lowlevel.checkpoint()  # reads may land in the middle of an optimizer step
            await self.orchestrator.create(str(number))
            staged = await self.trainer.publish_version(str(number))
            if staged.skipped:
                self.skipped.append(number)
                await self.orchestrator.release(str(number))
            else:
                self._offer(number, staged.published)
            await staged.weights_free.wait()
            for name, figure in self.trainer.pop_metrics().items():
                self.most[name] = max(figure, self.most.get(name, 0))

    def _offer(self, number: int, published: object) -> None:
        def offer() -> None:
            # One that a newer version overtakes is released before it is announced.
            (self.ready if published.done else self.overtaken).append(number)  # type: ignore[attr-defined]

        published.on_end(offer)  # type: ignore[attr-defined]

    async def _generate(self) -> None:
        while True:
            newest = max(self.ready, default=0)
            if newest > max(self.seen, default=0):
                if await self.read(newest):
                    self.seen.append(newest)
            elif self.trained and self.ended == self.versions:
                return
            await anyio.sleep(0.001)


@contextlib.asynccontextmanager
async def trainer_of(
    address: str, create_agent: Callable[[object], Awaitable[Agent]] | None = None, **config: object
) -> AsyncIterator[AsyncModelExpressTrainerClient]:
    """A trainer that names its weights by their version."""
    made = ModelExpressTrainerConfig(
        device_id=0,
        model_name=MODEL,
        server_url=address,
        engine_context=PlainTrainerContext(slot_id=SLOT),
        **config,  # type: ignore[arg-type]
    )
    more = {} if create_agent is None else {"create_agent": create_agent}
    async with await AsyncModelExpressTrainerClient.initialize(made, **more) as trainer:  # type: ignore[arg-type]
        yield trainer


@contextlib.asynccontextmanager
async def reader_of(address: str, agent: Agent | None = None) -> AsyncIterator[Read]:
    """A generator that stages and applies a version, and then compares all of it."""
    module = Module()
    config = ModelExpressGeneratorConfig(
        engine_context=TorchGeneratorContext(module), model_name=MODEL, server_url=address
    )
    more = {} if agent is None else {"agent": agent}
    async with await AsyncModelExpressGeneratorClient.initialize(config, **more) as generator:  # type: ignore[arg-type]

        async def read(number: int) -> bool:
            try:
                staged = await generator.stage_weight(str(number))
            except VersionGone:
                return False  # a newer one has pushed it out meanwhile
            await generator.apply_weight(staged)
            assert module.differing(number) == []
            assert generator.serving_version_id == str(number)
            return True

        yield read
