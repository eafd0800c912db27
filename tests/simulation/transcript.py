"""Scenarios as transcripts: commands, and what each machine and client then says.

A transcript is a text file. `#` begins a comment, `job` sets the options, `> ` begins a command, and the
lines under a command are what was said until the next one; the interpreter writes those. Commands:

    > start r0 t0 g0 o          start processes, and let them register
    > create v1                 the orchestrator creates a version of all slots
    > publish t0 v1             a trainer stages and publishes
    > stage g0 v1               a generator stages
    > apply g0                  it installs what it has staged
    > release v1 within 3       the orchestrator releases, with a drain deadline in seconds
    > reuse t0 v1               a trainer wants its buffer back, and writes it as soon as it may
    > status v1                 what the orchestrator is told of the version
    > wait 2.5                  seconds pass
    > kill t0, > pause t0, > resume t0
    > cut t0 r0, > mend t0 r0   both ways
    > lose answer CreateWeightVersionShard t0
    > reads take 3              each read from now on, in seconds
    > flush                     the store comes back empty
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import FenceBroken, ModelExpressError
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.version import WeightPayloadFormat
from tests.simulation.generators import GeneratorHost
from tests.simulation.hosts import Host
from tests.simulation.network import Noise
from tests.simulation.options import MODEL, Options
from tests.simulation.orchestrator import OrchestratorHost
from tests.simulation.trainers import TrainerHost
from tests.simulation.transport import Wire
from tests.simulation.weights import ROWS, Buffer
from tests.simulation.world import World, simulate

FOLDER = Path(__file__).parents[1] / "data" / "transcripts"
AFTER_S = 0.3
PLAIN = Options(replicas=1)


@dataclass(frozen=True)
class Command:
    """One command, and the lines before it that are not said by anybody."""

    words: tuple[str, ...]
    heading: tuple[str, ...]


class _ScriptedTrainer(TrainerHost):
    async def work(self, client: AsyncModelExpressTrainerClient) -> None:
        await asyncio.Event().wait()

    async def publish(self, uid: str) -> None:
        assert self.client is not None
        buffer = Buffer(self.slot)
        buffer.write(uid)
        staged = await self.client.stage_shard(uid, tensors=buffer.boxes())
        self._lend(staged, uid, buffer)
        await self._publish(staged)

    async def reuse(self, uid: str) -> None:
        assert self.client is not None
        fence = await self.client.release_version(uid)
        try:
            await fence.wait()
        except FenceBroken as error:
            self.say("%s", error)

    def say(self, text: str, *args: Any) -> None:
        self.world.log.add(self.name, text, *args)


class _ScriptedGenerator(GeneratorHost):
    handle: Any = None

    async def work(self, client: AsyncModelExpressGeneratorClient) -> None:
        await asyncio.Event().wait()

    async def stage(self, uid: str) -> None:
        assert self.client is not None
        try:
            self.handle = await self.client.stage_weight(uid)
        except ModelExpressError as error:
            self.world.log.add(self.name, "%s: %s", type(error).__name__, error)
            return
        self.world.monitor.staged(self, self.client, self.handle)
        self.world.log.add(self.name, "has staged %s", uid)

    async def apply(self) -> None:
        assert self.client is not None
        await self.client.apply_weight(self.handle)
        self.world.log.add(self.name, "serves %s", self.client.serving_version_id)


class _ScriptedOrchestrator(OrchestratorHost):
    client: AsyncModelExpressControlClient

    async def work(self, client: AsyncModelExpressControlClient) -> None:
        self.client = client
        await asyncio.Event().wait()

    async def create(self, uid: str) -> None:
        slots = sorted({slot for _, slot in self.world.options.trainers})
        await self._saying(
            self.client.create_weight_version(
                MODEL, f"key of {uid}", WeightPayloadFormat.FULL_TENSOR, slots, uid=uid
            )
        )

    async def release(self, uid: str, _: str, within_s: str) -> None:
        await self._saying(self.client.release_weight_version(uid, float(within_s)))

    async def status(self, uid: str) -> None:
        statuses = await self.client.list_version_statuses(MODEL)
        found = [str(status) for status in statuses if status.version_id == uid]
        self.world.log.add(self.name, "is told: %s", found[0] if found else "there is no such version")

    async def _saying(self, call: Awaitable[object]) -> None:
        try:
            await call
        except ModelExpressError as error:
            self.world.log.add(self.name, "%s: %s", type(error).__name__, error)


def paths() -> list[Path]:
    """All transcripts."""
    return sorted(FOLDER.glob("*.txt"))


def parse(text: str) -> tuple[Options, list[Command], tuple[str, ...]]:
    """The options, the commands, and the lines after the last one that are comments."""
    options, commands, heading = PLAIN, [], list[str]()
    for line in text.splitlines():
        if line.startswith("> "):
            commands.append(Command(tuple(line[2:].split()), tuple(heading)))
            heading = []
        elif line.startswith("job "):
            options = _options(line.split()[1:])
            heading.append(line)
        elif line.startswith("#") or (not line and not commands):
            heading.append(line)
    return options, commands, tuple(heading)


def _options(words: list[str]) -> Options:
    options = PLAIN
    for word in words:
        name, _, value = word.partition("=")
        items = value.split(",")
        if name == "trainers":
            trainers = tuple((item.split("/")[0], item.split("/")[1]) for item in items)
            options = replace(options, trainers=trainers, in_place=frozenset(t for t, _ in trainers))
        elif name == "generators":
            options = replace(options, generators=tuple((item, slice(0, ROWS)) for item in items))
        else:
            kind = type(getattr(options, name))
            options = replace(options, **{name: kind(float(value))})
    return options


def run(text: str) -> str:
    """The transcript as it would be written now."""
    options, commands, ending = parse(text)
    written: list[str] = []

    async def script(world: World) -> None:
        for command in commands:
            said_before = len(world.log)
            await _do(world, command.words)
            written.extend(command.heading)
            written.append(f"> {' '.join(command.words)}")
            written.extend(_said(world, said_before))
            if world.monitor.violations:
                return

    result = simulate(0, options, script, _prepare)
    if result.violation is not None:
        written.append(f"VIOLATION {result.violation}")
    return "\n".join((*written, *ending)) + "\n"


def _prepare(world: World) -> None:
    """Hosts that do what they are told, and a network without surprises."""
    options = world.options
    world.trainers = [_ScriptedTrainer(world, name, slot) for name, slot in options.trainers]
    world.generators = [_ScriptedGenerator(world, name, rows) for name, rows in options.generators]
    world.orchestrator = _ScriptedOrchestrator(world, "o")
    world.hosts = [*world.replicas, *world.trainers, *world.generators, world.orchestrator]
    world.network.noise = Noise(delay_s=(0.001, 0.001))
    world.store.ways.latency_s = (0.001, 0.001)
    world.hub.wire = Wire(takes_s=(0.01, 0.01))


def _said(world: World, since: int) -> Iterator[str]:
    for at_s, who, text in world.log.entries(since):
        if not text.startswith("#") and who != "*":
            yield f"  {at_s:7.2f}  {who:<3} {text}"


async def _do(world: World, words: tuple[str, ...]) -> None:
    hosts: dict[str, Host] = {host.name: host for host in world.hosts}
    match words:
        case ("start", *names):
            for name in names:
                hosts[name].start()
        case ("kill", name):
            hosts[name].crash()
        case ("pause", name):
            hosts[name].pause()
        case ("resume", name):
            hosts[name].resume()
        case ("cut", one, other):
            world.network.cut(one, other)
            world.network.cut(other, one)
        case ("mend", one, other):
            world.network.mend(one, other)
            world.network.mend(other, one)
        case ("lose", "answer", method, name):
            world.network.lost_answers.add((method, name))
        case ("reads", "take", seconds):
            world.hub.wire = Wire(takes_s=(float(seconds), float(seconds)))
        case ("flush",):
            world.store.flush()
        case ("wait", seconds):
            await asyncio.sleep(float(seconds) - AFTER_S)
        case (verb, name, *rest) if name in hosts:
            _have(hosts[name], verb, rest)
        case (verb, *rest):
            _have(world.orchestrator, verb, rest)
    await asyncio.sleep(AFTER_S)


def _have(host: Host, verb: str, arguments: list[str]) -> None:
    """Have a process do something; it goes on when the next command comes."""
    work: Callable[..., Any] = getattr(host, verb)
    assert host.process is not None
    host.process.spawn(work(*arguments), f"{verb} of {host.name}")
