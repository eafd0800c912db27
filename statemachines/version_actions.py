"""The actions of a version: the next record, and the effects to perform once it is committed."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from statemachines import lease
from statemachines.ids import lease_id_of
from statemachines.version_facts import added, after_ending, after_leaving, releasing, removed
from statemachines.version_records import (
    AcquireLease,
    Degraded,
    Effect,
    Erase,
    Event,
    Forgotten,
    LeaseGranted,
    LeaseLapsed,
    MarkReady,
    ModelReady,
    Moment,
    PublishShard,
    Ready,
    Release,
    Releasing,
    RenewLease,
    RetentionOver,
    Retired,
    RetractShard,
    ReturnLease,
    StatusChanged,
    Superseded,
    VersionRecord,
    WorkerExpired,
)

Outcome: TypeAlias = tuple[VersionRecord, tuple[Effect, ...]]


def publish(record: VersionRecord, event: PublishShard, moment: Moment) -> Outcome:
    publications = added(record, event, moment)
    if record.publications.get(event.shard.key) == publications[event.shard.key]:
        return record, ()
    return moved(record, replace(record.phase, publications=publications))  # type: ignore[arg-type]


def publish_last(record: VersionRecord, event: PublishShard, moment: Moment) -> Outcome:
    publications = added(record, event, moment)
    return made_ready(record, Ready(publications, record.leases, moment.now_ms, record.left))


def mark_ready(record: VersionRecord, event: MarkReady, moment: Moment) -> Outcome:
    return made_ready(record, Ready({}, {}, moment.now_ms))


def made_ready(record: VersionRecord, phase: Ready) -> Outcome:
    after, effects = moved(record, phase)
    return after, (*effects, ModelReady(record.spec.model_name, record.uid))


def grant(record: VersionRecord, event: AcquireLease | RenewLease, moment: Moment) -> Outcome:
    lease_id = lease_id_of(record.uid, event.worker_id)
    deadline = moment.now_ms + event.ttl_ms
    held = record.leases.get(lease_id)
    if held is not None and lease.live(held, moment.now_ms):
        held = lease.decide(held, lease.Renew(deadline), moment.now_ms).record
    else:
        held = lease.LeaseRecord(lease_id, event.worker_id, deadline, granted_ms=moment.now_ms)
    phase = replace(record.phase, leases={**record.leases, lease_id: held})  # type: ignore[arg-type]
    after, effects = moved(record, phase)
    return after, (*effects, LeaseGranted(held))


def end_lease(record: VersionRecord, event: ReturnLease | LeaseLapsed, moment: Moment) -> Outcome:
    leases, _ = after_ending(record, event, moment)
    if leases == record.leases:
        return record, ()
    return moved(record, replace(record.phase, leases=leases))  # type: ignore[arg-type]


def drop(record: VersionRecord, event: Event, moment: Moment) -> Outcome:
    remaining = removed(record, event, moment)
    if remaining == record.publications:
        return record, ()
    return moved(record, replace(record.phase, publications=remaining))  # type: ignore[arg-type]


def retract(record: VersionRecord, event: RetractShard, moment: Moment) -> Outcome:
    remaining, left = removed(record, event, moment), after_leaving(record, event, moment)
    if (remaining, left) == (record.publications, record.left):
        return record, ()
    return moved(record, replace(record.phase, publications=remaining, left=left))  # type: ignore[arg-type]


def degrade(record: VersionRecord, event: WorkerExpired | RetractShard, moment: Moment) -> Outcome:
    left = after_leaving(record, event, moment)
    return moved(record, Degraded(removed(record, event, moment), record.leases, left))


def release(record: VersionRecord, event: Release | Superseded, moment: Moment) -> Outcome:
    drain = moment.now_ms + event.drain_ms
    phase = Releasing(
        record.publications, record.leases, drain, drain + event.retention_ms, event.retention_ms
    )
    return moved(record, phase)


def retire_empty(record: VersionRecord, event: Release | Superseded, moment: Moment) -> Outcome:
    return moved(record, Retired(moment.now_ms + event.retention_ms))


def hasten(record: VersionRecord, event: Release, moment: Moment) -> Outcome:
    phase = releasing(record)
    drain = min(phase.drain_deadline_ms, moment.now_ms + event.drain_ms)
    if drain == phase.drain_deadline_ms:
        return record, ()
    return moved(record, replace(phase, drain_deadline_ms=drain, abandon_at_ms=drain + phase.retention_ms))


def retire(record: VersionRecord, event: Event, moment: Moment) -> Outcome:
    return moved(record, Retired(moment.now_ms + releasing(record).retention_ms))


def forget(record: VersionRecord, event: RetentionOver, moment: Moment) -> Outcome:
    after, effects = moved(record, Forgotten())
    return after, (*effects, Erase(record.uid, record.spec.idempotency_key))


def moved(record: VersionRecord, phase: object) -> Outcome:
    return replace(record, phase=phase), (StatusChanged(record.uid),)  # type: ignore[arg-type]
