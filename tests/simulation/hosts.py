"""The processes of a job as hosts run them: started, killed, started again. Each runs the real driver."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import (
    DeadlineExceeded,
    EngineUncertain,
    FenceBroken,
    ModelExpressError,
    VersionGone,
)
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.rpc import AlreadyExists, NotFound, RpcError
from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.service import RefitService
from modelexpress_rl.server.service_v1 import RefitControlService
from modelexpress_rl.server.watch import WatchHub
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient, StagedWeightVersionShard
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerStagingMode
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.version import VersionState, WeightPayloadFormat
from tests.simulation.clocks import SimClock, SimStoreClock
from tests.simulation.job import Wanted
from tests.simulation.loop import Process
from tests.simulation.monitor import Lent
from tests.simulation.network import CONTROL, Peer, SimControl, served
from tests.simulation.options import MODEL
from tests.simulation.store import SimStore
from tests.simulation.weights import Buffer, Engine

if TYPE_CHECKING:
    from tests.simulation.world import World

REFIT, REFIT_CONTROL = "model_express.refit.RefitService", "modelexpress_rl.v1.RefitControlService"


class Host(ABC):
    """One process and its successors. `lives` counts them."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.lives = 0
        self.process: Process | None = None
        self.done = asyncio.Event()
        self.clock = SimClock(
            world.loop,
            offset_ms=world.rng.randrange(10_000_000),
            rate=world.options.drift.get(name, 1.0),
        )

    @property
    def alive(self) -> bool:
        """Whether a process runs (or is paused)."""
        return self.process is not None and self.process.alive

    @property
    def life(self) -> str:
        """What this process calls itself."""
        return f"{self.name}-{self.lives}"

    def start(self) -> None:
        """Start a process, unless one runs."""
        if self.alive:
            return
        self.lives += 1
        self.done = asyncio.Event()
        self.process = Process(self.world.loop, self.name)
        self.world.log.add(self.name, "starts (life %d)", self.lives)
        self.process.spawn(self._run(self.process), f"main of {self.life}")

    def crash(self, *, silent: bool = False) -> None:
        """Kill the process. `silent`: its host says nothing to anybody."""
        process = self.process
        if process is None or not process.alive:
            return
        self.world.log.add(self.name, "is killed")
        self._ended(process, silent=silent)

    def pause(self) -> None:
        if self.process is not None and self.process.runs:
            self.world.log.add(self.name, "is paused")
            self.process.pause()

    def resume(self) -> None:
        if self.process is not None and self.process.paused:
            self.world.log.add(self.name, "goes on")
            self.process.resume()

    def _ended(self, process: Process, *, silent: bool) -> None:
        process.kill()
        self.world.network.forget(process, silent=silent)
        self.gone()

    async def _run(self, process: Process) -> None:
        try:
            await self.main(process)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
            self.world.monitor.fail("driver", f"{self.life} ended with {error!r}", error)
        finally:
            if process.alive and process is self.process and not self.world.monitor.closed:
                self.world.log.add(self.name, "ends")
                self.done.set()
                self.world.loop.in_world(0, partial(self._ended, process, silent=False))

    def gone(self) -> None:  # noqa: B027 (some hold nothing)
        """The process is dead: what it held is gone."""

    @abstractmethod
    async def main(self, process: Process) -> None:
        """What the process does."""


class ReplicaHost(Host):
    """A server: registry, expiry and watches over the shared store."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.store: SimStore | None = None
        self.stopping = asyncio.Event()

    async def main(self, process: Process) -> None:
        world = self.world
        self.stopping = asyncio.Event()
        self.store = store = SimStore(world.store, process)
        drift = world.options.drift.get(self.name, 1.0)
        clock = SimStoreClock(world.loop, offset_ms=0, rate=drift)
        async with (
            Registry.running(store, world.options.settings) as registry,  # type: ignore[arg-type]
            anyio.create_task_group() as tasks,
        ):
            hub = WatchHub(registry)
            await tasks.start(hub.run)
            tasks.start_soon(Expiry(registry, clock).run)
            services: dict[str, object] = {REFIT: RefitService(registry)}
            if not world.options.older_servers:
                services[REFIT_CONTROL] = RefitControlService(registry, hub)
            world.network.replicas[self.name] = Peer(process, served(services))
            await self.stopping.wait()
            hub.close()
            await asyncio.sleep(0.05)
            tasks.cancel_scope.cancel()

    def gone(self) -> None:
        process = self.process
        assert process is not None
        self.world.store.forget(process)


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
                        network=world.network.network_of(process),
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
                arena[:] = 0xA5

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
                        network=world.network.network_of(process),
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
