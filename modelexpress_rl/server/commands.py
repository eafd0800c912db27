"""The commands of a version: from what a caller asks to the event that the machine decides.

What can be said without the machine (an unknown shard, a step back) is said here, in the words and in
the order of the wire; everything else is the machine's to allow or to refuse.
"""

from __future__ import annotations

from modelexpress_rl.server.fold import Command
from modelexpress_rl.server.quotas import require_room_for_shards
from statemachines import lease, version
from statemachines.ids import LeaseId, SlotId, WorkerId, lease_id_of
from statemachines.kernel import Reason, Refused
from statemachines.version import Moment, VersionRecord, VersionState
from statemachines.version_records import (
    AcquireLease,
    Event,
    MarkReady,
    Publication,
    PublishShard,
    Release,
    RenewLease,
    RetractShard,
    ReturnLease,
    Superseded,
    WithdrawShard,
)

# How 0.7 clients see the states.
WIRE_STATE = {
    VersionState.STAGING: VersionState.STAGING,
    VersionState.READY: VersionState.READY,
    VersionState.DEGRADED: VersionState.STAGING,
    VersionState.RELEASING: VersionState.RELEASING,
    VersionState.RETIRED: VersionState.RELEASING,
}

SETTLE = Command(lambda record, moment: None)


def publish(shard: Publication, most: int | None = None) -> Command:
    """A worker publishes a slot; a version has at most `most` publications."""

    def event(record: VersionRecord, moment: Moment) -> Event:
        if most is not None and shard.key not in record.publications:
            require_room_for_shards(record.uid, len(record.publications) + 1, most)
        return PublishShard(shard)

    return Command(
        event,
        (shard.worker_id,),
        f"worker {shard.worker_id} published slot {shard.slot_id}, the last one that was missing",
    )


def set_state(wanted: VersionState, drain_ms: int, retention_ms: int) -> Command:
    """An orchestrator asks for a state, as 0.7 names them; the state that it has is no change."""

    def event(record: VersionRecord, moment: Moment) -> Event | None:
        present = WIRE_STATE[record.state]
        if wanted is present:
            return None
        if wanted is VersionState.RELEASING:
            return Release(drain_ms, retention_ms)
        if wanted is VersionState.STAGING or present is not VersionState.STAGING:
            raise Refused(
                Reason.PRECONDITION,
                f"version {record.uid} is {present.value}: it never goes back to {wanted.value}",
            )
        if record.state is VersionState.DEGRADED:
            raise Refused(
                Reason.PRECONDITION,
                f"version {record.uid} is READY again once the slot without a live publisher is published",
            )
        return MarkReady()

    why = "released by request" if wanted is VersionState.RELEASING else "made READY by request"
    return Command(event, why=why)


def release(drain_ms: int, retention_ms: int) -> Command:
    """Begin the release, or bring its drain deadline forward."""
    return Command(lambda record, moment: Release(drain_ms, retention_ms), why="released by request")


def evict(retention_ms: int) -> Command:
    """An operator wants the version gone: nothing is renewed any more."""
    return Command(lambda record, moment: Release(0, retention_ms), why="evicted by an operator")


def supersede(newer: str, drain_ms: int, retention_ms: int) -> Command:
    """The model's policy keeps newer versions only."""
    return Command(
        lambda record, moment: Superseded(drain_ms, retention_ms), why=f"superseded: {newer} is READY"
    )


def withdraw(slot_id: SlotId, worker_id: WorkerId) -> Command:
    """A publisher of a released version takes its shard back.

    "Not found" is said only where nobody reads: a shard also goes with its owner's registration, and the
    owner takes these words for the end of its readers.
    """

    def event(record: VersionRecord, moment: Moment) -> Event:
        if not version.live_leases(record, moment.now_ms):
            _require_shard(record, slot_id, worker_id)
        return WithdrawShard(slot_id, worker_id)

    return Command(event, why="the last shard was withdrawn")


def retract(slot_id: SlotId, worker_id: WorkerId) -> Command:
    """A publisher leaves before the release; also where its shard has not arrived yet, which it then never
    will."""
    return Command(
        lambda record, moment: RetractShard(slot_id, worker_id),
        (worker_id,),
        why=f"worker {worker_id} retracted it",
    )


def lease_for(worker_id: WorkerId, ttl_ms: int) -> Command:
    """A lease as 0.7 asks for one: a live lease is renewed, another is granted anew."""

    def event(record: VersionRecord, moment: Moment) -> Event:
        held = record.leases.get(lease_id_of(record.uid, worker_id))
        if held is not None and lease.live(held, moment.now_ms):
            return RenewLease(worker_id, ttl_ms)
        return AcquireLease(worker_id, ttl_ms)

    return Command(event, (worker_id,))


def renew(lease_id: LeaseId, worker_id: WorkerId, ttl_ms: int, granted_ms: int | None = None) -> Command:
    """A renewal, and nothing but: a lapsed lease is never revived, nor is one taken for a later one."""

    def event(record: VersionRecord, moment: Moment) -> Event:
        held = record.leases.get(lease_id)
        is_later = held is not None and granted_ms not in (None, held.granted_ms)
        if is_later or lease_id != lease_id_of(record.uid, worker_id):
            raise Refused(
                Reason.PRECONDITION,
                f"lease {lease_id} of version {record.uid} is not held by worker {worker_id}",
            )
        return RenewLease(worker_id, ttl_ms)

    return Command(event, (worker_id,))


def give_back(lease_id: LeaseId, worker_id: WorkerId, granted_ms: int | None = None) -> Command:
    """A reader has finished."""
    return Command(
        lambda record, moment: ReturnLease(lease_id, worker_id, granted_ms), why="the last lease was returned"
    )


def _require_shard(record: VersionRecord, slot_id: SlotId, worker_id: WorkerId) -> None:
    if (slot_id, worker_id) not in record.publications:
        raise Refused(
            Reason.NOT_FOUND,
            f"worker {worker_id} has no live publication of slot {slot_id!r} of version {record.uid}",
        )
