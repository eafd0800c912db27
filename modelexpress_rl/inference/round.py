"""One round of reads: all posted before the first is awaited, each verified as soon as it landed."""

from __future__ import annotations

from collections.abc import Collection

import anyio
import numpy as np

from modelexpress_rl.clock import Clock
from modelexpress_rl.errors import ModelExpressError, PeerError, TransferError
from modelexpress_rl.inference.checks import Checks
from modelexpress_rl.inference.planning import Chunk, ReadPlan
from modelexpress_rl.inference.reads import ReadCache
from modelexpress_rl.inference.sources import VersionSources
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.reshard.geometry import Source
from modelexpress_rl.reshard.verify import Verified
from modelexpress_rl.transport.port import Agent, Read
from statemachines.ids import WorkerId


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
        read_deadline: float,
        deadline: float,
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
        self._read_deadline = read_deadline
        self._deadline = deadline
        self._reads: list[Read] = []
        self._open: dict[Source, list[anyio.CancelScope]] = {}

    @property
    def unsettled(self) -> list[Read]:
        """Reads that may still write to the arena."""
        return [read for read in self._reads if not read.settled]

    async def run(self) -> None:
        """Post everything, then wait for each read until it landed, failed, or its deadline passed."""
        async with anyio.create_task_group() as digests:
            digests.start_soon(self._checks.fetch, self._deadline)
            async with anyio.create_task_group() as group:
                for chunk in self._plan.chunks:
                    if chunk.source in self.failures:
                        continue
                    read = await self._post(chunk)
                    if read is not None:
                        group.start_soon(self._finish, chunk, read)
            digests.cancel_scope.cancel()  # those of sources that failed are not waited for

    def drop(self, workers: Collection[WorkerId], reason: str) -> None:
        """Give up these workers' reads that have not landed: the lease no longer protects them."""
        for chunk in self._plan.chunks:
            source = chunk.source
            if source.worker_id in workers and not self.landed[chunk.rows].all():
                self._fail(source, TransferError(f"{source}: {reason}", peer=source.agent_name))
                for scope in self._open.get(source, ()):
                    scope.cancel()

    async def _post(self, chunk: Chunk) -> Read | None:
        manifest = self._sources.of(chunk.source).manifest.manifest
        try:
            prepared = await self._cache.prepared(chunk, self._plan.plan, manifest, self._arena)
            read = await self._agent.post(prepared)
        except (TransferError, PeerError) as error:
            self._fail(chunk.source, error)
            return None
        self._reads.append(read)
        self.posted_bytes += chunk.total_bytes
        return read

    async def _finish(self, chunk: Chunk, read: Read) -> None:
        with anyio.CancelScope() as scope:
            self._open.setdefault(chunk.source, []).append(scope)
            try:
                await read.wait(self._read_deadline)
                self.last_read_ms = max(self.last_read_ms, self._clock.now_ms())
                verified = await self._checks.verify(chunk, self._arena)
            except ModelExpressError as error:
                self._fail(chunk.source, error)
            else:
                self.landed[chunk.rows] = True
                self.verified += verified
        scopes = self._open[chunk.source]
        scopes.remove(scope)
        if not scopes:
            del self._open[chunk.source]

    def _fail(self, source: Source, error: Exception) -> None:
        self.failures.setdefault(source, error)
