"""The data of the version machine: its states with what is valid in each, its events, its effects.

Times are Unix milliseconds by the store's clock; `ttl_ms`, `drain_ms` and `retention_ms` are spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from statemachines.ids import LeaseId, ModelName, SlotId, VersionId, WorkerId
from statemachines.lease import LeaseRecord
from statemachines.spec import VersionSpec
from statemachines.worker import WorkerRecord


class VersionState(StrEnum):
    """The states of a version; on the 0.7 wire DEGRADED reads STAGING and RETIRED reads RELEASING."""

    STAGING = "STAGING"
    READY = "READY"
    DEGRADED = "DEGRADED"
    RELEASING = "RELEASING"
    RETIRED = "RETIRED"
    FORGOTTEN = "FORGOTTEN"


@dataclass(frozen=True, slots=True)
class Publication:
    """One worker's publication of one slot; `life` is the worker's life that made it."""

    slot_id: SlotId
    worker_id: WorkerId
    tensor_count: int
    total_bytes: int
    manifest_digest: str
    manifest_endpoint: str
    life: int = 0

    @property
    def key(self) -> tuple[SlotId, WorkerId]:
        """What the publication is filed under."""
        return self.slot_id, self.worker_id

    def same_content(self, other: Publication) -> bool:
        """Whether both say the same, whichever life says it."""
        return self == replace(other, life=self.life)


Publications: TypeAlias = Mapping[tuple[SlotId, WorkerId], Publication]
Leases: TypeAlias = Mapping[LeaseId, LeaseRecord]
# The slots that a life of a worker has retracted: a publication that arrives late finds them closed.
Left: TypeAlias = frozenset[tuple[SlotId, WorkerId, int]]
NOBODY_LEFT: Left = frozenset()


@dataclass(frozen=True, slots=True)
class Staging:
    """Some slot has never been covered; the lives in `left` publish the slots named there no more."""

    publications: Publications = field(default_factory=dict[tuple[SlotId, WorkerId], Publication])
    left: Left = NOBODY_LEFT


@dataclass(frozen=True, slots=True)
class Ready:
    """Every expected slot has a live publisher; readers hold `leases`."""

    publications: Publications
    leases: Leases
    since_ms: int
    left: Left = NOBODY_LEFT


@dataclass(frozen=True, slots=True)
class Degraded:
    """A slot lost its last live publisher; the leases that remain are not renewed."""

    publications: Publications
    leases: Leases
    left: Left = NOBODY_LEFT


@dataclass(frozen=True, slots=True)
class Releasing:
    """Released: leases are renewed until `drain_deadline_ms`; given up on at `abandon_at_ms`."""

    publications: Publications
    leases: Leases
    drain_deadline_ms: int
    abandon_at_ms: int
    retention_ms: int


@dataclass(frozen=True, slots=True)
class Retired:
    """Nobody reads and nobody publishes; the record is kept for late messages."""

    forget_at_ms: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Nothing is left but the effect that erases it."""


Phase: TypeAlias = Staging | Ready | Degraded | Releasing | Retired | Forgotten

_STATES: Mapping[type, VersionState] = {
    Staging: VersionState.STAGING,
    Ready: VersionState.READY,
    Degraded: VersionState.DEGRADED,
    Releasing: VersionState.RELEASING,
    Retired: VersionState.RETIRED,
    Forgotten: VersionState.FORGOTTEN,
}


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A version: what it is (`spec`), and where it stands (`phase`).

    `sequence` grows with every version that the store has ever made, so that "newer" never depends
    on a label that a restarted orchestrator may repeat.
    """

    uid: VersionId
    spec: VersionSpec
    created_at_ms: int
    sequence: int
    phase: Phase

    @property
    def state(self) -> VersionState:
        """The name of the phase."""
        return _STATES[type(self.phase)]

    @property
    def publications(self) -> Publications:
        """The publications that are filed, live or not; none once retired."""
        if isinstance(self.phase, Staging | Ready | Degraded | Releasing):
            return self.phase.publications
        return {}

    @property
    def leases(self) -> Leases:
        """The leases that are filed, live or not; none before READY and once retired."""
        if isinstance(self.phase, Ready | Degraded | Releasing):
            return self.phase.leases
        return {}

    @property
    def left(self) -> Left:
        """The lives that have retracted a slot; none once released, when nobody can publish at all."""
        if isinstance(self.phase, Staging | Ready | Degraded):
            return self.phase.left
        return NOBODY_LEFT


def begin(uid: VersionId, spec: VersionSpec, now_ms: int, sequence: int) -> VersionRecord:
    """The record of a version that has just been created."""
    phase = Ready({}, {}, now_ms) if spec.starts_ready else Staging()
    return VersionRecord(uid, spec, now_ms, sequence, phase)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a decision may know beside the record: the clock, and the registrations it depends on.

    Both are read together. A registration that is not in `workers` does not exist.
    """

    now_ms: int
    workers: Mapping[WorkerId, WorkerRecord] = field(default_factory=dict[WorkerId, WorkerRecord])


# Events.


@dataclass(frozen=True, slots=True)
class PublishShard:
    """A worker publishes a slot; the publication's life is the one its worker has at the moment."""

    shard: Publication


@dataclass(frozen=True, slots=True)
class MarkReady:
    """The orchestrator says that the upload is complete."""


@dataclass(frozen=True, slots=True)
class AcquireLease:
    """A generator wants to read for `ttl_ms`."""

    worker_id: WorkerId
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class RenewLease:
    """A generator wants to go on reading for `ttl_ms` from now."""

    worker_id: WorkerId
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """A generator has finished reading.

    With `granted_ms` it ends the lease that began then, and no later one of the same id: such a message
    may arrive when its sender has taken the lease anew.
    """

    lease_id: LeaseId
    worker_id: WorkerId
    granted_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """A timer says that a lease may be over."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class WorkerExpired:
    """A timer, or a new life, says that what a worker published may be dead."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class RetractShard:
    """A publisher leaves at once, for the rest of its life; readers may read on until their lease ends.

    What it had sent before and arrives after this is refused, so that a late announcement can't offer
    a buffer that its owner already has back.
    """

    slot_id: SlotId
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WithdrawShard:
    """A publisher of a released version takes its shard back, once nobody reads."""

    slot_id: SlotId
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Release:
    """No new lease; renewals for `drain_ms` more; kept `retention_ms` after the end."""

    drain_ms: int
    retention_ms: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """The model's `keep_last` policy releases the version."""

    drain_ms: int
    retention_ms: int


@dataclass(frozen=True, slots=True)
class RetentionOver:
    """A timer says that the record may have been kept for long enough."""


Event: TypeAlias = (
    PublishShard
    | MarkReady
    | AcquireLease
    | RenewLease
    | ReturnLease
    | LeaseLapsed
    | WorkerExpired
    | RetractShard
    | WithdrawShard
    | Superseded
    | Release
    | RetentionOver
)

# Effects.


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """Effect: tell whoever watches the version."""

    uid: VersionId


@dataclass(frozen=True, slots=True)
class ModelReady:
    """Effect: apply the model's `keep_last` policy, now that a version of it is READY."""

    model_name: ModelName
    uid: VersionId


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """Effect: answer the reader with its lease."""

    lease: LeaseRecord


@dataclass(frozen=True, slots=True)
class Erase:
    """Effect: delete the record and its idempotency key."""

    uid: VersionId
    idempotency_key: str


Effect: TypeAlias = StatusChanged | ModelReady | LeaseGranted | Erase
