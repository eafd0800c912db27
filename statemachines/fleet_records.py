"""The data of the fleet machine: its states with what is valid in each, its events, its effects.

Times are monotonic milliseconds of the orchestrator's own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NewType, TypeAlias

from statemachines.ids import VersionId

GeneratorId = NewType("GeneratorId", str)


class FleetState(StrEnum):
    """The states of a fleet."""

    IDLE = "IDLE"
    STAGING = "STAGING"
    STAGED = "STAGED"
    COMMITTING = "COMMITTING"
    COMMITTED = "COMMITTED"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"


class Part(StrEnum):
    """Where one generator stands.

    SERVING, STAGING, STAGED and LEFT hold the fleet's current version and serve it. HELD has installed the
    new one and waits for the verdict without serving; RESUMING has been told that it is the current one.
    INSTALLING and DOUBTFUL may hold either. UNDOING was told to have nothing of the new version any more.
    OUT is not in the fleet.
    """

    SERVING = "SERVING"
    STAGING = "STAGING"
    STAGED = "STAGED"
    INSTALLING = "INSTALLING"
    DOUBTFUL = "DOUBTFUL"
    HELD = "HELD"
    RESUMING = "RESUMING"
    UNDOING = "UNDOING"
    LEFT = "LEFT"
    OUT = "OUT"


@dataclass(frozen=True, slots=True)
class Held:
    """What a generator holds: `version_id` in every parameter (None: what it was started with).

    Where it is not `certain`, `version_id` is the last that was known, and parameters may hold another.
    """

    version_id: VersionId | None
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Generator:
    """One generator of the fleet; `why` says what put it where it is, where that was no command."""

    part: Part
    holds: Held
    why: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """How an update is to go: how many must take part, and how long each phase may last.

    Once `quorum` generators have done a phase, the others have `grace_ms` more. In STAGED the orchestrator
    has `decide_ms` for its Commit.
    """

    quorum: int
    stage_ms: int
    decide_ms: int
    commit_ms: int
    undo_ms: int
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing was updated yet."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Generators transfer `version_id` beside what they serve."""

    version_id: VersionId
    terms: Terms
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Staged:
    """Enough have it: the orchestrator may say Commit."""

    version_id: VersionId
    terms: Terms
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Committing:
    """Generators stop serving, install, and wait."""

    version_id: VersionId
    terms: Terms
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The verdict is that `version_id` is served; the last have been told by `deadline_ms`."""

    version_id: VersionId
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Aborting:
    """The verdict is that `version_id` is not served; generators go back."""

    version_id: VersionId
    why: str
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """Every generator of the fleet holds what it held, and serves it."""

    version_id: VersionId
    why: str


Phase: TypeAlias = Idle | Staging | Staged | Committing | Committed | Aborting | Aborted

_STATES: dict[type, FleetState] = dict(
    zip((Idle, Staging, Staged, Committing, Committed, Aborting, Aborted), FleetState, strict=True)
)


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """A fleet: the version that it serves, its generators by their names, and what is under way."""

    current: VersionId | None
    generators: Mapping[GeneratorId, Generator] = field(default_factory=lambda: MappingProxyType({}))
    phase: Phase = Idle()

    @property
    def state(self) -> FleetState:
        """The state of the fleet."""
        return _STATES[type(self.phase)]

    @property
    def deadline_ms(self) -> int | None:
        """When TimePassed has something to do; None where nothing is waited for."""
        if isinstance(self.phase, Committed) and not self.of(Part.RESUMING):
            return None
        return getattr(self.phase, "deadline_ms", None)

    @property
    def members(self) -> tuple[GeneratorId, ...]:
        """Those in the fleet: who may be sent requests."""
        return tuple(name for name, each in self.generators.items() if each.part is not Part.OUT)

    def of(self, *parts: Part) -> tuple[GeneratorId, ...]:
        """Those that stand in one of `parts`."""
        return tuple(name for name, each in self.generators.items() if each.part in parts)


# Events. An answer says which version it is about: one of an earlier update is not taken for one of this.


@dataclass(frozen=True, slots=True)
class Begin:
    """Update the fleet to `version_id`."""

    version_id: VersionId
    terms: Terms


@dataclass(frozen=True, slots=True)
class StageDone:
    """A generator has transferred and verified the version."""

    name: GeneratorId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A generator could not; `gone`: because the version was released, so nobody else will catch up."""

    name: GeneratorId
    version_id: VersionId
    why: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """The orchestrator is at its own safe point: install."""


@dataclass(frozen=True, slots=True)
class InstallDone:
    """A generator holds the version in every parameter, and does not serve."""

    name: GeneratorId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class InstallFailed:
    """A generator did not install; `holds` is what it says of itself, None where it does not answer."""

    name: GeneratorId
    version_id: VersionId
    why: str
    holds: Held | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A generator serves the version."""

    name: GeneratorId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class ResumeFailed:
    """A generator did not answer when it was told to serve."""

    name: GeneratorId
    version_id: VersionId
    why: str


@dataclass(frozen=True, slots=True)
class Undone:
    """A generator has nothing of the version any more, says what it holds, and serves it."""

    name: GeneratorId
    version_id: VersionId
    holds: Held


@dataclass(frozen=True, slots=True)
class UndoFailed:
    """A generator could not go back; `holds` is what it says of itself, None where it does not answer."""

    name: GeneratorId
    version_id: VersionId
    why: str
    holds: Held | None = None


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A timer says that the phase's deadline may have come."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The orchestrator gives the update up."""

    why: str


@dataclass(frozen=True, slots=True)
class Admit:
    """A generator that is not in the fleet holds `holds`, and serves."""

    name: GeneratorId
    holds: Held


@dataclass(frozen=True, slots=True)
class Expel:
    """A generator is known to be dead, or not to be used any more until it is admitted again."""

    name: GeneratorId
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A generator will not come back."""

    name: GeneratorId


Answer: TypeAlias = (
    StageDone | StageFailed | InstallDone | InstallFailed | Resumed | ResumeFailed | Undone | UndoFailed
)
Event: TypeAlias = Begin | Commit | Abort | TimePassed | Admit | Expel | Forget | Answer

# Effects: calls to one generator. A newer one takes the place of an older one that has not ended.


@dataclass(frozen=True, slots=True)
class Stage:
    """Transfer and verify the version beside what is served."""

    name: GeneratorId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Install:
    """Stop serving, install what is staged, and wait for the verdict."""

    name: GeneratorId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Resume:
    """Serve the version."""

    name: GeneratorId
    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Undo:
    """Give up what is staged; go back to `back_to` where anything was installed; serve."""

    name: GeneratorId
    version_id: VersionId
    back_to: VersionId | None


Effect: TypeAlias = Stage | Install | Resume | Undo
Outcome: TypeAlias = tuple[FleetRecord, tuple[Effect, ...]]
