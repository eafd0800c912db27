"""The data of the local store machine: states with what is valid in each, events, effects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from statemachines.ids import VersionId


class StoredState(StrEnum):
    """The states of a version in the store of a host."""

    ABSENT = "ABSENT"
    BUILDING = "BUILDING"
    SEALED = "SEALED"


@dataclass(frozen=True, slots=True)
class Absent:
    """Nothing of it is there that anybody may use."""


@dataclass(frozen=True, slots=True)
class Building:
    """It is being made from `source`, of `files`; those in `durable` survive a crash."""

    source: str
    files: frozenset[str]
    durable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Sealed:
    """It is complete, and never changes."""

    source: str


Phase: TypeAlias = Absent | Building | Sealed
STATES: dict[type, StoredState] = dict(zip((Absent, Building, Sealed), StoredState, strict=True))


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One version in the store of a host."""

    version_id: VersionId
    phase: Phase = Absent()

    @property
    def state(self) -> StoredState:
        """The name of the phase."""
        return STATES[type(self.phase)]


# Events.


@dataclass(frozen=True, slots=True)
class Found:
    """What lies on the disk, told to a record that knows nothing; `junk` is what can't be understood."""

    sealed: Sealed | None
    building: Building | None
    junk: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """Somebody wants it made from that source, of these files."""

    source: str
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class FileDurable:
    """A file is complete on the disk, and so is the note of its digest."""

    name: str


@dataclass(frozen=True, slots=True)
class FileDamaged:
    """A file that was durable does not have its digest any more."""

    name: str


@dataclass(frozen=True, slots=True)
class Seal:
    """All of it is there."""


@dataclass(frozen=True, slots=True)
class Activate:
    """Engines of this host serve it from now on."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file of the sealed version does not have its digest any more."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Its room is wanted; `active` and `read` say who needs it."""

    active: bool
    read: bool


Event: TypeAlias = Found | Begin | FileDurable | FileDamaged | Seal | Activate | Damaged | Evict


@dataclass(frozen=True, slots=True)
class MakeFolder:
    """Effect: begin a folder that says what it will hold."""

    source: str
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class DropFile:
    """Effect: take a file of the unfinished folder away."""

    name: str


@dataclass(frozen=True, slots=True)
class DiscardBuilding:
    """Effect: take the unfinished folder away."""


@dataclass(frozen=True, slots=True)
class Promote:
    """Effect: the unfinished folder becomes the version, in one step."""


@dataclass(frozen=True, slots=True)
class PointActive:
    """Effect: name it as the one that is served, in one step."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Effect: take the version out of sight in one step, then remove it."""


Effect: TypeAlias = MakeFolder | DropFile | DiscardBuilding | Promote | PointActive | Withdraw
Outcome: TypeAlias = tuple[StoredRecord, tuple[Effect, ...]]
