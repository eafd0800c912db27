"""The data of the publication machine: its states with what is valid in each, its events, its effects.

Times are monotonic milliseconds of the trainer's own process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from statemachines.ids import SlotId, VersionId


class PublicationState(StrEnum):
    """The states of a publication."""

    CAPTURING = "CAPTURING"
    STAGED = "STAGED"
    PUBLISHED = "PUBLISHED"
    DRAINING = "DRAINING"
    ORPHANED = "ORPHANED"
    REUSABLE = "REUSABLE"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Capturing:
    """Bytes are being copied, or (in place) tensors being looked at."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The buffer holds the version. `announcing`: an announcement is under way and may have landed."""

    announcing: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """Readers may come. `confirmed`: the control plane has said so, not just possibly heard so.

    Until `forgotten_until_ms` there may be readers that the control plane has forgotten.
    """

    confirmed: bool
    forgotten_until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Draining:
    """No longer offered; readers that came may still read, forgotten ones until `forgotten_until_ms`."""

    forgotten_until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Cut off. At `bound_ms` nobody can be reading any more. `released`: the buffer is wanted back.

    `forgotten`: the control plane no longer knows who reads, so its word ends nothing before the bound.
    """

    bound_ms: int
    released: bool
    forgotten: bool = False


@dataclass(frozen=True, slots=True)
class Reusable:
    """Nobody may read the buffer: its owner may write it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What the fences stand for can't happen any more, because of `reason`."""

    reason: str


Phase: TypeAlias = Capturing | Staged | Published | Draining | Orphaned | Reusable | Failed

STATES: dict[type, PublicationState] = dict(
    zip((Capturing, Staged, Published, Draining, Orphaned, Reusable, Failed), PublicationState, strict=True)
)


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """One publication and where it stands."""

    version_id: VersionId
    slot_id: SlotId
    phase: Phase

    @property
    def state(self) -> PublicationState:
        """The name of the phase."""
        return STATES[type(self.phase)]


def begin(version_id: VersionId, slot_id: SlotId) -> PublicationRecord:
    """A publication whose capture begins now."""
    return PublicationRecord(version_id, slot_id, Capturing())


# Events.


@dataclass(frozen=True, slots=True)
class Captured:
    """The buffer holds the whole version."""


@dataclass(frozen=True, slots=True)
class CaptureFailed:
    """The capture can't be completed, because of `reason`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Offer the version to readers; again is harmless."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The control plane has filed the shard."""


@dataclass(frozen=True, slots=True)
class AnnounceUnknown:
    """The reply was lost: the shard may have been filed."""


@dataclass(frozen=True, slots=True)
class AnnounceRefused:
    """The control plane refused the shard; it files it neither now nor later.

    Only where every earlier attempt was answered: one that was not may have been filed, and is an
    `AnnounceUnknown` of its own before this.
    """


@dataclass(frozen=True, slots=True)
class Discard:
    """The owner changed its mind before publishing."""


@dataclass(frozen=True, slots=True)
class Release:
    """The owner wants the buffer back."""


@dataclass(frozen=True, slots=True)
class VersionReleased:
    """The watch shows that the version is being released."""


@dataclass(frozen=True, slots=True)
class VersionLost:
    """The control plane has forgotten the version, or knows another record under its uid.

    Readers are gone by `bound_ms`; it can't say any more who they are.
    """

    bound_ms: int


@dataclass(frozen=True, slots=True)
class RegistrationLost:
    """Our registration lapsed; readers are gone by `bound_ms`."""

    bound_ms: int


@dataclass(frozen=True, slots=True)
class ServerUnreachable:
    """The control plane has not answered for too long; readers are gone by `bound_ms`."""

    bound_ms: int


@dataclass(frozen=True, slots=True)
class Reachable:
    """The control plane answers again, we are registered, and the version is the record that it was.

    Where it is another record under the same uid, or there is none, `VersionLost` is said before this.
    """


@dataclass(frozen=True, slots=True)
class Drained:
    """The control plane says that nobody reads and that the shard is filed no more.

    That it does not know the shard is not enough for this: the shard also goes with our registration.
    """


@dataclass(frozen=True, slots=True)
class BoundPassed:
    """A timer says that an orphan's bound may have passed."""


@dataclass(frozen=True, slots=True)
class Close:
    """The process is going away: as Release, and the buffers end with the close deadline."""


@dataclass(frozen=True, slots=True)
class CloseDeadlinePassed:
    """The process goes away now, drained or not."""


Event: TypeAlias = (
    Captured
    | CaptureFailed
    | Publish
    | Announced
    | AnnounceUnknown
    | AnnounceRefused
    | Discard
    | Release
    | VersionReleased
    | VersionLost
    | RegistrationLost
    | ServerUnreachable
    | Reachable
    | Drained
    | BoundPassed
    | Close
    | CloseDeadlinePassed
)

# Effects.


@dataclass(frozen=True, slots=True)
class SignalPublishReady:
    """Complete `publish_ready`."""


@dataclass(frozen=True, slots=True)
class ServeManifest:
    """Answer requests for the manifest; again is harmless."""


@dataclass(frozen=True, slots=True)
class AnnounceShard:
    """File the shard with the control plane under its one identity, until the outcome is known."""


@dataclass(frozen=True, slots=True)
class WatchDrain:
    """Withdraw the shard as soon as nobody reads, and then say `Drained`."""


@dataclass(frozen=True, slots=True)
class ArmBound:
    """Say `BoundPassed` at `at_ms`."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class StopServing:
    """No longer answer for the manifest."""


@dataclass(frozen=True, slots=True)
class SignalReuse:
    """Complete `source_reuse_ready`."""


@dataclass(frozen=True, slots=True)
class BreakFences:
    """Break every fence that has not completed, with `reason`."""

    reason: str


Effect: TypeAlias = (
    SignalPublishReady
    | ServeManifest
    | AnnounceShard
    | WatchDrain
    | ArmBound
    | StopServing
    | SignalReuse
    | BreakFences
)
Outcome: TypeAlias = tuple[PublicationRecord, tuple[Effect, ...]]
