"""Generations: arenas that are registered once and hold one version after the other.

The driver of `statemachines.generation` and `statemachines.back_pressure`. Version n + 1 is copied into one
generation while n is read from another; a generation is handed out again only once nobody may read what
it held. Writing it goes through `Use.writing` alone, which the machine allows for the use that has it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import anyio

from modelexpress_rl.errors import DeadlineExceeded, StateError
from modelexpress_rl.train.arena import HOST, Device, HostMemory, Memory, memory_on
from modelexpress_rl.transport.port import Agent, Registration
from statemachines import generation as machine
from statemachines import generation_records as records
from statemachines.back_pressure import Limits, Make, Skip, Take, choose, surplus
from statemachines.generation_records import GenerationState as State
from statemachines.ids import VersionId
from statemachines.kernel import Refused

_log = logging.getLogger(__name__)
COPIES_END_S = 3.0
_NO_LIMITS = Limits()


class NoRoom(DeadlineExceeded):
    """Every generation is being read, and the policy is to skip the version then."""


class Generation:
    """One generation: its record, its memory by device, and when it was handed out last."""

    def __init__(self, number: int) -> None:
        self.record = records.GenerationRecord(number)
        self.memory: dict[Device, Memory] = {}
        self.registration: Registration | None = None
        self.fitted = 0
        self.last_used = 0

    @property
    def size_bytes(self) -> int:
        """Bytes that it has on all devices together."""
        return sum(memory.size_bytes for memory in self.memory.values())

    def fits(self, sizes: Mapping[Device, int]) -> bool:
        """Whether its memory is enough on each device."""
        return all(
            device in self.memory and self.memory[device].size_bytes >= size for device, size in sizes.items()
        )


class Writing:
    """Leave to write one generation's memory, while its copy runs."""

    def __init__(self, memory: Mapping[Device, Memory]) -> None:
        self._memory: Mapping[Device, Memory] | None = memory

    def part(self, device: Device, at: int, size_bytes: int) -> Any:
        """A piece of the memory to write into; see `Memory.part`.

        Raises:
            StateError: the copy has ended.
        """
        if self._memory is None:
            raise StateError(f"{size_bytes} bytes at {at} on {device}: the copy of this use has ended")
        return self._memory[device].part(at, size_bytes)

    def end(self) -> None:
        """No piece is given out any more."""
        self._memory = None


class Use:
    """One version's use of a generation, from the reservation to its end."""

    def __init__(self, pool: GenerationPool, generation: Generation) -> None:
        self._pool = pool
        self._generation = generation
        self._use = generation.record.use

    def __str__(self) -> str:
        return f"use {self._use} of generation {self.number}"

    @property
    def number(self) -> int:
        """The generation's number."""
        return self._generation.record.number

    @property
    def fitted(self) -> int:
        """How often the generation's memory was made: what lies at its addresses holds for one such time."""
        return self._generation.fitted

    @property
    def memory(self) -> Any:
        """What it has on the host, to read."""
        return self._generation.memory[HOST].owner

    def addr(self, device: Device) -> int:
        """Where the memory on this device begins."""
        return self._generation.memory[device].addr

    def owner(self, device: Device) -> Any:
        """What keeps the memory on this device alive."""
        return self._generation.memory[device].owner

    @property
    def wanted(self) -> bool:
        """Whether the version is still being made: its copy may end early where it isn't."""
        return self._generation.record.use == self._use and self._generation.record.state is State.CAPTURING

    async def fit(self, sizes: Mapping[Device, int], *, pinned: bool = False) -> None:
        """Have at least these bytes on each device, registered; before anything is written.

        `pinned`: what is on the host is copied to from a GPU.

        Raises:
            StateError: the use is over, or something writes.
            TransferError: the transport refuses the memory.
        """
        await self._pool.fit(self._generation, self._use, sizes, pinned=pinned)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writing]:
        """The copy: what is written within is the version, where the block ends without raising.

        Raises:
            StateError: the use is over, or something else writes: nothing may be written.
        """
        self._handle(records.BeginCopy(self._use))
        leave = Writing(self._generation.memory)
        whole = False
        try:
            yield leave
            whole = True
        finally:
            leave.end()
            self._handle(records.EndCopy(self._use, whole))

    def serve(self) -> None:
        """The version is whole, and may be read from now on.

        Raises:
            StateError: it isn't, or the use is over.
        """
        self._handle(records.Serve(self._use))

    def wanted_back(self) -> None:
        """The version is released; a second call is harmless."""
        self._handle(records.WantBack(self._use))

    def release(self) -> None:
        """Nobody reads the version, and nobody will; a second call is harmless.

        Where its copy still runs the memory stays out of use until that has ended.
        """
        self._handle(records.LetGo(self._use))

    def _handle(self, event: records.Event) -> None:
        self._pool.handle(self._generation, event)


class GenerationPool:
    """The generations of one agent: as many as `limits` says, made when they are first needed."""

    def __init__(self, agent: Agent, limits: Limits = _NO_LIMITS) -> None:
        self.limits = limits
        self.grown = 0
        self.skipped = 0
        self._agent = agent
        self._generations: list[Generation] = []
        self._retired: list[Generation] = []
        self._made = 0
        self._uses = 0
        self._queue: deque[object] = deque()
        self._changed = anyio.Event()
        self._closing = False

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Those that exist."""
        return tuple(self._generations)

    @property
    def room(self) -> int:
        """How many versions can be captured now without waiting."""
        states = Counter(one.record.state for one in self._generations)
        return states[State.FREE] + max(0, self.limits.most - len(self._generations))

    async def reserve(self, version_id: str, timeout_s: float) -> Use:
        """A generation for this version, which nobody reads and nobody else writes; first come, first served.

        Raises:
            NoRoom: all are being read, and the policy is SKIP.
            DeadlineExceeded: all are being read until the deadline; the message says of which versions.
            StateError: the pool is closed.
        """
        ticket = object()
        self._queue.append(ticket)
        try:
            with anyio.move_on_after(timeout_s):
                while True:
                    if self._closing:
                        raise StateError(f"version {version_id}: the trainer client is closed")
                    if self._queue[0] is ticket and (use := self._use_for(version_id)) is not None:
                        return use
                    await self._changed.wait()
        finally:
            self._queue.remove(ticket)
            self._tell()
        raise DeadlineExceeded(
            f"version {version_id}: no free generation after {timeout_s:g} s: {self._who_holds()}; release a "
            "version, or wait for its source_reuse_ready"
        )

    async def fit(
        self, generation: Generation, use: int, sizes: Mapping[Device, int], *, pinned: bool
    ) -> None:
        """As `Use.fit`."""
        record = generation.record
        if record.use != use or not isinstance(record.phase, records.Capturing) or record.phase.copying:
            raise StateError(f"generation {record.number} is {record.state.value}: its memory stays as it is")
        if not generation.fits(sizes):
            wanted = {device: memory.size_bytes for device, memory in generation.memory.items()}
            wanted |= {device: max(size, wanted.get(device, 0)) for device, size in sizes.items()}
            await self._deregister(generation)
            memory = {device: memory_on(device, size, pinned=pinned) for device, size in wanted.items()}
            generation.registration = await self._agent.register([one.region for one in memory.values()])
            generation.memory = dict(memory)
            generation.fitted += 1
        await self._sweep()

    def handle(self, generation: Generation, event: records.Event) -> None:
        """Feed an event to a generation, and perform what is decided.

        Raises:
            StateError: the machine refuses it; nothing has changed.
        """
        try:
            decision = machine.decide(generation.record, event)
        except Refused as refused:
            raise StateError(refused.message) from refused
        generation.record = decision.record
        for effect in decision.effects:
            if isinstance(effect, records.Deregister):
                self._generations.remove(generation)
                self._retired.append(generation)
        if decision.effects:
            self._tell()

    def figures(self) -> dict[str, float]:
        """How many generations there are, in which states, of how many bytes; and how many were skipped."""
        states = Counter(one.record.state for one in self._generations)
        return {
            "generations": len(self._generations),
            "generations_free": states[State.FREE],
            "generations_serving": states[State.SERVING],
            "generations_draining": states[State.DRAINING],
            "generations_bytes": sum(one.size_bytes for one in self._generations),
            "generations_grown": self.grown,
            "versions_skipped": self.skipped,
        }

    def begin_close(self) -> None:
        """Hand out none any more, and let whoever waits know; idempotent."""
        self._closing = True
        self._tell()

    async def aclose(self) -> None:
        """Deregister all, once their copies have ended; bounded, idempotent.

        What is still read then can't be read any more, and is never written.
        """
        self.begin_close()
        for one in self.generations:
            self.handle(one, records.Close())
        with anyio.move_on_after(COPIES_END_S):
            while self._generations:
                stopped = [one for one in self.generations if one.record.state is State.FREE]
                for one in stopped:
                    self.handle(one, records.Close())
                if not stopped:
                    await self._changed.wait()
        for one in self._generations:
            _log.warning(
                "generation %d: its copy has not ended %g s after close", one.record.number, COPIES_END_S
            )
        await self._sweep()

    def _use_for(self, version_id: str) -> Use | None:
        match choose([one.record for one in self._generations], self.limits):
            case Take(number):
                generation = next(one for one in self._generations if one.record.number == number)
            case Make(grown):
                generation = self._make(version_id, grown=grown)
            case Skip():
                self.skipped += 1
                raise NoRoom(f"version {version_id}: skipped: {self._who_holds()}")
            case _:
                return None
        self._uses += 1
        generation.last_used = self._uses
        self.handle(generation, records.Acquire(VersionId(version_id)))
        self._retire_surplus()
        return Use(self, generation)

    def _make(self, version_id: str, *, grown: bool) -> Generation:
        self._made += 1
        generation = Generation(self._made)
        self._generations.append(generation)
        if grown:
            self.grown += 1
            _log.info("version %s: one more generation, of %d: %s", version_id, self._made, self._who_holds())
        return generation

    def _retire_surplus(self) -> None:
        alive = self._generations
        last_used = [one.last_used for one in alive]
        number = surplus([one.record for one in alive], last_used, self._uses, self.limits)
        if number is not None:
            _log.info("generation %d has not been needed for long, and goes", number)
            self.handle(next(one for one in alive if one.record.number == number), records.Retire())

    def _who_holds(self) -> str:
        held = [one.record for one in self._generations if one.record.state is not State.FREE]
        names = (
            "a copy that is being stopped"
            if record.version_id is None
            else f"version {record.version_id} ({record.state.value})"
            for record in held
        )
        return f"{len(held)} of {self.limits.most} are held by {', '.join(names)}"

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _sweep(self) -> None:
        while self._retired:
            await self._deregister(self._retired.pop())

    async def _deregister(self, generation: Generation) -> None:
        registration, generation.registration = generation.registration, None
        memory, generation.memory = generation.memory, {}
        if registration is not None:
            await self._agent.deregister(registration)
        for one in memory.values():
            if isinstance(one, HostMemory):
                one.unpin()
