"""The orchestrator: creates versions, and releases those that newer ones replace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import (
    DeadlineExceeded,
    ModelExpressError,
    VersionGone,
)
from modelexpress_rl.rpc import AlreadyExists, NotFound
from modelexpress_rl.version import VersionState, WeightPayloadFormat
from tests.simulation.hosts import Host
from tests.simulation.job import Wanted
from tests.simulation.loop import Process
from tests.simulation.network import CONTROL
from tests.simulation.options import MODEL
from tests.simulation.peers import SimControl

if TYPE_CHECKING:
    from tests.simulation.world import World


class OrchestratorHost(Host):
    """Creates versions, waits until each is READY, and releases those that newer ones replace."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._one_at_a_time = anyio.Lock()

    async def main(self, process: Process) -> None:
        timeout_s = self.world.options.rpc_timeout_s
        plane = SimControl(self.world.network, process, CONTROL, rpc_timeout_s=timeout_s)
        await self.work(AsyncModelExpressControlClient(plane))

    async def work(self, client: AsyncModelExpressControlClient) -> None:
        """Version after version, until the job is over."""
        self._one_at_a_time = anyio.Lock()
        job = self.world.job
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_up, client)
            while not job.over:
                if job.last is None:
                    await self._step(client)
                else:
                    await job.changed()
            await self._release_all(client)
            tasks.cancel_scope.cancel()

    async def _step(self, client: AsyncModelExpressControlClient) -> None:
        world, options, job = self.world, self.world.options, self.world.job
        version = next((one for one in job.versions if not one.created), None) or job.plan()
        if not await self._create(client, version):
            await asyncio.sleep(0.2)
            return
        version.created = True
        job.tell()
        if world.calm and job.last is None:
            job.last = version.uid
            job.tell()
        try:
            with world.monitor.bounded(self, f"wait_for_state of {version.uid}", 6.5):
                await client.wait_for_state(version.uid, VersionState.READY, 6.0)
            world.log.add(self.name, "%s is READY", version.uid)
        except (DeadlineExceeded, VersionGone, ModelExpressError) as error:
            world.log.add(self.name, "%s is not READY: %s", version.uid, type(error).__name__)
        await asyncio.sleep(options.step_s * world.rng.uniform(0.5, 1.5))
        for old in [one for one in job.versions if one.created and not one.releasing][: -options.keep]:
            await self._release(client, old)

    async def _create(self, client: AsyncModelExpressControlClient, version: Wanted) -> bool:
        async with self._one_at_a_time:
            return version.releasing or await self._create_now(client, version)

    async def _create_now(self, client: AsyncModelExpressControlClient, version: Wanted) -> bool:
        slots = sorted({slot for _, slot in self.world.options.trainers})
        try:
            await client.create_weight_version(
                MODEL, f"key of {version.uid}", WeightPayloadFormat.FULL_TENSOR, slots, uid=version.uid
            )
        except AlreadyExists:
            raise
        except ModelExpressError as error:
            self.world.log.add(self.name, "%s not created: %s", version.uid, type(error).__name__)
            return False
        return True

    async def _release(self, client: AsyncModelExpressControlClient, version: Wanted) -> None:
        async with self._one_at_a_time:
            await self._release_now(client, version)

    async def _release_now(self, client: AsyncModelExpressControlClient, version: Wanted) -> None:
        world = self.world
        if world.rng.random() < 0.5:
            version.releasing = True  # the ranks may hear of it first
            world.job.tell()
        try:
            if world.rng.random() < 0.5:
                await client.release_weight_version(version.uid, world.options.drain_ms / 1000)
            else:
                await client.delete_weight_version(version.uid)
            version.released = True
        except NotFound:
            version.released = True
        except ModelExpressError as error:
            world.log.add(self.name, "%s not released: %s", version.uid, type(error).__name__)
        version.releasing = True
        world.job.tell()

    async def _keep_up(self, client: AsyncModelExpressControlClient) -> None:
        """What failed is done again, and what the store forgot is created again."""
        while True:
            await asyncio.sleep(2.0)
            for version in list(self.world.job.versions):
                if version.releasing and not version.released:
                    await self._release(client, version)
                elif version.created and not version.releasing:
                    await self._create(client, version)

    async def _release_all(self, client: AsyncModelExpressControlClient) -> None:
        """Also what is released already: a creation that was repeated by the network may have come late."""
        for version in self.world.job.versions:
            version.released = False
            while version.created and not version.released:
                await self._release(client, version)
                if not version.released:
                    await asyncio.sleep(0.3)
