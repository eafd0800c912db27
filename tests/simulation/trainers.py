"""Trainer ranks: each writes a version, publishes it, and writes its buffer anew once it may."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from modelexpress_rl.errors import (
    FenceBroken,
    ModelExpressError,
)
from modelexpress_rl.rpc import RpcError
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient, StagedWeightVersionShard
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerStagingMode
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.train.memory import host_bytes
from modelexpress_rl.version import WeightPayloadFormat
from tests.simulation.hosts import Host
from tests.simulation.job import Wanted
from tests.simulation.loop import Process
from tests.simulation.monitor import Lent
from tests.simulation.network import CONTROL
from tests.simulation.options import MODEL
from tests.simulation.peers import network_of
from tests.simulation.weights import Buffer

if TYPE_CHECKING:
    from tests.simulation.world import World


class TrainerHost(Host):
    """A trainer rank: writes each version, publishes it, and writes its buffer anew once it may."""

    def __init__(self, world: World, name: str, slot: str) -> None:
        super().__init__(world, name)
        self.slot = slot
        self.client: AsyncModelExpressTrainerClient | None = None
        self.leaves_early = False

    async def main(self, process: Process) -> None:
        world, options = self.world, self.world.options
        in_place = self.name in options.in_place
        config = ModelExpressTrainerConfig(
            device_id=0,
            agent_name=self.life,
            worker_id=self.life,
            model_name=MODEL,
            server_url=str(CONTROL),
            staging_mode=TrainerStagingMode.IN_PLACE if in_place else TrainerStagingMode.COPY_TO_HOST,
            payload_format=WeightPayloadFormat.FULL_TENSOR,
            registration_ttl_seconds=options.registration_ttl_s,
            rpc_timeout_seconds=options.rpc_timeout_s,
            engine_context=PlainTrainerContext(slot_id=self.slot),
            release_grace_seconds=options.release_grace_s,
            close_timeout_seconds=options.close_timeout_s,
            max_lease_ttl_seconds=options.max_lease_ttl_ms / 1000,
            staging_timeout_seconds=options.reuse_bound_s,
        )
        client = await self._opened(config, process)
        world.monitor.watch_trainer(self, client)
        self.client = client
        try:
            await self.work(client)
        finally:
            with world.monitor.bounded(self, "close", options.close_timeout_s + 2 + 15):
                await client.close()

    async def _opened(
        self, config: ModelExpressTrainerConfig, process: Process
    ) -> AsyncModelExpressTrainerClient:
        world = self.world

        async def agent(where: object) -> Any:
            return world.hub.agent(self.life)

        while True:
            try:
                with world.monitor.bounded(self, "initialize", 3 * world.options.rpc_timeout_s + 2):
                    return await AsyncModelExpressTrainerClient.initialize(
                        config,
                        clock=self.clock,
                        create_agent=agent,
                        network=network_of(world.network, process),
                    )
            except ModelExpressError as error:
                world.log.add(self.name, "not registered: %s", type(error).__name__)
                await asyncio.sleep(0.3)

    async def work(self, client: AsyncModelExpressTrainerClient) -> None:
        """Carry every version that the job offers."""
        async with anyio.create_task_group() as carrying:
            await self._train(client, carrying)
            carrying.cancel_scope.cancel()

    async def _train(self, client: AsyncModelExpressTrainerClient, carrying: Any) -> None:
        job = self.world.job
        free = [Buffer(self.slot) for _ in range(self.world.options.buffers)]
        published: set[str] = set()
        while not job.over:
            wanted = [one for one in job.offered if one.uid not in published][-len(free) :] if free else []
            if not wanted:
                await job.changed()
                continue
            published.add(wanted[0].uid)
            carrying.start_soon(self._carry, client, wanted[0], free.pop(0), free, published)

    async def _carry(
        self,
        client: AsyncModelExpressTrainerClient,
        version: Wanted,
        buffer: Buffer,
        free: list[Buffer],
        published: set[str],
    ) -> None:
        world = self.world
        buffer.write(version.uid)
        try:
            staged = await client.stage_shard(version.uid, tensors=buffer.boxes())
        except ModelExpressError as error:
            world.log.add(self.name, "%s not staged: %s", version.uid, type(error).__name__)
            buffer.spoil()
            free.append(buffer)
            return
        lent = self._lend(staged, version.uid, buffer)
        if not await self._publish(staged):
            await lent.gone.wait()
            await asyncio.sleep(0.5)
            free.append(buffer)
            published.discard(version.uid)  # whoever trains would try again, or fail
            return
        if self.leaves_early:
            await asyncio.sleep(world.rng.uniform(0, 3))
        else:
            while not (version.releasing or lent.ended):
                await world.job.changed()
        world.log.add(self.name, "releases %s", version.uid)
        fence = await client.release_version(version.uid)
        try:
            with world.monitor.bounded(
                self, f"source_reuse_ready of {version.uid}", world.options.reuse_bound_s, disturbed=True
            ):
                await fence.wait()
                await staged.source_reuse_ready.wait()
        except FenceBroken as error:
            world.log.add(self.name, "fence of %s broke: %s", version.uid, str(error)[:60])
        if lent.ended:
            free.append(buffer)
            world.job.tell()

    def _lend(self, staged: StagedWeightVersionShard, uid: str, buffer: Buffer) -> Lent:
        """What is readable from now on is the buffer, or the arena that it was copied to."""
        data = staged._staged.data  # type: ignore[attr-defined]
        arena = getattr(data.buffer_owner, "memory", None)
        digest = data.manifest.digest

        def spoil() -> None:
            if arena is None:
                buffer.spoil()
            else:
                host_bytes(arena.ctypes.data, arena.nbytes)[:] = 0xA5

        if arena is not None:
            buffer.spoil()  # in the copy modes training goes on at once
        fence = staged.source_reuse_ready
        lent = self.world.monitor.lend(self, self.life, uid, digest, spoil)
        fence.on_end(lambda: self.world.monitor.reused(lent) if fence.done else None)
        return lent

    async def _publish(self, staged: StagedWeightVersionShard) -> bool:
        """Whether it is, or may be, announced."""
        world = self.world
        bound_s = world.options.rpc_timeout_s + 0.1
        try:
            with world.monitor.bounded(self, f"publish of {staged.version_id}", bound_s):
                await staged.publish()
            world.log.add(self.name, "published %s", staged.version_id)
        except ModelExpressError as error:
            world.log.add(self.name, "%s not confirmed: %s", staged.version_id, type(error).__name__)
            return not (isinstance(error, RpcError) or staged.source_reuse_ready.ended)
        return True

    def gone(self) -> None:
        self.client = None
        self.world.hub.kill(self.life)
        self.world.monitor.owner_died(self.life)
