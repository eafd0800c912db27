"""P4 and P5 from any state: everything is released, everybody stays as it is, and time passes.

Processes that have crashed or are cut off stay so; the others do their duty once in every tick; readers
renew for as long as they are let, and never finish. Then the fence of every living trainer completes
within the bound, and the control plane keeps nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from statemachines import version
from statemachines import world_generator as generators
from statemachines import world_trainer as trainers
from statemachines.publication_records import PublicationState
from statemachines.world import Move, step
from statemachines.world_key import key
from statemachines.world_records import Config, Kind, Outcome, World

_ENDED = (PublicationState.REUSABLE, PublicationState.FAILED)
_NEVER = 1000


def fence_limit_ms(config: Config) -> int:
    """P4: how long a fence may take, whoever is cut off.

    A separation is noticed by the next renewal, a tick from now; the last tick is that of the timers.
    """
    apart_ms = 1 + config.call_life_ms + config.registration_ttl_ms + config.lease_ttl_ms
    return max(config.drain_ms + config.lease_ttl_ms, apart_ms) + 1


def forget_limit_ms(config: Config) -> int:
    """P5: how long the control plane may keep a version that has been released."""
    readers_ms = config.drain_ms + config.lease_ttl_ms
    owners_ms = config.call_life_ms + config.registration_ttl_ms
    return max(readers_ms, owners_ms) + config.lease_ttl_ms + 2 * config.retention_ms + 1


@dataclass(slots=True)
class Rundown:
    """How long the end takes, from any number of worlds; what has been found out is remembered."""

    fences_ms: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    forgets_ms: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def broken_in(self, world: World) -> tuple[str, ...]:
        """What takes too long from this world on, with the promise's name."""
        released = release_everything(world)
        fence_ms, forget_ms = self._measure(released)
        found: list[str] = []
        if fence_ms > (limit_ms := fence_limit_ms(world.config)):
            found.append(
                f"P4: a fence takes {_words(fence_ms)} after its release, the bound is {limit_ms} ms"
            )
        if forget_ms > (limit_ms := forget_limit_ms(world.config)):
            found.append(
                f"P5: a released version is kept for {_words(forget_ms)}, the bound is {limit_ms} ms"
            )
        return tuple(found)

    def _measure(self, world: World) -> tuple[int, int]:
        passed: list[tuple[Hashable, World]] = []
        at = key(world)
        while at not in self.fences_ms and len(passed) < 100:
            passed.append((at, world))
            if _fences_are_complete(world) and world.store.version is None:
                self.fences_ms[at] = self.forgets_ms[at] = 0
                break
            world = one_tick(world)
            at = key(world)
        fence_ms, forget_ms = self.fences_ms.get(at, _NEVER), self.forgets_ms.get(at, _NEVER)
        for at, world in reversed(passed):
            fence_ms = 0 if _fences_are_complete(world) else min(fence_ms + 1, _NEVER)
            forget_ms = 0 if world.store.version is None else min(forget_ms + 1, _NEVER)
            self.fences_ms[at], self.forgets_ms[at] = fence_ms, forget_ms
        return fence_ms, forget_ms


def _words(span_ms: int) -> str:
    return "for ever" if span_ms >= _NEVER else f"{span_ms} ms"


def _fences_are_complete(world: World) -> bool:
    return all(not trainer.alive or trainer.publication.state in _ENDED for trainer in world.trainers)


def release_everything(world: World) -> World:
    """The orchestrator releases the version, and every trainer wants its buffer back."""
    record = world.store.version
    if record is not None and record.state in (version.STAGING, version.READY, version.DEGRADED):
        world = _do(world, ("release",))
    for i in range(len(world.trainers)):
        for name in ("capture", "release"):
            if name in trainers.events_of(world, i):
                world = _do(world, ("trainer", i, name))
    return world


def one_tick(world: World) -> World:
    """Everybody who can does what it must, and the clock moves on."""
    while world.post:
        world = _do(world, ("deliver", 0))
    for i in range(len(world.trainers)):
        if "drained" in trainers.events_of(world, i):
            world = _do(world, ("trainer", i, "drained"))
        outcome = Outcome.LOST if world.trainers[i].cut_off else Outcome.OK
        for kind in (Kind.REGISTER, Kind.ANNOUNCE, Kind.DRAIN):
            if kind in trainers.calls_of(world, i):
                world = _do(world, ("call", kind, i, outcome))
        for name in ("release", "watch", "bound", "drained"):
            if name in trainers.events_of(world, i):
                world = _do(world, ("trainer", i, name))
    for j in range(len(world.generators)):
        if Kind.RENEW in generators.calls_of(world, j):
            world = _do(world, ("call", Kind.RENEW, j, Outcome.OK))
    return _do(world, ("tick",))


def _do(world: World, move: Move) -> World:
    return step(world, move).after
