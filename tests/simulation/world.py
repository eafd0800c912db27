"""One simulated job: its processes, its network, its store, and who watches."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from statemachines.ids import WorkerId
from tests.simulation.chaos import Chaos
from tests.simulation.clocks import SimStoreClock
from tests.simulation.generators import GeneratorHost
from tests.simulation.hosts import Host, ReplicaHost
from tests.simulation.job import Job
from tests.simulation.log import EventLog
from tests.simulation.loop import Deadlock, SimLoop, determinism
from tests.simulation.monitor import Monitor, Violation
from tests.simulation.network import Noise, SimNetwork
from tests.simulation.options import Options
from tests.simulation.orchestrator import OrchestratorHost
from tests.simulation.planted import BUGS
from tests.simulation.store import SharedStore
from tests.simulation.trainers import TrainerHost
from tests.simulation.transport import SimHub, Wire
from tests.simulation.weights import ROWS

EPOCH_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    seed: int
    violation: Violation | None
    log: EventLog
    virtual_s: float
    wall_s: float
    callbacks: int
    versions: int
    commits: int

    @property
    def verdict(self) -> str:
        """All of it in a line."""
        words = "all promises held" if self.violation is None else str(self.violation)
        return (
            f"seed {self.seed}: {words} ({self.virtual_s:.1f} s virtual, {self.wall_s:.2f} s real, "
            f"{self.versions} versions, {self.commits} commits, {self.callbacks} callbacks)"
        )


class World:
    """Everything in one run; `script` is what happens in it."""

    def __init__(self, loop: SimLoop, seed: int, options: Options) -> None:
        self.loop = loop
        self.options = options
        self.rng = random.Random(f"work {seed}")
        self.log = EventLog(loop)
        self.job = Job()
        self.calm = False
        drift = options.drift.get("store", 1.0)
        self.store = SharedStore(
            SimStoreClock(loop, offset_ms=EPOCH_MS, rate=drift), random.Random(f"store {seed}")
        )
        self.network = SimNetwork(loop, random.Random(f"network {seed}"), self.log)
        self.hub = SimHub(
            loop,
            random.Random(f"reads {seed}"),
            lambda one, other: self.network.passes(one.split("-")[0], other.split("-")[0]),
            lambda reader, peer: self.monitor.landed(reader, peer),
        )
        whole = [name for name, rows in options.generators if rows == slice(0, ROWS)]
        self.hub.verifying = set() if options.without_digests else set(whole)
        self.monitor = Monitor(self)
        self.replicas = [ReplicaHost(self, f"r{number}") for number in range(options.replicas)]
        self.trainers = [TrainerHost(self, name, slot) for name, slot in options.trainers]
        self.generators = [GeneratorHost(self, name, rows) for name, rows in options.generators]
        self.orchestrator = OrchestratorHost(self, "o")
        self.hosts: list[Host] = [*self.replicas, *self.trainers, *self.generators, self.orchestrator]
        self.network.replica_names = [host.name for host in self.replicas]
        self.network.without_digests = set(options.without_digests)
        self.chaos = Chaos(self, random.Random(f"chaos {seed}"))

    async def run(self) -> None:
        """Chaos, then calm: whatever happened, everything drains and the last version is served."""
        for host in self.hosts:
            host.start()
        self.chaos.play(self.chaos.plan())
        while self.loop.time() < self.options.chaos_s:
            self.monitor.check_backgrounds()
            await asyncio.sleep(0.5)
        self.make_calm()
        await self.until(
            self._last_is_served, 2 * self.options.reuse_bound_s + 10, "the last version is served"
        )
        self.job.over = True
        self.job.tell()
        await self._stop([self.orchestrator, *self.trainers, *self.generators], 60)
        await self.until(self._store_is_empty, self._forgotten_after_s(), "the store is empty")
        for replica in self.replicas:
            replica.stopping.set()
        await self._stop(list(self.replicas), 5)

    def make_calm(self) -> None:
        """Faults are switched off, and who is dead is started again."""
        self.calm = True
        self.log.add("*", "calm")
        self.network.mend_all()
        self.network.noise = Noise()
        self.hub.wire = Wire()
        self.store.ways.out, self.store.ways.loses = False, 0.0
        self.store.ways.latency_s = (0.0002, 0.003)
        self.store.resync()
        for generator in self.generators:
            generator.gives_up = generator.fails_install = 0.0
        for trainer in self.trainers:
            trainer.leaves_early = False
        for host in self.hosts:
            host.resume()
            host.start()
        self.monitor.disturb("", *(host.name for host in self.hosts))
        self.monitor.disturb(*(f"pause of {host.name}" for host in self.hosts))

    async def until(self, holds: Callable[[], str | None], bound_s: float, what: str) -> None:
        """Wait until `holds` has no complaint any more; a violation where that takes too long."""
        end_s = self.loop.time() + bound_s
        while (complaint := holds()) is not None:
            if self.loop.time() >= end_s:
                self.monitor.fail("progress", f"not within {bound_s:.1f} s: {what}: {complaint}")
                await asyncio.sleep(1e9)
            self.monitor.check_backgrounds()
            await asyncio.sleep(0.1)

    async def _stop(self, hosts: list[Host], bound_s: float) -> None:
        def running() -> str | None:
            names = [host.life for host in hosts if host.alive]
            return f"{', '.join(names)} still run" if names else None

        await self.until(running, bound_s, "every process ends")

    def _last_is_served(self) -> str | None:
        if self.job.last is None:
            return "the orchestrator has not created it"
        for generator in self.generators:
            serving = generator.client and generator.client.serving_version_id
            if serving != self.job.last:
                return f"{generator.life} serves {serving}, and {self.job.last} is the last"
            if self.options.older_servers:
                continue  # they take no reports
            known = self.store.records._workers.get(WorkerId(generator.life))
            if known is None or known.record.serving != serving or known.record.uncertain:
                return f"the control plane does not know that {generator.life} serves {serving}"
        return None

    def _store_is_empty(self) -> str | None:
        records = self.store.records
        if records._versions:
            shown = [f"{uid} {one.entry.record.state.value}" for uid, one in records._versions.items()]
            return f"it has versions: {', '.join(shown)}"
        if records._keys or records._workers or records._models:
            return f"it has keys {sorted(records._keys)} and workers {sorted(records._workers)}"
        return None

    def _forgotten_after_s(self) -> float:
        """P5: all of it is gone after a drain, a lease, the bound of an abandoned version, and retention."""
        options = self.options
        ends_s = options.drain_ms / 1000 + options.lease_ttl_s + options.registration_ttl_s
        return 1.1 * (ends_s + 2 * options.retention_ms / 1000) + 3

    def left(self) -> list[str]:
        """The tasks that have not ended, by name."""
        return [name for process in self.loop.processes for name in process.left]

    def bury(self) -> Iterator[None]:
        """Let every task that is left come to its end."""
        self.job.over = True
        for process in self.loop.processes:
            process.bury()
        while left := [process for process in self.loop.processes if not process.ended]:
            yield
            for process in left:
                process.cancel()


def simulate(
    seed: int,
    options: Options | None = None,
    script: Callable[[World], object] | None = None,
    prepare: Callable[[World], None] = lambda world: None,
    *,
    bug: str | None = None,
) -> Result:
    """Run one seed to its end, or to the first violation; `bug` is one of `planted.BUGS`."""
    begun_s = time.perf_counter()
    planted = BUGS[bug].planted() if bug else nullcontext()
    with planted, determinism(seed), _environment():
        loop = SimLoop(random.Random(f"threads {seed}"))
        try:
            world = World(loop, seed, options or Options.of(random.Random(f"options {seed}")))
            prepare(world)
            _run(loop, world, script)
            callbacks, virtual_s = loop.callbacks, loop.time()
            violation = next(iter(world.monitor.violations), None)
            _bury(loop, world)
        finally:
            asyncio.set_event_loop(None)
            loop.close()
    return Result(
        seed=seed,
        violation=violation,
        log=world.log,
        virtual_s=virtual_s,
        wall_s=time.perf_counter() - begun_s,
        callbacks=callbacks,
        versions=len([one for one in world.job.versions if one.created]),
        commits=world.store.records._revision,
    )


def _run(loop: SimLoop, world: World, script: Callable[[World], object] | None) -> None:
    asyncio.set_event_loop(loop)
    loop.after_event = world.monitor.check
    work = world.run() if script is None else script(world)
    main = loop.create_task(work)  # type: ignore[arg-type]

    def over(_: object) -> None:
        loop.stop()

    main.add_done_callback(over)
    try:
        loop.run_forever()
    except Deadlock as error:
        world.monitor.violations.append(Violation("P4", loop.time(), str(error), error))
    if main.done() and not main.cancelled() and (failure := main.exception()) is not None:
        raise failure
    main.remove_done_callback(over)
    main.cancel()


def _bury(loop: SimLoop, world: World) -> None:
    """After the verdict: nothing may be left to the collector, which would complain."""
    loop.after_event = lambda: None
    world.monitor.closed = world.log.closed = world.calm = True
    world.network.replicas.clear()
    rounds = 0

    async def ended() -> None:
        nonlocal rounds
        for _ in world.bury():
            rounds += 1
            if rounds > 200:
                raise AssertionError(f"these tasks do not end: {world.left()}")
            await asyncio.sleep(1.0)

    with suppress(Deadlock):
        loop.run_until_complete(ended())


@contextmanager
def _environment() -> Iterator[None]:
    wanted = {"MX_TRANSFER_TIMEOUT": "8", "MX_REFIT_TIMING": "0", "MX_WORKER_HOST": "127.0.0.1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
