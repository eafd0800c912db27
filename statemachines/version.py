"""A weight version, as the control plane sees it: the table at the end is the system.

    STAGING -> READY <-> DEGRADED -> RELEASING -> RETIRED -> FORGOTTEN

READY means that every expected slot has a publication of a worker that is live *now*; DEGRADED that
one has none any more: no new lease, no renewal, so that readers drain within one lease TTL, until a
replacement publishes. RELEASING ends when nobody reads and nobody publishes.

Liveness is a matter of deadlines, not of which expiry has been processed: every decision gets a
`Moment` with the store's clock and the registrations it depends on, and `settle` first applies every
expiry that is due. So a command is always decided against what is true at its moment.
"""

from __future__ import annotations

from statemachines import lease
from statemachines import version_actions as actions
from statemachines import version_guards as guards
from statemachines.kernel import Cell, Decision, Row, Table, cells, stay
from statemachines.version_facts import live_leases, missing_slots, publishes, wake_at_ms
from statemachines.version_records import (
    AcquireLease,
    Effect,
    Event,
    LeaseLapsed,
    MarkReady,
    Moment,
    PublishShard,
    Release,
    RenewLease,
    RetentionOver,
    RetractShard,
    ReturnLease,
    Superseded,
    VersionRecord,
    VersionState,
    WithdrawShard,
    WorkerExpired,
    begin,
)

__all__ = [
    "TABLE",
    "Moment",
    "VersionRecord",
    "VersionState",
    "begin",
    "decide",
    "due",
    "live_leases",
    "missing_slots",
    "publishes",
    "settle",
    "wake_at_ms",
]

# The table.

STAGING, READY, DEGRADED, RELEASING, RETIRED, FORGOTTEN = VersionState
_UNRELEASED = (STAGING, READY, DEGRADED)
_PUBLISHING = (guards.publisher_may, guards.slot_is_expected, guards.no_other_content, guards.has_not_left)
_GAP = Row(DEGRADED, actions.degrade, when=guards.leaves_a_gap)
_LAST = Row(RETIRED, actions.retire, when=guards.nobody_is_left)

TABLE: Table[VersionRecord, Moment] = Table(
    "version",
    VersionState,
    STAGING,
    [
        Cell(
            STAGING,
            PublishShard,
            (Row(READY, actions.publish_last, guards.completes), Row(STAGING, actions.publish)),
            _PUBLISHING,
        ),
        Cell(READY, PublishShard, (Row(READY, actions.publish),), _PUBLISHING),
        Cell(
            DEGRADED,
            PublishShard,
            (Row(READY, actions.publish_last, guards.completes), Row(DEGRADED, actions.publish)),
            _PUBLISHING,
        ),
        Cell(STAGING, MarkReady, (Row(READY, actions.mark_ready),), (guards.is_in_storage,)),
        *stay((READY,), MarkReady),
        Cell(
            READY,
            AcquireLease,
            (Row(READY, actions.grant),),
            (guards.reader_may, guards.lease_id_is_free),
        ),
        Cell(READY, RenewLease, (Row(READY, actions.grant),), (guards.reader_may, guards.lease_is_live)),
        Cell(
            RELEASING,
            RenewLease,
            (Row(RELEASING, actions.grant),),
            (guards.reader_may, guards.lease_is_live, guards.drain_is_open),
        ),
        *stay((STAGING,), ReturnLease),
        Cell(READY, ReturnLease, (Row(READY, actions.end_lease),), (guards.holder_returns,)),
        Cell(DEGRADED, ReturnLease, (Row(DEGRADED, actions.end_lease),), (guards.holder_returns,)),
        Cell(RELEASING, ReturnLease, (_LAST, Row(RELEASING, actions.end_lease)), (guards.holder_returns,)),
        *stay((READY, DEGRADED), LeaseLapsed, actions.end_lease),
        Cell(RELEASING, LeaseLapsed, (_LAST, Row(RELEASING, actions.end_lease))),
        *stay((STAGING, DEGRADED), WorkerExpired, actions.drop),
        Cell(READY, WorkerExpired, (_GAP, Row(READY, actions.drop))),
        Cell(RELEASING, WorkerExpired, (_LAST, Row(RELEASING, actions.drop))),
        *stay((STAGING, DEGRADED), RetractShard, actions.retract),
        Cell(READY, RetractShard, (_GAP, Row(READY, actions.retract))),
        Cell(RELEASING, RetractShard, (_LAST, Row(RELEASING, actions.drop))),
        Cell(
            RELEASING,
            WithdrawShard,
            (_LAST, Row(RELEASING, actions.drop)),
            (guards.nobody_reads, guards.shard_is_published),
        ),
        *cells(
            _UNRELEASED,
            Release,
            Row(RETIRED, actions.retire_empty, guards.nobody_is_left),
            Row(RELEASING, actions.release),
        ),
        *cells(
            _UNRELEASED,
            Superseded,
            Row(RETIRED, actions.retire_empty, guards.nobody_is_left),
            Row(RELEASING, actions.release),
        ),
        *stay((RELEASING,), Release, actions.hasten),
        Cell(RELEASING, RetentionOver, (Row(RETIRED, actions.retire, guards.is_abandoned), Row(RELEASING))),
        Cell(
            RETIRED, RetentionOver, (Row(FORGOTTEN, actions.forget, guards.retention_is_over), Row(RETIRED))
        ),
        *(
            one
            for late in (
                ReturnLease,
                LeaseLapsed,
                WorkerExpired,
                RetractShard,
                WithdrawShard,
                Release,
                Superseded,
            )
            for one in stay((RETIRED,), late)
        ),
        *stay((RELEASING,), Superseded),
    ],
    state_of=lambda record: record.state,
    name_of=lambda record: f"version {record.uid}",
)


def decide(record: VersionRecord, event: Event, moment: Moment) -> Decision[VersionRecord]:
    """Decide what `event` does to the version at `moment`; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, moment)


def due(record: VersionRecord, moment: Moment) -> tuple[Event, ...]:
    """The expiries that are true at `moment` and that the record does not show yet."""
    events: list[Event] = [
        LeaseLapsed(held.lease_id) for held in record.leases.values() if not lease.live(held, moment.now_ms)
    ]
    gone = {s.worker_id for s in record.publications.values() if not publishes(s, moment)}
    events += [WorkerExpired(worker_id) for worker_id in sorted(gone)]
    if record.state in (RELEASING, RETIRED):
        events.append(RetentionOver())
    return tuple(events)


def settle(record: VersionRecord, moment: Moment) -> Decision[VersionRecord]:
    """Apply everything that is due at `moment`; what follows is then decided against what is true.

    A RELEASING version may retire on the way, and a RETIRED one be forgotten.
    """
    effects: tuple[Effect, ...] = ()
    for event in due(record, moment):
        step = decide(record, event, moment)
        record, effects = step.record, effects + step.effects
    return Decision(record, effects)
