"""The processes of a job as hosts run them: started, killed, started again. Each runs the real driver."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

import anyio

from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.service import RefitService
from modelexpress_rl.server.service_v1 import RefitControlService
from modelexpress_rl.server.watch import WatchHub
from tests.simulation.clocks import SimClock, SimStoreClock
from tests.simulation.loop import Process
from tests.simulation.network import Peer
from tests.simulation.peers import served
from tests.simulation.store import SimStore

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
