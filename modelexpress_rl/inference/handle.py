"""Handles of staged versions, asynchronous and blocking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from modelexpress_rl.timing import RefitRecord
from statemachines.ids import VersionId

if TYPE_CHECKING:
    from modelexpress_rl.blocking import Portal
    from modelexpress_rl.reshard.explain import PlanSummary


class AsyncStagedWeightHandle:
    """A version whose bytes lie verified in staging memory, until it is applied or released.

    `metrics` are the times and counters of the refit so far; see `modelexpress_rl.timing`.
    """

    def __init__(
        self,
        version_id: VersionId,
        record: RefitRecord,
        on_release: Callable[[AsyncStagedWeightHandle], None],
        *,
        applied: bool = False,
        plan: Callable[[], PlanSummary] | None = None,
    ) -> None:
        self._plan = plan
        self._version_id = version_id
        self._record = record
        self._on_release = on_release
        self._applied = applied
        self._released = applied

    @property
    def version_id(self) -> str:
        """The version."""
        return self._version_id

    @property
    def metrics(self) -> Mapping[str, float]:
        """Times and counters of this refit."""
        return self._record.metrics

    @property
    def plan(self) -> PlanSummary | None:
        """What was planned to be read from whom; None where nothing was, for it is served already.

        Where a source failed on the way, others were read for what it had.
        """
        return None if self._plan is None else self._plan()

    def explain(self) -> str:
        """The plan in words and as a table."""
        plan = self.plan
        return (
            f"version {self.version_id} is served already: nothing is read" if plan is None else plan.text()
        )

    @property
    def applied(self) -> bool:
        """Whether every parameter was written from it."""
        return self._applied

    @property
    def released(self) -> bool:
        """Whether its staging memory has been given up: it was applied, released, or its install failed."""
        return self._released

    async def release(self) -> None:
        """Give the staging memory up, unless it has been; idempotent. Live weights are not touched.

        Raises:
            StateError: it is being installed.
        """
        if not self._released:
            self._on_release(self)
            self._released = True

    def _end(self, *, applied: bool) -> None:
        self._applied = applied
        self._released = True


class StagedWeightHandle:
    """The blocking view of an `AsyncStagedWeightHandle`; the same version gives the same handle."""

    def __init__(self, staged: AsyncStagedWeightHandle, portal: Portal) -> None:
        self.staged = staged
        self._portal = portal

    @property
    def version_id(self) -> str:
        """The version."""
        return self.staged.version_id

    @property
    def metrics(self) -> Mapping[str, float]:
        """Times and counters of this refit."""
        return self.staged.metrics

    @property
    def plan(self) -> PlanSummary | None:
        """What was planned to be read from whom; None where the version is served already."""
        return self.staged.plan

    def explain(self) -> str:
        """The plan in words and as a table."""
        return self.staged.explain()

    @property
    def applied(self) -> bool:
        """Whether every parameter was written from it."""
        return self.staged.applied

    @property
    def released(self) -> bool:
        """Whether its staging memory has been given up."""
        return self.staged.released

    def release(self) -> None:
        """Give the staging memory up; idempotent."""
        if not self.staged.released:
            self._portal.call(self.staged.release)
