"""The guards and checks of a version: which edge is taken, and why a command is refused.

Each can be removed by itself, and then a test fails: see the mutation test.
"""

from __future__ import annotations

from statemachines import lease
from statemachines.ids import lease_id_of
from statemachines.kernel import Reason, Refused
from statemachines.version_facts import (
    added,
    after_ending,
    live_leases,
    missing_slots,
    publishes,
    releasing,
    removed,
)
from statemachines.version_records import (
    AcquireLease,
    Event,
    MarkReady,
    Moment,
    PublishShard,
    RenewLease,
    RetentionOver,
    Retired,
    RetractShard,
    ReturnLease,
    VersionRecord,
    WithdrawShard,
    WorkerExpired,
)
from statemachines.worker import WorkerRole, live

# Guards: which of several edges is taken.


def completes(record: VersionRecord, event: PublishShard, moment: Moment) -> bool:
    """Guard: with this publication every expected slot has a live publisher."""
    if len(record.publications) + 1 < len(record.spec.expected_slots):
        return False  # a thousand ranks publish in a row: no need to look at each other's liveness yet
    return not missing_slots(record, added(record, event, moment), moment)


def leaves_a_gap(record: VersionRecord, event: WorkerExpired | RetractShard, moment: Moment) -> bool:
    """Guard: without what this event removes, some slot has no live publisher left."""
    return bool(missing_slots(record, removed(record, event, moment), moment))


def nobody_is_left(record: VersionRecord, event: Event, moment: Moment) -> bool:
    """Guard: after this event no lease is live and no publication remains."""
    leases, publications = after_ending(record, event, moment)
    return not publications and not any(lease.live(held, moment.now_ms) for held in leases.values())


def is_abandoned(record: VersionRecord, event: RetentionOver, moment: Moment) -> bool:
    """Guard: released long ago, nobody may read any more, but a publisher never withdrew."""
    return moment.now_ms >= releasing(record).abandon_at_ms and not live_leases(record, moment.now_ms)


def retention_is_over(record: VersionRecord, event: RetentionOver, moment: Moment) -> bool:
    """Guard: the record has been kept for as long as it was to be."""
    assert isinstance(record.phase, Retired)
    return moment.now_ms >= record.phase.forget_at_ms


# Checks: why a command is refused, in the order of the wire contract.


def publisher_may(record: VersionRecord, event: PublishShard, moment: Moment) -> None:
    """Check: the publisher is a live worker of this model."""
    worker = moment.workers.get(event.shard.worker_id)
    if worker is None or not live(worker, moment.now_ms):
        raise _refused(f"worker {event.shard.worker_id} is not registered, or its registration expired")
    if worker.model_name != record.spec.model_name:
        raise _refused(
            f"worker {worker.worker_id} is of model {worker.model_name!r}, "
            f"version {record.uid} of {record.spec.model_name!r}"
        )


def slot_is_expected(record: VersionRecord, event: PublishShard, moment: Moment) -> None:
    """Check: the version has such a slot."""
    if record.spec.object_storage is not None:
        raise _refused(f"version {record.uid} lies in object storage: it has no source slots")
    if event.shard.slot_id not in record.spec.expected_slots:
        raise Refused(
            Reason.INVALID,
            f"version {record.uid} does not expect slot {event.shard.slot_id!r} "
            f"(it expects {len(record.spec.expected_slots)}, such as {record.spec.expected_slots[0]!r})",
        )


def no_other_content(record: VersionRecord, event: PublishShard, moment: Moment) -> None:
    """Check: a worker publishes one content per slot; the same again is a repeat."""
    known = record.publications.get(event.shard.key)
    if known is not None and publishes(known, moment) and not known.same_content(event.shard):
        raise Refused(
            Reason.EXISTS,
            f"worker {known.worker_id} has already published slot {known.slot_id!r} of version {record.uid} "
            f"with manifest {known.manifest_digest[:12]}, not {event.shard.manifest_digest[:12]}",
        )


def has_not_left(record: VersionRecord, event: PublishShard, moment: Moment) -> None:
    """Check: the publisher has not retracted the slot in this life; then this message is a late one."""
    shard = event.shard
    if (shard.slot_id, shard.worker_id, moment.workers[shard.worker_id].life) in record.left:
        raise _refused(
            f"worker {shard.worker_id} has retracted slot {shard.slot_id!r} of version {record.uid}: "
            "it does not publish it again"
        )


def reader_may(record: VersionRecord, event: AcquireLease | RenewLease, moment: Moment) -> None:
    """Check: the reader is a live generator of this model."""
    worker = moment.workers.get(event.worker_id)
    if worker is None or not live(worker, moment.now_ms):
        raise _refused(f"worker {event.worker_id} is not registered, or its registration expired")
    if worker.role is not WorkerRole.GENERATOR:
        raise _refused(f"worker {event.worker_id} is a {worker.role.value}: only a GENERATOR takes a lease")
    if worker.model_name != record.spec.model_name:
        raise _refused(
            f"worker {worker.worker_id} is of model {worker.model_name!r}, "
            f"version {record.uid} of {record.spec.model_name!r}"
        )


def lease_id_is_free(record: VersionRecord, event: AcquireLease, moment: Moment) -> None:
    """Check: no other worker holds the lease id, which is 32 bits of a hash and may collide."""
    held = record.leases.get(lease_id_of(record.uid, event.worker_id))
    if held is not None and held.worker_id != event.worker_id and lease.live(held, moment.now_ms):
        raise _refused(
            f"lease {held.lease_id} of version {record.uid} is held by worker {held.worker_id}, whose id "
            f"makes the same lease id as {event.worker_id}: register one of them under another id"
        )


def lease_is_live(record: VersionRecord, event: RenewLease, moment: Moment) -> None:
    """Check: there is a live lease to renew; a lapsed one is never revived."""
    held = record.leases.get(lease_id_of(record.uid, event.worker_id))
    if held is None or held.worker_id != event.worker_id or not lease.live(held, moment.now_ms):
        raise _refused(f"worker {event.worker_id} holds no live lease on version {record.uid}")


def drain_is_open(record: VersionRecord, event: RenewLease, moment: Moment) -> None:
    """Check: the drain deadline of a released version has not passed."""
    deadline = releasing(record).drain_deadline_ms
    if moment.now_ms >= deadline:
        raise _refused(
            f"version {record.uid} was released and its drain deadline passed "
            f"{moment.now_ms - deadline} ms ago: leases are no longer renewed"
        )


def holder_returns(record: VersionRecord, event: ReturnLease, moment: Moment) -> None:
    """Check: a lease is returned by its holder only."""
    held = record.leases.get(event.lease_id)
    if held is not None and held.worker_id != event.worker_id:
        raise _refused(f"lease {event.lease_id} of version {record.uid} is held by {held.worker_id}")


def shard_is_published(record: VersionRecord, event: WithdrawShard, moment: Moment) -> None:
    """Check: there is such a publication.

    It comes after `nobody_reads`: a publication also goes with its worker's registration, and its owner
    takes "not found" for the word that nobody reads.
    """
    if (event.slot_id, event.worker_id) not in record.publications:
        raise Refused(
            Reason.NOT_FOUND,
            f"worker {event.worker_id} has not published slot {event.slot_id!r} of version {record.uid}",
        )


def nobody_reads(record: VersionRecord, event: WithdrawShard, moment: Moment) -> None:
    """Check: no lease is live; the fence of every publisher rests on this."""
    if held := live_leases(record, moment.now_ms):
        raise _refused(
            f"version {record.uid} is still read under {len(held)} live leases, the last until "
            f"{max(one.deadline_ms for one in held)} (Unix ms)"
        )


def is_in_storage(record: VersionRecord, event: MarkReady, moment: Moment) -> None:
    """Check: only a version in object storage is made READY by its orchestrator."""
    if record.spec.object_storage is None:
        raise _refused(
            f"version {record.uid} has source slots: it becomes READY when all of them are published, "
            "not by request"
        )


def _refused(message: str) -> Refused:
    return Refused(Reason.PRECONDITION, message)
