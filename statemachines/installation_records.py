"""The data of the installation machine: its states with what is valid in each, its events, its effects.

Times are monotonic milliseconds of the generator's own process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from statemachines.ids import LeaseId, VersionId, WorkerId


class InstallationState(StrEnum):
    """The states of a generator rank."""

    IDLE = "IDLE"
    LEASED = "LEASED"
    PLANNED = "PLANNED"
    PULLING = "PULLING"
    VERIFIED = "VERIFIED"
    INSTALLING = "INSTALLING"
    SERVING = "SERVING"
    UNCERTAIN = "UNCERTAIN"


@dataclass(frozen=True, slots=True)
class Idle:
    """No version was ever installed by us."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Every parameter holds `version_id`."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Uncertain:
    """An install of `version_id` failed half-way: parameters may hold either version."""

    version_id: VersionId


Resting: TypeAlias = Idle | Serving | Uncertain


@dataclass(frozen=True, slots=True)
class Leased:
    """A lease protects `version_id`; it may be read until `lease_deadline_ms` of our own clock.

    `still_live` are the publishers that every renewal so far has confirmed; None before the first.
    """

    version_id: VersionId
    lease_id: LeaseId
    lease_deadline_ms: int
    still_live: frozenset[WorkerId] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Planned(Leased):
    """It is known which bytes come from which of `sources`."""

    sources: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class Pulling(Planned):
    """Reads are posted; `confirmed` are the publishers that every renewal so far said are live.

    Once a source has dropped out of them, what was read from it is good until `sources_until_ms`: the
    lease goes on, and no longer protects that source.
    """

    confirmed: frozenset[WorkerId]
    sources_until_ms: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Verified:
    """The staged bytes are the version, wholly; nothing remote is needed any more."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Installing:
    """Parameters are being written."""

    version_id: VersionId


Working: TypeAlias = Leased | Planned | Pulling | Verified | Installing

_STATES: dict[type, InstallationState] = dict(
    zip(
        (Idle, Leased, Planned, Pulling, Verified, Installing, Serving, Uncertain),
        InstallationState,
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class InstallationRecord:
    """What the rank serves (`resting`), what it works on, and the stagings it may not touch.

    `quarantined` names stagings whose reads have not ended although their pull has.
    """

    resting: Resting = Idle()
    working: Working | None = None
    quarantined: frozenset[VersionId] = frozenset()

    @property
    def state(self) -> InstallationState:
        """The state of the work, or of the weights where there is none."""
        return _STATES[type(self.resting if self.working is None else self.working)]

    @property
    def serving(self) -> VersionId | None:
        """The version that every parameter provably holds; None while that can't be said."""
        if isinstance(self.working, Installing) or not isinstance(self.resting, Serving):
            return None
        return self.resting.version_id


# Events.


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The control plane granted a lease; the deadline is ours: measured before sending, less a margin."""

    version_id: VersionId
    lease_id: LeaseId
    lease_deadline_ms: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A renewal succeeded, and said which publishers are live.

    A publisher counts only with the publication that was granted: the same worker with another manifest
    is not in `confirmed`.
    """

    lease_deadline_ms: int
    confirmed: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class PlanMade:
    """Manifests and needs fit, every element exactly once; `proven` is the coverage proof's word."""

    sources: frozenset[WorkerId]
    proven: bool


@dataclass(frozen=True, slots=True)
class PullStarted:
    """The reads are about to be posted; `confirmed` were live at the last renewal or at the grant."""

    confirmed: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source is lost; `sources` is the plan without it, None where no replica has its ranges.

    `reads_in_flight`: reads from it can't be ended, and may yet land where a replica's would.
    """

    source: WorkerId
    sources: frozenset[WorkerId] | None
    reads_in_flight: bool


@dataclass(frozen=True, slots=True)
class PullVerified:
    """The last read ended at `last_read_ms`; the digests of what landed agreed or did not."""

    last_read_ms: int
    digests_agree: bool


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The work ends here: an error, a cancel, a lost lease, or a handle that was released unused."""

    reason: str
    reads_in_flight: bool = False


@dataclass(frozen=True, slots=True)
class ReadsEnded:
    """The transport says that no read of that version's staging is in flight any more."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Install:
    """The engine is at its safe point: write the parameters."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Every parameter has been written."""


@dataclass(frozen=True, slots=True)
class InstallFailed:
    """Writing stopped half-way."""

    reason: str


Event: TypeAlias = (
    LeaseGranted
    | LeaseRenewed
    | PlanMade
    | PullStarted
    | SourceFailed
    | PullVerified
    | Abandoned
    | ReadsEnded
    | Install
    | Installed
    | InstallFailed
)

# Effects.


@dataclass(frozen=True, slots=True)
class FetchManifests:
    """Fetch and check the manifests of the version's publications, and plan."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class PostReads:
    """Read what the plan says, from `sources`."""

    version_id: VersionId
    sources: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """Give the lease back: nothing of the version will be read any more."""

    version_id: VersionId
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class QuarantineStaging:
    """Keep the staging of `version_id` untouched and registered until `ReadsEnded`."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class FreeStaging:
    """The staging of `version_id` may be used for another version."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class WriteParameters:
    """Install the staged bytes."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class ReportServing:
    """Tell the control plane which version is served; None while that can't be said."""

    version_id: VersionId | None


Effect: TypeAlias = (
    FetchManifests
    | PostReads
    | ReturnLease
    | QuarantineStaging
    | FreeStaging
    | WriteParameters
    | ReportServing
)
Outcome: TypeAlias = tuple[InstallationRecord, tuple[Effect, ...]]
