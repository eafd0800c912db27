"""The pull of one version: rounds of reads, the first of the whole plan, later ones of what is left.

A source that fails is replaced by replicas, for the ranges that have not landed. A failure that a
second try may mend (a damaged byte, a broken connection) is tried again on the same source where there
is no replica. Reads that can't be ended leave their arena in quarantine: what landed moves to another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.to_thread

from modelexpress_rl.clock import Clock
from modelexpress_rl.errors import (
    DeadlineExceeded,
    DigestMismatch,
    IncompleteVersionError,
    ManifestError,
    ModelExpressError,
    PeerError,
    TransferError,
    TransferTimeout,
    Unavailable,
)
from modelexpress_rl.inference.agreement import Agreement
from modelexpress_rl.inference.checks import Checks
from modelexpress_rl.inference.planning import PlannedVersion, ReadPlan
from modelexpress_rl.inference.reads import ReadCache
from modelexpress_rl.inference.round import MIN_BYTES_PER_S, Round, RoundLimits
from modelexpress_rl.inference.sources import SourceFetcher, VersionSources
from modelexpress_rl.inference.staging import Arena, StagingPool
from modelexpress_rl.inference.tasks import first_of
from modelexpress_rl.reshard.geometry import Source
from modelexpress_rl.reshard.plan import Plan
from modelexpress_rl.reshard.planner import replan
from modelexpress_rl.reshard.verify import Verified
from modelexpress_rl.transport.port import Agent, Read
from statemachines.ids import WorkerId

_log = logging.getLogger(__name__)

READ_GRACE_S = 10.0
_SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Bounds of one pull."""

    timeout_s: float
    max_attempts: int
    spread: int
    max_in_flight_bytes: int = 1 << 30
    stall_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought: every need lies in the arena, verified as far as there are digests."""

    last_read_ms: int
    attempts: int
    read_bytes: int
    verified: Verified


# Told when the set of sources changes: the workers that left it, and those that are read from now on.
OnFailover = Callable[[frozenset[WorkerId], frozenset[WorkerId]], None]


class Pull:
    """One pull. `arena` is where it reads into; `unsettled` which reads may still write there.

    Both stay valid after an error or a cancellation, for whoever has to quarantine the arena.
    """

    def __init__(
        self,
        agent: Agent,
        cache: ReadCache,
        fetcher: SourceFetcher,
        pool: StagingPool,
        clock: Clock,
        *,
        planned: PlannedVersion,
        sources: VersionSources,
        arena: Arena,
        settings: PullSettings,
        on_failover: OnFailover,
    ) -> None:
        self.arena = arena
        self._agent = agent
        self._cache = cache
        self._fetcher = fetcher
        self._pool = pool
        self._clock = clock
        self._planned = planned
        self._sources = sources
        self._settings = settings
        self._on_failover = on_failover
        self._round: Round | None = None
        self._failed: set[Source] = set()
        self._first_failure: tuple[Source, Exception] | None = None
        self._dropped: set[WorkerId] = set()
        self._reading = planned.reads.workers

    @property
    def unsettled(self) -> list[Read]:
        """Reads that may still write to `arena`."""
        return [] if self._round is None else self._round.unsettled

    def drop(self, workers: frozenset[WorkerId]) -> None:
        """These workers are no longer live: what has landed of them is good, no more may be read."""
        self._dropped |= workers
        if self._round is None:
            return
        self._round.drop(workers, "it is no longer live, by the last renewal of the lease")
        done = (workers & self._reading) - _workers(self._round.failures)
        if done and not (self._reading - done) & self._dropped:
            self._reading -= done
            self._on_failover(done, self._reading)

    async def run(self, deadline: float) -> PullResult:
        """Read until every need has landed; `deadline` is on the clock of `anyio.current_time()`.

        Raises:
            TransferError, TransferTimeout, DigestMismatch: the first failure, where no replica has what
                is missing or no attempt is left; the message names worker, slot and tensor or peer.
            GeometryError: replicas that were read differ; the message names the tensor and both.
        """
        agreement = Agreement(self._planned, self._sources, self._fetcher)
        try:
            if not agreement.has_replicas:
                return await self._rounds(deadline, lambda _: None)
            async with anyio.create_task_group() as beside:
                result = await self._rounds(deadline, lambda reads: agreement.ask(reads, beside, deadline))
                await agreement.require()
                beside.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        return result

    async def _rounds(self, deadline: float, on_round: Callable[[ReadPlan], None]) -> PullResult:
        reads = self._planned.reads
        verified, read_bytes, last_read_ms = Verified(0, 0), 0, 0
        for attempt in range(1, self._settings.max_attempts + 1):
            current = self._round = Round(
                self._agent,
                self._cache,
                self._clock,
                reads=reads,
                checks=Checks(reads, self._sources, self._fetcher, self._settings.stall_timeout_s),
                sources=self._sources,
                arena=self.arena,
                limits=self._limits(reads, deadline),
            )
            on_round(reads)
            await current.run()
            verified += current.verified
            read_bytes += current.posted_bytes
            last_read_ms = max(last_read_ms, current.last_read_ms)
            if current.landed.all():
                return PullResult(last_read_ms, attempt, read_bytes, verified)
            if attempt == self._settings.max_attempts or anyio.current_time() >= deadline:
                break
            reads = await self._without_failed(reads, current)
            await self._part_from_unsettled(current)
            self._reading = reads.workers
            self._on_failover(_workers(current.failures), self._reading)
        raise self._error(current, attempt)

    def _limits(self, reads: ReadPlan, deadline: float) -> RoundLimits:
        settings = self._settings
        read_deadline = self._read_deadline(reads, deadline)
        return RoundLimits(read_deadline, deadline, settings.max_in_flight_bytes, settings.stall_timeout_s)

    def _read_deadline(self, reads: ReadPlan, deadline: float) -> float:
        now = anyio.current_time()
        share_s = self._settings.timeout_s / self._settings.max_attempts
        expected_s = READ_GRACE_S + reads.plan.total_bytes / MIN_BYTES_PER_S
        return min(deadline, now + min(share_s, expected_s))

    async def _without_failed(self, reads: ReadPlan, ended: Round) -> ReadPlan:
        """Plan what has not landed, from replicas; where there are none, again from who may recover."""
        for source, error in ended.failures.items():
            self._first_failure = self._first_failure or (source, error)
            _log.warning("version %s: %s failed: %s", self._sources.version_id, source, error)
            if not isinstance(error, TransferTimeout):
                await self._cache.forget(source.agent_name)
        self._failed |= ended.failures.keys()
        hopeless = {
            source
            for source in self._planned.merged.sources
            if source.worker_id in self._dropped or isinstance(ended.failures.get(source), TransferTimeout)
        }
        for avoided in (self._failed | hopeless, hopeless):
            try:
                plan = await anyio.to_thread.run_sync(self._replan, reads, ended, frozenset(avoided))
            except IncompleteVersionError:
                continue
            planned = self._planned
            return ReadPlan.again(plan, planned.needs, planned.merged, planned.reads)
        raise self._error(ended, None)

    def _replan(self, reads: ReadPlan, ended: Round, avoid: frozenset[Source]) -> Plan:
        return replan(
            reads.wanted,
            self._planned.needs,
            self._planned.merged,
            failed_sources=avoid,
            landed=reads.landed(ended.landed),
            spread=self._settings.spread,
            distance=self._planned.distance,
        )

    async def _part_from_unsettled(self, ended: Round) -> None:
        """Where a read may still land, go on in another arena: a replica's bytes must not be overwritten."""
        until = anyio.current_time() + _SETTLE_S
        for read in ended.unsettled:
            if not await read.wait_settled(until):
                break
        unsettled = ended.unsettled
        if not unsettled:
            return
        size_bytes = self._planned.needs.arena_bytes
        fresh = await self._pool.take(self._planned.arena_bytes)
        # No await between these: a cancellation must find every arena in somebody's hands.
        old, self.arena, self._round = self.arena, fresh, None
        self._pool.quarantine(old, unsettled)
        await anyio.to_thread.run_sync(_copy, old, fresh, size_bytes)

    def _error(self, ended: Round, attempts: int | None) -> Exception:
        source, error = self._first_failure or next(iter(ended.failures.items()))
        tried = (
            "no replica has what is missing" if attempts is None else f"given up after {attempts} attempts"
        )
        about = f"version {self._sources.version_id}: {source}: {error} ({tried})"
        raised: Exception
        if isinstance(error, TransferError):
            raised = type(error)(about, peer=error.peer)
        elif isinstance(error, (DigestMismatch, ManifestError, Unavailable, DeadlineExceeded)):
            raised = type(error)(about)
        elif isinstance(error, PeerError):
            raised = PeerError(about)
        else:
            raised = ModelExpressError(about)
        raised.__cause__ = error
        return raised


def _copy(old: Arena, fresh: Arena, size_bytes: int) -> None:
    fresh.memory[:size_bytes] = old.memory[:size_bytes]


def _workers(sources: dict[Source, Exception]) -> frozenset[WorkerId]:
    return frozenset(WorkerId(source.worker_id) for source in sources)
