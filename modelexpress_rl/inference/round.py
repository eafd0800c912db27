"""One round of reads: a bounded window of them in flight, each verified as soon as it landed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass

import anyio
import numpy as np

from modelexpress_rl.clock import Clock
from modelexpress_rl.errors import ModelExpressError, PeerError, TransferError, TransferTimeout
from modelexpress_rl.inference.checks import Checks
from modelexpress_rl.inference.planning import Chunk, ReadPlan
from modelexpress_rl.inference.reads import ReadCache
from modelexpress_rl.inference.sources import VersionSources
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.inference.turns import Turns
from modelexpress_rl.inference.window import Window
from modelexpress_rl.reshard.geometry import Source
from modelexpress_rl.reshard.verify import Verified
from modelexpress_rl.transport.port import Agent, Read
from statemachines.ids import WorkerId

# A source that moves less than this has stalled.
MIN_BYTES_PER_S = 8 << 20


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Bounds of one round; the deadlines are on the clock of `anyio.current_time()`.

    No read is awaited past `read_deadline`, no digest past `deadline`. A source of which nothing landed
    for `stall_timeout_s`, and for as long as its bytes in flight take at `MIN_BYTES_PER_S`, has failed.
    """

    read_deadline: float
    deadline: float
    max_in_flight_bytes: int
    stall_timeout_s: float


class Round:
    """The reads of one plan into one arena.

    After `run`: `landed` says which pieces of the plan arrived and passed, `failures` why those of a
    source did not, `last_read_ms` when the last good read ended, `unsettled` which reads may still
    write to the arena (also after a cancellation).
    """

    def __init__(
        self,
        agent: Agent,
        cache: ReadCache,
        clock: Clock,
        *,
        reads: ReadPlan,
        checks: Checks,
        sources: VersionSources,
        arena: Arena,
        limits: RoundLimits,
    ) -> None:
        self.landed = np.zeros(len(reads.plan.pieces), np.bool_)
        self.failures: dict[Source, Exception] = {}
        self.last_read_ms = 0
        self.verified = Verified(0, 0)
        self.posted_bytes = 0
        self._agent = agent
        self._cache = cache
        self._clock = clock
        self._plan = reads
        self._checks = checks
        self._sources = sources
        self._arena = arena
        self._limits = limits
        self._turns = Turns(reads.chunks)
        self._window = Window(
            (chunk for chunk in reads.chunks if chunk.part is None), limits.max_in_flight_bytes
        )
        self._moved = anyio.Event()
        self._progress: dict[Source, float] = {}
        self._reading: dict[Source, list[anyio.CancelScope]] = {}
        self._reads: list[Read] = []
        self._open: dict[Source, list[anyio.CancelScope]] = {}

    @property
    def unsettled(self) -> list[Read]:
        """Reads that may still write to the arena."""
        return [read for read in self._reads if not read.settled]

    async def run(self) -> None:
        """Post what the window allows, and more as reads land, until each landed, failed, or timed out.

        The first reads of all sources are posted before any is awaited, as far as the window allows.
        """
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._checks.fetch, self._limits.deadline)
            async with anyio.create_task_group() as group:
                for chunk in self._turns.staged:
                    group.start_soon(self._read_staged, chunk)
                while not self._window.exhausted:
                    following = self._window.next()
                    if following is None:
                        await self._moved.wait()
                        continue
                    read = await self._post(following)
                    if read is not None:
                        group.start_soon(self._finish, following, read)
            beside.cancel_scope.cancel()  # digests of sources that failed are not waited for

    def drop(self, workers: Collection[WorkerId], reason: str) -> None:
        """Give up these workers' reads that have not landed: the lease no longer protects them."""
        for chunk in self._plan.chunks:
            source = chunk.source
            if source.worker_id in workers and not self.landed[chunk.rows].all():
                self._give_up(source, TransferError(f"{source}: {reason}", peer=source.agent_name))

    async def _read_staged(self, chunk: Chunk) -> None:
        """Read into scratch, once the chunk before it there was copied out.

        Where a read that was given up may still write there, none follows: that is no failure of its
        source, and the next round reads it, into another arena.
        """
        free = await self._turns.turn(chunk)
        if free and chunk.source not in self.failures:
            self._window.post_also(chunk)
            read = await self._post(chunk)
            if read is not None:
                await self._finish(chunk, read)
                free = read.settled
        self._turns.end(chunk, free=free)

    async def _post(self, chunk: Chunk) -> Read | None:
        manifest = self._sources.of(chunk.source).manifest.manifest
        try:
            prepared = await self._cache.prepared(chunk, self._plan.plan, manifest, self._arena)
            if chunk.source in self.failures:
                return None
            read = await self._agent.post(prepared)
        except (TransferError, PeerError) as error:
            self._fail(chunk.source, error)
            return None
        self._reads.append(read)
        self.posted_bytes += chunk.total_bytes
        return read

    async def _finish(self, chunk: Chunk, read: Read) -> None:
        source = chunk.source
        with anyio.CancelScope() as scope:
            self._open.setdefault(source, []).append(scope)
            if source in self.failures:  # given up before this task began
                scope.cancel()
            try:
                await self._landing(chunk, read, scope)
                verified = await self._checks.verify(chunk, self._arena)
            except ModelExpressError as error:
                self._fail(source, error)
            else:
                self.landed[chunk.rows] = True
                self.verified += verified
        scopes = self._open[source]
        scopes.remove(scope)
        if not scopes:
            del self._open[source]
        if scope.cancelled_caught and source not in self.failures:
            self._give_up(source, self._stalled(source))
        if scope.cancel_called and not read.settled:
            await _tell_abandoned(read)

    async def _landing(self, chunk: Chunk, read: Read, scope: anyio.CancelScope) -> None:
        """Wait until a read has landed, in a scope that ends when its source stalls."""
        source = chunk.source
        reading = self._reading.setdefault(source, [])
        if not reading:
            self._progress[source] = anyio.current_time()
        reading.append(scope)
        self._allow_time(source)
        try:
            await read.wait(self._limits.read_deadline)
        finally:
            reading.remove(scope)
        scope.deadline = math.inf
        self.last_read_ms = max(self.last_read_ms, self._clock.now_ms())
        self._window.landed(chunk)
        self._progress[source] = anyio.current_time()
        self._allow_time(source)
        self._tell_moved()

    def _allow_time(self, source: Source) -> None:
        for scope in self._reading[source]:
            scope.deadline = self._progress[source] + self._allowed_s(source)

    def _allowed_s(self, source: Source) -> float:
        return self._limits.stall_timeout_s + self._window.in_flight[source] / MIN_BYTES_PER_S

    def _stalled(self, source: Source) -> TransferTimeout:
        return TransferTimeout(
            f"nothing landed for {anyio.current_time() - self._progress[source]:.1f} s, with "
            f"{self._window.in_flight[source]} bytes in flight; {self._allowed_s(source):.1f} s are allowed",
            peer=source.agent_name,
        )

    def _fail(self, source: Source, error: Exception) -> None:
        self.failures.setdefault(source, error)
        self._window.give_up(source)
        self._tell_moved()

    def _give_up(self, source: Source, error: Exception) -> None:
        self._fail(source, error)
        for scope in self._open.get(source, ()):
            scope.cancel()

    def _tell_moved(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()


async def _tell_abandoned(read: Read) -> None:
    """Let the transport know that nobody awaits this read any more."""
    with contextlib.suppress(ModelExpressError):
        await read.wait(anyio.current_time())
