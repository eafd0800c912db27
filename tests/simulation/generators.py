"""Generator ranks: each stages and applies whatever is the newest version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from modelexpress_rl.errors import (
    EngineUncertain,
    ModelExpressError,
)
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from tests.simulation.hosts import Host
from tests.simulation.loop import Process
from tests.simulation.network import CONTROL
from tests.simulation.options import MODEL
from tests.simulation.peers import network_of
from tests.simulation.weights import Engine

if TYPE_CHECKING:
    from tests.simulation.world import World


class GeneratorHost(Host):
    """A generator rank: stages and applies whatever is the newest version."""

    def __init__(self, world: World, name: str, rows: slice) -> None:
        super().__init__(world, name)
        self.rows = rows
        self.client: AsyncModelExpressGeneratorClient | None = None
        self.engine = Engine(rows)
        self.agent: Any = None
        self.gives_up = 0.0
        self.fails_install = 0.0

    async def main(self, process: Process) -> None:
        world, options = self.world, self.world.options
        self.engine = Engine(self.rows)
        self.agent = world.hub.agent(self.life)
        config = ModelExpressGeneratorConfig(
            engine_context=self.engine,
            model_name=MODEL,
            worker_id=self.life,
            server_url=str(CONTROL),
            registration_ttl_seconds=options.registration_ttl_s,
            lease_ttl_seconds=options.lease_ttl_s,
            rpc_timeout_seconds=options.rpc_timeout_s,
        )
        client = await self._opened(config, process)
        world.monitor.watch_generator(self, client)
        self.client = client
        try:
            await self.work(client)
        finally:
            with world.monitor.bounded(self, "close", 20):
                await client.close()

    async def _opened(
        self, config: ModelExpressGeneratorConfig, process: Process
    ) -> AsyncModelExpressGeneratorClient:
        world = self.world
        while True:
            try:
                with world.monitor.bounded(self, "initialize", 3 * world.options.rpc_timeout_s + 2):
                    return await AsyncModelExpressGeneratorClient.initialize(
                        config,
                        agent=self.agent,
                        clock=self.clock,
                        network=network_of(world.network, process),
                    )
            except ModelExpressError as error:
                world.log.add(self.name, "not registered: %s", type(error).__name__)
                await asyncio.sleep(0.3)

    async def work(self, client: AsyncModelExpressGeneratorClient) -> None:
        """Refit to whatever is newest."""
        while not self.world.job.over:
            await self._refit(client)

    async def _refit(self, client: AsyncModelExpressGeneratorClient) -> None:
        world, rng = self.world, self.world.rng
        offered = world.job.offered
        if not offered or client.serving_version_id == offered[-1].uid:
            await world.job.changed()
            return
        uid = offered[-1].uid if rng.random() < 0.8 else rng.choice(offered).uid
        patience_s = rng.uniform(0, 2) if rng.random() < self.gives_up else float("inf")
        world.log.add(self.name, "stages %s", uid)
        staged = None
        try:
            with (
                world.monitor.bounded(self, f"stage_weight of {uid}", world.options.stage_bound_s),
                anyio.move_on_after(patience_s),
            ):
                staged = await client.stage_weight(uid)
        except ModelExpressError as error:
            world.log.add(self.name, "%s not staged: %s: %s", uid, type(error).__name__, str(error)[:100])
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            return
        if staged is None:
            world.log.add(self.name, "gives %s up", uid)
            return
        world.monitor.staged(self, client, staged)
        if rng.random() < self.gives_up / 2:
            await staged.release()
            return
        if rng.random() < self.fails_install:
            self.engine.fails_after = rng.randrange(2)
        try:
            await client.apply_weight(staged)
            world.log.add(self.name, "serves %s", uid)
        except EngineUncertain:
            world.log.add(self.name, "is uncertain about %s", uid)
        self.engine.fails_after = None
        world.job.tell()

    def gone(self) -> None:
        self.client = None
        self.world.hub.kill(self.life)
