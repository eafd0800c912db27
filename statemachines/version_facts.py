"""What is true of a version at a moment: the facts that its guards, checks and actions rest on."""

from __future__ import annotations

from dataclasses import replace

from statemachines import lease
from statemachines.version_records import (
    Event,
    LeaseLapsed,
    Leases,
    Left,
    Moment,
    Publication,
    Publications,
    PublishShard,
    Releasing,
    Retired,
    RetractShard,
    ReturnLease,
    VersionRecord,
    WithdrawShard,
    WorkerExpired,
)
from statemachines.worker import live


def publishes(shard: Publication, moment: Moment) -> bool:
    """Whether a publication counts: the very life that made it is live at the moment."""
    worker = moment.workers.get(shard.worker_id)
    return worker is not None and worker.life == shard.life and live(worker, moment.now_ms)


def missing_slots(record: VersionRecord, publications: Publications, moment: Moment) -> tuple[str, ...]:
    """The expected slots that no live publisher covers, in the order of the request."""
    covered = {shard.slot_id for shard in publications.values() if publishes(shard, moment)}
    return tuple(slot for slot in record.spec.expected_slots if slot not in covered)


def live_leases(record: VersionRecord, now_ms: int) -> tuple[lease.LeaseRecord, ...]:
    """The leases whose holders may be reading at `now_ms`."""
    return tuple(held for held in record.leases.values() if lease.live(held, now_ms))


def wake_at_ms(record: VersionRecord, moment: Moment) -> int | None:
    """When this record next has something due of its own; None where nothing will be."""
    phase, due = record.phase, [held.deadline_ms for held in record.leases.values()]
    due += [
        moment.workers[shard.worker_id].deadline_ms
        for shard in record.publications.values()
        if publishes(shard, moment)
    ]
    if isinstance(phase, Releasing) and moment.now_ms < phase.abandon_at_ms:
        due.append(phase.abandon_at_ms)
    if isinstance(phase, Retired):
        due.append(phase.forget_at_ms)
    return min(due, default=None)


def releasing(record: VersionRecord) -> Releasing:
    assert isinstance(record.phase, Releasing)
    return record.phase


def added(record: VersionRecord, event: PublishShard, moment: Moment) -> Publications:
    shard = replace(event.shard, life=moment.workers[event.shard.worker_id].life)
    return {**record.publications, shard.key: shard}


def removed(record: VersionRecord, event: Event, moment: Moment) -> Publications:
    published = record.publications
    match event:
        case RetractShard(slot_id, worker_id) | WithdrawShard(slot_id, worker_id):
            gone = {(slot_id, worker_id)}
        case WorkerExpired(worker_id):
            gone = {
                key for key, s in published.items() if s.worker_id == worker_id and not publishes(s, moment)
            }
        case _:
            return published  # a thousand readers return one by one: nothing to look at
    return {key: shard for key, shard in published.items() if key not in gone}


def after_ending(record: VersionRecord, event: Event, moment: Moment) -> tuple[Leases, Publications]:
    leases = record.leases
    if isinstance(event, ReturnLease | LeaseLapsed) and event.lease_id in leases:
        if isinstance(event, ReturnLease) and _is_of_another_grant(leases[event.lease_id], event):
            return leases, record.publications
        ending = lease.Return() if isinstance(event, ReturnLease) else lease.Lapse()
        after = lease.decide(leases[event.lease_id], ending, moment.now_ms).record
        if after.state is not lease.LeaseState.HELD:
            leases = {key: held for key, held in leases.items() if key != event.lease_id}
    return leases, removed(record, event, moment)


def _is_of_another_grant(held: lease.LeaseRecord, event: ReturnLease) -> bool:
    return event.granted_ms is not None and event.granted_ms != held.granted_ms


def after_leaving(record: VersionRecord, event: Event, moment: Moment) -> Left:
    """The lives that have left, with the one that this event takes away.

    An end of life needs no mark: the publications of that life count no more in any case.
    """
    if not isinstance(event, RetractShard) or event.slot_id not in record.spec.expected_slots:
        return record.left
    worker = moment.workers.get(event.worker_id)
    if worker is None or not live(worker, moment.now_ms):
        return record.left
    return record.left | {(event.slot_id, event.worker_id, worker.life)}
