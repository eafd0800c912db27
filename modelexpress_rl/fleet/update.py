"""One update of a fleet, phase by phase."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from modelexpress_rl.fleet.report import FleetAborted, FleetReport
from statemachines.fleet_records import Abort, Begin, Commit, FleetState
from statemachines.ids import VersionId

if TYPE_CHECKING:
    from modelexpress_rl.fleet.fleet import Fleet
    from modelexpress_rl.fleet.policy import FleetPolicy

_WORKING = (FleetState.STAGING, FleetState.STAGED, FleetState.COMMITTING, FleetState.ABORTING)


class FleetUpdate:
    """An update under way; made by `Fleet.updating`, an async context manager.

    async with fleet.updating("v7") as update:
        await update.staged()           # a quorum has v7 beside what it serves
        ...                             # the orchestrator's own safe point
        report = await update.commit()

    Whoever leaves the block before the verdict aborts the update, and waits until everybody has gone back.
    """

    def __init__(self, fleet: Fleet, version_id: VersionId, policy: FleetPolicy) -> None:
        self.version_id = version_id
        self.policy = policy
        self._fleet = fleet

    async def __aenter__(self) -> Self:
        terms = self.policy.terms(len(self._fleet.members))
        self._fleet._begin(self, Begin(self.version_id, terms))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):  # bounded: each phase has its deadline
            if self._fleet.record.state in _WORKING:
                why = "nobody committed it" if error is None else f"{type(error).__name__}: {error}"
                self._fleet._feed(Abort(f"the orchestrator left the update: {why}"))
            await self._fleet._until(self._is_over)
            self._fleet._end(self)

    async def staged(self) -> None:
        """Wait until a quorum has staged the version.

        Raises:
            FleetAborted: too few could; everyone serves what it served.
        """
        await self._fleet._until(lambda: self._fleet.record.state is not FleetState.STAGING)
        await self._raise_if_aborted()

    async def commit(self) -> FleetReport:
        """Have everyone who staged it install it, and serve it once a quorum holds it.

        Raises:
            FleetAborted: too few could; those that had installed it have gone back, or are out.
            StateError: it is not staged, or the time to decide is over.
        """
        if self._fleet.record.current != self.version_id:
            self._fleet._feed(Commit())
        await self._fleet._until(self._is_over)
        await self._raise_if_aborted()
        return self.report

    @property
    def report(self) -> FleetReport:
        """How the fleet stands now."""
        return FleetReport.of(self.version_id, self._fleet.record, self._fleet._metrics())

    def _is_over(self) -> bool:
        record = self._fleet.record
        return record.state not in _WORKING and record.deadline_ms is None

    async def _raise_if_aborted(self) -> None:
        if self._fleet.record.current == self.version_id:
            return  # it is served, whatever came of another version after it
        if self._fleet.record.state in (FleetState.ABORTING, FleetState.ABORTED):
            await self._fleet._until(self._is_over)
            raise FleetAborted(self.report)
