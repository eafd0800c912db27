"""Weight versions, as users see them: plain frozen data, free of protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from modelexpress_rl import arguments
from modelexpress_rl.object_storage import ObjectStorageSource


class WeightPayloadFormat(StrEnum):
    """What the bytes of a version are."""

    UNSPECIFIED = "UNSPECIFIED"
    FULL_TENSOR = "FULL_TENSOR"
    XOR_DELTA = "XOR_DELTA"
    FULL_HF_CHECKPOINT = "FULL_HF_CHECKPOINT"


class WeightVersionState(StrEnum):
    """The state of a version as the wire of 0.7 shows it."""

    STAGING = "STAGING"
    READY = "READY"
    RELEASING = "RELEASING"


class VersionState(StrEnum):
    """The state that a version really has; `wire` is what the wire of 0.7 shows."""

    STAGING = "STAGING"
    READY = "READY"
    DEGRADED = "DEGRADED"
    """It was READY, and a slot has no live publisher now."""
    RELEASING = "RELEASING"
    RETIRED = "RETIRED"
    """No lease and no publication is left."""
    FORGOTTEN = "FORGOTTEN"
    """The control plane no longer knows the version."""

    @property
    def wire(self) -> WeightVersionState:
        """DEGRADED reads STAGING; RETIRED and FORGOTTEN read RELEASING."""
        if self in (VersionState.STAGING, VersionState.DEGRADED):
            return WeightVersionState.STAGING
        if self is VersionState.READY:
            return WeightVersionState.READY
        return WeightVersionState.RELEASING

    @property
    def ending(self) -> bool:
        """Nobody can begin to read the version any more."""
        return self.wire is WeightVersionState.RELEASING

    @property
    def ended(self) -> bool:
        """Nothing happens to the version any more."""
        return self in (VersionState.RETIRED, VersionState.FORGOTTEN)


class WeightSource(StrEnum):
    """Where a generator may get a version from."""

    GENERATOR = "GENERATOR"
    TRAINER = "TRAINER"
    OBJECT_STORAGE = "OBJECT_STORAGE"


@dataclass(frozen=True)
class WeightVersionRef:
    """Names a version.

    Raises:
        UsageError: `version_id` is not a string that can be sent, is blank, or too long.
    """

    version_id: str

    def __post_init__(self) -> None:
        arguments.name("version_id", self.version_id)


@dataclass(frozen=True)
class WeightVersion:
    """A version's record, as it was when the control plane answered."""

    version_id: str
    model_name: str
    payload_format: WeightPayloadFormat
    base_version_id: str | None = None
    object_storage: ObjectStorageSource | None = None
    expected_source_slots: tuple[str, ...] = ()
    layout_signature: str = ""
    state: WeightVersionState = WeightVersionState.STAGING
    created_at_unix_ms: int = 0

    @property
    def ref(self) -> WeightVersionRef:
        """The version's name alone."""
        return WeightVersionRef(self.version_id)


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """How a version stands: state, coverage and leases, read together.

    `None` stands for what the server does not tell; a server of 0.7 tells the state and the coverage
    only. Times are Unix milliseconds by the control plane's store; None also where it has not come to
    that yet.
    """

    version_id: str
    model_name: str
    state: VersionState
    sequence: int | None = None
    """Grows with every version of the model, whatever their ids say."""
    revision: int | None = None
    expected_slots: int = 0
    covered_slots: int = 0
    missing_slots: tuple[str, ...] = ()
    """The first of the slots without a live publication; not all of them where there are many."""
    live_publications: int | None = None
    live_leases: int | None = None
    last_lease_deadline_unix_ms: int | None = None
    drain_deadline_unix_ms: int | None = None
    created_at_unix_ms: int | None = None
    ready_at_unix_ms: int | None = None
    now_unix_ms: int | None = None
    reason: str = ""

    @property
    def ref(self) -> WeightVersionRef:
        """The version's name alone."""
        return WeightVersionRef(self.version_id)

    def __str__(self) -> str:
        parts = [f"{self.version_id} {self.state}", f"{self.covered_slots}/{self.expected_slots} slots"]
        if self.live_leases:
            parts.append(f"{self.live_leases} leases")
        if self.missing_slots:
            more = ", ..." if len(self.missing_slots) < self.expected_slots - self.covered_slots else ""
            parts.append(f"missing {', '.join(self.missing_slots[:4])}{more}")
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "")


class WorkerRole(StrEnum):
    """What a worker does."""

    TRAINER = "TRAINER"
    GENERATOR = "GENERATOR"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A registered worker; times are Unix milliseconds by the control plane's store."""

    worker_id: str
    role: WorkerRole
    model_name: str
    live: bool
    expires_at_unix_ms: int
    serving_version_id: str | None = None
    """What a generator last reported that every parameter holds; None where it never did, or can't say."""
    serving_uncertain: bool = False
    """An install failed half-way, or is under way."""
