"""A worker: one process's registration, alive while it renews.

    LIVE --Register--> LIVE       a renewal: the same role and model, the same life
    LIVE --Expire--> EXPIRED      at the deadline; a timer that fires early changes nothing
    LIVE --Leave--> EXPIRED       a clean good-bye
    EXPIRED --Register--> LIVE    a new life under the old id: what the old life published stays dead

A generator's heartbeat also reports which version it serves, so that a monitor sees the fleet.
Times are Unix milliseconds by the store's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from statemachines.ids import ModelName, VersionId, WorkerId
from statemachines.kernel import Cell, Decision, Reason, Refused, Row, Table, stay


class WorkerRole(StrEnum):
    """What a worker does."""

    TRAINER = "TRAINER"
    GENERATOR = "GENERATOR"


class WorkerState(StrEnum):
    """The states of a registration."""

    LIVE = "LIVE"
    EXPIRED = "EXPIRED"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A registration; `life` tells one process's life from the next under the same id."""

    worker_id: WorkerId
    role: WorkerRole
    model_name: ModelName
    life: int
    deadline_ms: int
    state: WorkerState = WorkerState.LIVE
    serving: VersionId | None = None
    uncertain: bool = False


@dataclass(frozen=True, slots=True)
class Register:
    """Register, or renew, for `ttl_ms` from now; `life` is used where this begins a new life."""

    role: WorkerRole
    model_name: ModelName
    ttl_ms: int
    life: int


@dataclass(frozen=True, slots=True)
class Expire:
    """A timer says that the deadline may have passed."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The process says good-bye."""


@dataclass(frozen=True, slots=True)
class Report:
    """A generator says which version it serves; `uncertain` after an install that failed half-way."""

    serving: VersionId | None
    uncertain: bool


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Effect: versions that this life published must look at their coverage."""

    worker_id: WorkerId
    life: int


def live(record: WorkerRecord | None, now_ms: int) -> bool:
    """Whether the registration holds at `now_ms`, by its deadline and not by what was processed."""
    return record is not None and record.state is WorkerState.LIVE and now_ms < record.deadline_ms


def is_over(record: WorkerRecord, event: object, now_ms: int) -> bool:
    """Guard: the registration's deadline has passed."""
    return not live(record, now_ms)


def same_identity(record: WorkerRecord, event: Register, now_ms: int) -> None:
    """Check: a live worker id can't change its role or its model."""
    if live(record, now_ms) and (record.role, record.model_name) != (event.role, event.model_name):
        raise Refused(
            Reason.EXISTS,
            f"worker {record.worker_id} is registered as {record.role.value} of model {record.model_name!r}, "
            f"not as {event.role.value} of {event.model_name!r}",
        )


def is_generator(record: WorkerRecord, event: Report, now_ms: int) -> None:
    """Check: only a generator serves a version."""
    if record.role is not WorkerRole.GENERATOR:
        raise Refused(
            Reason.PRECONDITION,
            f"worker {record.worker_id} is a {record.role.value}: only a GENERATOR serves",
        )


def _new_life(
    record: WorkerRecord, event: Register, now_ms: int
) -> tuple[WorkerRecord, tuple[WorkerLost, ...]]:
    fresh = begin(record.worker_id, event, now_ms)
    return fresh, (WorkerLost(record.worker_id, record.life),)


def _renew(record: WorkerRecord, event: Register, now_ms: int) -> tuple[WorkerRecord, tuple[WorkerLost, ...]]:
    return replace(record, deadline_ms=max(record.deadline_ms, now_ms + event.ttl_ms)), ()


def _expire(record: WorkerRecord, event: object, now_ms: int) -> tuple[WorkerRecord, tuple[WorkerLost, ...]]:
    lost = replace(record, state=WorkerState.EXPIRED, deadline_ms=min(record.deadline_ms, now_ms))
    return lost, (WorkerLost(record.worker_id, record.life),)


def _report(record: WorkerRecord, event: Report, now_ms: int) -> tuple[WorkerRecord, tuple[WorkerLost, ...]]:
    return replace(record, serving=event.serving, uncertain=event.uncertain), ()


LIVE, EXPIRED = WorkerState

TABLE: Table[WorkerRecord, int] = Table(
    "worker",
    WorkerState,
    LIVE,
    [
        Cell(
            LIVE, Register, (Row(LIVE, _new_life, when=is_over), Row(LIVE, _renew)), checks=(same_identity,)
        ),
        Cell(LIVE, Expire, (Row(EXPIRED, _expire, when=is_over), Row(LIVE))),
        Cell(LIVE, Leave, (Row(EXPIRED, _expire),)),
        Cell(LIVE, Report, (Row(EXPIRED, _expire, when=is_over), Row(LIVE, _report)), checks=(is_generator,)),
        Cell(EXPIRED, Register, (Row(LIVE, _new_life),)),
        *stay((EXPIRED,), Expire),
        *stay((EXPIRED,), Leave),
        *stay((EXPIRED,), Report),
    ],
    state_of=lambda record: record.state,
    name_of=lambda record: f"worker {record.worker_id}",
)


def begin(worker_id: WorkerId, event: Register, now_ms: int) -> WorkerRecord:
    """The record of a worker whose id is not known, or whose earlier life is over."""
    return WorkerRecord(worker_id, event.role, event.model_name, event.life, now_ms + event.ttl_ms)


def decide(
    record: WorkerRecord, event: Register | Expire | Leave | Report, now_ms: int
) -> Decision[WorkerRecord]:
    """Decide what `event` does to the registration at `now_ms`; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, now_ms)
