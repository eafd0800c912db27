"""The data of the generation machine: its states with what is valid in each, its events, its effects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from statemachines.ids import VersionId


class GenerationState(StrEnum):
    """The states of a generation."""

    FREE = "FREE"
    CAPTURING = "CAPTURING"
    STOPPING = "STOPPING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    RETIRED = "RETIRED"


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody reads it, nobody writes it."""


@dataclass(frozen=True, slots=True)
class Capturing:
    """It is being made into a version. `copying`: it is being written now. `whole`: all of it has been."""

    version_id: VersionId
    copying: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Stopping:
    """Nobody wants the version any more, but its copy may still write."""


@dataclass(frozen=True, slots=True)
class Serving:
    """It holds the version, which may be read."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Draining:
    """It holds the version, which its owner wants back; whoever came may still read."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class Retired:
    """It is no memory of the transport any more, and is never written again."""


Phase: TypeAlias = Free | Capturing | Stopping | Serving | Draining | Retired
STATES: dict[type, GenerationState] = dict(
    zip((Free, Capturing, Stopping, Serving, Draining, Retired), GenerationState, strict=True)
)


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One generation and where it stands; `use` counts how often it has been handed out."""

    number: int
    use: int = 0
    phase: Phase = Free()

    @property
    def state(self) -> GenerationState:
        """The name of the phase."""
        return STATES[type(self.phase)]

    @property
    def version_id(self) -> VersionId | None:
        """The version that it holds or is being made into."""
        phase = self.phase
        return phase.version_id if isinstance(phase, Capturing | Serving | Draining) else None


# Events. Those with a `use` are about that use alone.


@dataclass(frozen=True, slots=True)
class Acquire:
    """Hand it out for a version: a new use begins."""

    version_id: VersionId


@dataclass(frozen=True, slots=True)
class BeginCopy:
    """Something begins to write it."""

    use: int


@dataclass(frozen=True, slots=True)
class EndCopy:
    """Nothing writes it any more; `whole`: all of the version has been written."""

    use: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """The version may be read from now on."""

    use: int


@dataclass(frozen=True, slots=True)
class WantBack:
    """The owner of the version wants the memory back; readers may still be there."""

    use: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nobody reads the version, and nobody will: it was drained, never announced, or given up."""

    use: int


@dataclass(frozen=True, slots=True)
class Retire:
    """It is wanted no more, where nobody uses it."""


@dataclass(frozen=True, slots=True)
class Close:
    """The process is going away, read or not."""


Event: TypeAlias = Acquire | BeginCopy | EndCopy | Serve | WantBack | LetGo | Retire | Close


@dataclass(frozen=True, slots=True)
class TellFree:
    """Effect: it is free, whoever waits for one may have it."""


@dataclass(frozen=True, slots=True)
class Deregister:
    """Effect: take its memory from the transport."""


Effect: TypeAlias = TellFree | Deregister
Outcome: TypeAlias = tuple[GenerationRecord, tuple[Effect, ...]]
OfAUse: TypeAlias = BeginCopy | EndCopy | Serve | WantBack | LetGo
