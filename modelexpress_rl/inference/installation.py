"""The driver of a rank's installation machine: it feeds events and performs the effects that are local.

Reading and writing are awaited by the client, which is at the point that the machine says; returning
leases, freeing or quarantining staging and reporting are done here, when the machine decides so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from modelexpress_rl.clock import Clock
from modelexpress_rl.errors import LeaseLost, StateError
from modelexpress_rl.inference.lease import HeldLease
from modelexpress_rl.inference.pull import Pull
from modelexpress_rl.inference.session import GeneratorSession
from modelexpress_rl.inference.sources import Departed
from modelexpress_rl.inference.staging import Arena, StagingPool
from modelexpress_rl.transport.port import Read
from statemachines import installation as machine
from statemachines.ids import VersionId, WorkerId
from statemachines.installation_records import (
    Abandoned,
    Effect,
    Event,
    FreeStaging,
    Idle,
    InstallationRecord,
    InstallationState,
    LeaseGranted,
    LeaseRenewed,
    QuarantineStaging,
    ReadsEnded,
    ReportServing,
    ReturnLease,
    Serving,
    SourceFailed,
    Uncertain,
)
from statemachines.kernel import Refused

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Work:
    """What the version that is worked on holds here."""

    version_id: VersionId
    lease: HeldLease
    departed: Departed = field(default_factory=Departed)
    pull: Pull | None = None
    arena: Arena | None = None


class Installation:
    """One rank's machine. Every method is called in the client's event loop."""

    def __init__(
        self,
        session: GeneratorSession,
        pool: StagingPool,
        clock: Clock,
        initial: VersionId | None,
    ) -> None:
        self.record = InstallationRecord(resting=Idle() if initial is None else Serving(initial))
        self.work: Work | None = None
        self._session = session
        self._pool = pool
        self._clock = clock

    @property
    def state(self) -> InstallationState:
        """The machine's state."""
        return self.record.state

    @property
    def serving(self) -> VersionId | None:
        """The version that every parameter provably holds."""
        return self.record.serving

    @property
    def uncertain(self) -> bool:
        """Whether an install failed half-way, or one is under way."""
        return isinstance(self.record.resting, Uncertain) or self.state is InstallationState.INSTALLING

    def feed(self, event: Event) -> None:
        """Decide, commit, perform.

        Raises:
            Refused: the machine refuses the event; nothing has changed.
        """
        decision = machine.decide(self.record, event, self._clock.now_ms())
        self.record = decision.record
        for effect in decision.effects:
            self._perform(effect)

    def begin(self, lease: HeldLease) -> None:
        """A lease was granted: the work on its version begins.

        Raises:
            StateError: reads of an earlier pull of this version are still in flight.
        """
        self.work = Work(lease.version_id, lease)
        try:
            self.feed(LeaseGranted(lease.version_id, lease.lease_id, lease.deadline_ms))
        except Refused as refused:
            self.work = None
            self._session.give_back(lease)
            raise StateError(str(refused)) from refused
        lease.on_renewed = self._renewed

    def fail_over(self, failed: frozenset[WorkerId], sources: frozenset[WorkerId]) -> None:
        """`failed` are read no more, `sources` from now on; nothing of the failed may land any more.

        Raises:
            LeaseLost: what was read is no longer protected.
        """
        for worker_id in sorted(failed):
            self.feed(SourceFailed(worker_id, sources, reads_in_flight=False))
            if self.state is not InstallationState.PULLING:
                raise LeaseLost(
                    f"worker {worker_id} failed, and the lease no longer protected what had been read of it"
                )

    def abandon(self, reason: str) -> None:
        """The work ends here, whatever state it is in; harmless where there is none."""
        pull = None if self.work is None else self.work.pull
        self.feed(Abandoned(reason, reads_in_flight=pull is not None and bool(pull.unsettled)))
        # With reads in flight the machine lets the lease lapse: it protects them until then.
        self.work = None

    def _renewed(self, lease: HeldLease) -> None:
        before = self.record.working
        self.feed(LeaseRenewed(lease.deadline_ms, lease.confirmed))
        if self.work is not None:
            self.work.departed.add(lease.gone)
        pull = None if self.work is None else self.work.pull
        confirmed = getattr(before, "confirmed", None)
        if pull is not None and confirmed is not None:
            dropped: frozenset[WorkerId] = confirmed - lease.confirmed
            if dropped:
                _log.warning("version %s: no longer live: %s", lease.version_id, ", ".join(sorted(dropped)))
                pull.drop(dropped)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case ReturnLease():
                assert self.work is not None
                self._session.give_back(self.work.lease)
            case FreeStaging(version_id=version_id):
                self._free(version_id)
            case QuarantineStaging(version_id=version_id):
                self._quarantine(version_id)
            case ReportServing(version_id=version_id):
                self._session.report_serving(version_id, uncertain=version_id is None)
            case _:
                pass  # FetchManifests, PostReads, WriteParameters: the client is about to do that

    def _free(self, version_id: VersionId) -> None:
        work = self.work
        if work is None or work.version_id != version_id or work.arena is None:
            return  # it was quarantined, and the pool has it back already
        arena, unsettled = self._part_with_arena(work)
        if unsettled:
            self._pool.quarantine(arena, unsettled)
        else:
            self._pool.give_back(arena)

    def _quarantine(self, version_id: VersionId) -> None:
        work = self.work
        assert work is not None
        arena, unsettled = self._part_with_arena(work)
        self._pool.quarantine(arena, unsettled, lambda: self.feed(ReadsEnded(version_id)))

    def _part_with_arena(self, work: Work) -> tuple[Arena, list[Read]]:
        pull, arena = work.pull, work.arena
        work.pull = work.arena = None
        if pull is not None:
            return pull.arena, pull.unsettled
        assert arena is not None
        return arena, []
