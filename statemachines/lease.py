"""A lease: one reader's promise to be gone from a version by a deadline, unless it renews.

    HELD --Renew--> HELD        only before the deadline: a lapsed lease is never revived (P7)
    HELD --Return--> RETURNED   or LAPSED, where the deadline has passed by then
    HELD --Lapse--> LAPSED      at the deadline; a timer that fires early changes nothing

The server keeps one per reader by its store's clock. A generator keeps its own by its monotonic
clock, measured from before it sent the last renewal that succeeded and shortened by a margin, so
that it stops reading before the server can consider the lease lapsed. Times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from statemachines.ids import LeaseId, WorkerId
from statemachines.kernel import Cell, Decision, Reason, Refused, Row, Table, stay


class LeaseState(StrEnum):
    """The states of a lease."""

    HELD = "HELD"
    RETURNED = "RETURNED"
    LAPSED = "LAPSED"


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One lease; `deadline_ms` is the end of its last grant, whatever its state.

    `granted_ms` is when it began: a worker's leases on one version follow each other under one id.
    """

    lease_id: LeaseId
    worker_id: WorkerId
    deadline_ms: int
    state: LeaseState = LeaseState.HELD
    granted_ms: int = 0


@dataclass(frozen=True, slots=True)
class Renew:
    """Hold the lease until `deadline_ms`; an earlier deadline than the present one changes nothing."""

    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Return:
    """The reader has finished."""


@dataclass(frozen=True, slots=True)
class Lapse:
    """A timer says that the deadline may have passed."""


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Effect: the lease reached its one end."""

    lease_id: LeaseId
    state: LeaseState


def live(record: LeaseRecord, now_ms: int) -> bool:
    """Whether the holder may read at `now_ms`: the deadline itself is already too late."""
    return record.state is LeaseState.HELD and now_ms < record.deadline_ms


def is_over(record: LeaseRecord, event: object, now_ms: int) -> bool:
    """Guard: the deadline has passed."""
    return not live(record, now_ms)


def not_lapsed(record: LeaseRecord, event: Renew, now_ms: int) -> None:
    """Check: only a lease that is live by its deadline can be renewed."""
    if now_ms >= record.deadline_ms:
        raise Refused(
            Reason.PRECONDITION,
            f"lease {record.lease_id} of worker {record.worker_id} lapsed "
            f"{now_ms - record.deadline_ms} ms ago: a lapsed lease is never renewed",
        )


def _renew(record: LeaseRecord, event: Renew, now_ms: int) -> tuple[LeaseRecord, tuple[LeaseEnded, ...]]:
    return replace(record, deadline_ms=max(record.deadline_ms, event.deadline_ms)), ()


def _return(record: LeaseRecord, event: Return, now_ms: int) -> tuple[LeaseRecord, tuple[LeaseEnded, ...]]:
    return _end(record, LeaseState.RETURNED)


def _lapse(record: LeaseRecord, event: object, now_ms: int) -> tuple[LeaseRecord, tuple[LeaseEnded, ...]]:
    return _end(record, LeaseState.LAPSED)


def _end(record: LeaseRecord, state: LeaseState) -> tuple[LeaseRecord, tuple[LeaseEnded, ...]]:
    return replace(record, state=state), (LeaseEnded(record.lease_id, state),)


HELD, RETURNED, LAPSED = LeaseState

TABLE: Table[LeaseRecord, int] = Table(
    "lease",
    LeaseState,
    HELD,
    [
        Cell(HELD, Renew, (Row(HELD, _renew),), checks=(not_lapsed,)),
        Cell(HELD, Return, (Row(LAPSED, _lapse, when=is_over), Row(RETURNED, _return))),
        Cell(HELD, Lapse, (Row(LAPSED, _lapse, when=is_over), Row(HELD))),
        *stay((RETURNED, LAPSED), Return),
        *stay((RETURNED, LAPSED), Lapse),
    ],
    state_of=lambda record: record.state,
    name_of=lambda record: f"lease {record.lease_id} of worker {record.worker_id}",
)


def decide(record: LeaseRecord, event: Renew | Return | Lapse, now_ms: int) -> Decision[LeaseRecord]:
    """Decide what `event` does to the lease at `now_ms`; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, now_ms)
