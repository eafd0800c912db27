"""Examples of the version machine: two slots, trainers t0 and t1, a replica t2, generators g0 and g1."""

from __future__ import annotations

from dataclasses import replace

from statemachines import version
from statemachines.ids import LeaseId, ModelName, SlotId, VersionId, WorkerId, lease_id_of
from statemachines.kernel import Reason
from statemachines.lease import LeaseRecord
from statemachines.spec import ObjectRef, PayloadFormat, StorageType, VersionSpec
from statemachines.version_records import (
    AcquireLease,
    Degraded,
    Erase,
    Event,
    Forgotten,
    LeaseGranted,
    LeaseLapsed,
    MarkReady,
    ModelReady,
    Moment,
    Publication,
    PublishShard,
    Ready,
    Release,
    Releasing,
    RenewLease,
    RetentionOver,
    Retired,
    RetractShard,
    ReturnLease,
    Staging,
    StatusChanged,
    Superseded,
    VersionRecord,
    VersionState,
    WithdrawShard,
    WorkerExpired,
)
from statemachines.worker import WorkerRecord, WorkerRole
from tests.statemachines.examples import Example, Machine, refused

STAGING, READY, DEGRADED, RELEASING, RETIRED, FORGOTTEN = VersionState
UID, MODEL = VersionId("v"), ModelName("m")
A, B = SlotId("a"), SlotId("b")
T0, T1, T2, T3, G0, G1, GONE, OTHER = (
    WorkerId(name) for name in ("t0", "t1", "t2", "t3", "g0", "g1", "gone", "other")
)
SPEC = VersionSpec(MODEL, "key", PayloadFormat.FULL_TENSOR, (A, B))
STORED = VersionSpec(
    MODEL,
    "key",
    PayloadFormat.FULL_HF_CHECKPOINT,
    object_storage=ObjectRef("s3://bucket/index", StorageType.S3),
)


def worker(worker_id: WorkerId, role: WorkerRole = WorkerRole.TRAINER, **changes: object) -> WorkerRecord:
    record = WorkerRecord(worker_id, role, MODEL, life=1, deadline_ms=1000)
    return replace(record, **changes)  # type: ignore[arg-type]


WORKERS = {
    record.worker_id: record
    for record in (
        worker(T0),
        worker(T1),
        worker(T2),
        worker(GONE, deadline_ms=100),
        worker(OTHER, model_name=ModelName("another")),
        worker(G0, WorkerRole.GENERATOR),
        worker(G1, WorkerRole.GENERATOR),
    )
}
NOW = Moment(100, WORKERS)


def shard(slot: SlotId, worker_id: WorkerId, digest: str = "d", life: int = 1) -> Publication:
    return Publication(slot, worker_id, 1, 10, digest, "host:1", life)


def published(*shards: Publication) -> dict[tuple[SlotId, WorkerId], Publication]:
    return {one.key: one for one in shards}


def held(*leases: tuple[WorkerId, int]) -> dict[LeaseId, LeaseRecord]:
    records = (LeaseRecord(lease_id_of(UID, who), who, deadline_ms) for who, deadline_ms in leases)
    return {one.lease_id: one for one in records}


def in_phase(phase: object, spec: VersionSpec = SPEC) -> VersionRecord:
    return VersionRecord(UID, spec, 0, 1, phase)  # type: ignore[arg-type]


def lease_id(who: WorkerId) -> LeaseId:
    return lease_id_of(UID, who)


BOTH = published(shard(A, T0), shard(B, T1))
EMPTY = in_phase(Staging())
HALF = in_phase(Staging(published(shard(A, T0))))
ALL = in_phase(Ready(BOTH, {}, 50))
READ = in_phase(Ready(BOTH, held((G0, 200)), 50))
REPLICATED = in_phase(Ready(BOTH | published(shard(A, T2)), {}, 50))
GAP = in_phase(Degraded(published(shard(A, T0)), held((G0, 200))))
DRAINING = in_phase(Releasing(BOTH, held((G0, 200)), 150, 250, 100))
CLOSED = in_phase(Releasing(BOTH, held((G0, 200)), 100, 200, 100))
UNREAD = in_phase(Releasing(published(shard(A, T0)), {}, 150, 250, 100))
ONE_READER = in_phase(Releasing({}, held((G0, 200)), 150, 250, 100))
LAPSED_READER = in_phase(Releasing({}, held((G0, 100)), 150, 250, 100))
DEAD_OWNER = in_phase(Releasing(published(shard(A, GONE)), {}, 150, 250, 100))
ABANDONED = in_phase(Releasing(BOTH, held((G0, 100)), 50, 100, 50))
ABANDONED_AND_READ = in_phase(Releasing(BOTH, held((G0, 101)), 50, 100, 50))
KEPT = in_phase(Retired(forget_at_ms=101))
KEPT_ENOUGH = in_phase(Retired(forget_at_ms=100))
FILE = in_phase(Staging(), STORED)

RECORDS = {
    STAGING: HALF,
    READY: READ,
    DEGRADED: GAP,
    RELEASING: DRAINING,
    RETIRED: KEPT,
    FORGOTTEN: in_phase(Forgotten()),
}
EVENTS: dict[type, Event] = {
    type(event): event
    for event in (
        PublishShard(shard(A, T0)),
        MarkReady(),
        AcquireLease(G0, 100),
        RenewLease(G0, 100),
        ReturnLease(lease_id(G0), G0),
        LeaseLapsed(lease_id(G0)),
        WorkerExpired(T0),
        RetractShard(A, T0),
        WithdrawShard(A, T0),
        Superseded(50, 100),
        Release(50, 100),
        RetentionOver(),
    )
}
PRECONDITION = Reason.PRECONDITION
RETRACTED = in_phase(Staging({}, frozenset({(A, T0, 1)})))

EXAMPLES = (
    # PublishShard
    Example(EMPTY, PublishShard(shard(A, T0)), NOW, STAGING, True, effects=(StatusChanged,)),
    Example(HALF, PublishShard(shard(A, T0)), NOW, STAGING, False, effects=()),
    Example(HALF, PublishShard(shard(A, T2)), NOW, STAGING, True),
    Example(HALF, PublishShard(shard(B, T1)), NOW, READY, True, effects=(StatusChanged, ModelReady)),
    Example(in_phase(Staging(published(shard(A, GONE)))), PublishShard(shard(B, T1)), NOW, STAGING, True),
    Example(ALL, PublishShard(shard(A, T2)), NOW, READY, True),
    Example(ALL, PublishShard(shard(A, T0)), NOW, READY, False),
    Example(GAP, PublishShard(shard(B, T1)), NOW, READY, True, effects=(StatusChanged, ModelReady)),
    Example(GAP, PublishShard(shard(A, T2)), NOW, DEGRADED, True),
    # ... a new life, or other content once the old life is over
    Example(
        in_phase(Staging(published(shard(A, T0, "x", 0)))), PublishShard(shard(A, T0)), NOW, STAGING, True
    ),
    *(
        refused(record, PublishShard(one), NOW, reason, words)
        for record in (HALF, ALL, GAP)
        for one, reason, words in (
            (shard(A, T3), PRECONDITION, "t3 is not registered"),
            (shard(A, GONE), PRECONDITION, "gone is not registered, or its registration expired"),
            (shard(A, OTHER), PRECONDITION, "other is of model 'another'"),
            (shard(SlotId("c"), T0), Reason.INVALID, "does not expect slot 'c'"),
            (shard(A, T0, "x"), Reason.EXISTS, "t0 has already published slot 'a'"),
        )
    ),
    refused(FILE, PublishShard(shard(A, T0)), NOW, PRECONDITION, "lies in object storage"),
    *(
        refused(in_phase(phase), PublishShard(shard(A, T0)), NOW, PRECONDITION, "t0 has retracted slot 'a'")
        for left in (frozenset({(A, T0, 1)}),)
        for phase in (Staging({}, left), Ready(BOTH, {}, 0, left), Degraded({}, {}, left))
    ),
    Example(
        in_phase(Staging({}, frozenset({(A, T0, 0), (B, T0, 1)}))),
        PublishShard(shard(A, T0)),
        NOW,
        STAGING,
        True,
    ),
    # MarkReady
    Example(FILE, MarkReady(), NOW, READY, True, effects=(StatusChanged, ModelReady)),
    refused(HALF, MarkReady(), NOW, PRECONDITION, "has source slots"),
    # AcquireLease, RenewLease
    Example(ALL, AcquireLease(G0, 100), NOW, READY, True, effects=(StatusChanged, LeaseGranted)),
    Example(READ, AcquireLease(G0, 50), NOW, READY, False),
    Example(READ, AcquireLease(G0, 101), NOW, READY, True),
    Example(in_phase(Ready(BOTH, held((G0, 100)), 50)), AcquireLease(G0, 50), NOW, READY, True),
    Example(READ, RenewLease(G0, 101), NOW, READY, True),
    Example(DRAINING, RenewLease(G0, 101), NOW, RELEASING, True),
    Example(
        in_phase(Releasing(BOTH, held((G0, 200)), 101, 201, 100)), RenewLease(G0, 101), NOW, RELEASING, True
    ),
    *(
        refused(ALL, AcquireLease(who, 100), NOW, PRECONDITION, words)
        for who, words in (
            (WorkerId("nobody"), "nobody is not registered"),
            (GONE, "gone is not registered, or its registration expired"),
            (T0, "only a GENERATOR takes a lease"),
        )
    ),
    refused(
        ALL,
        AcquireLease(G0, 100),
        Moment(100, {G0: worker(G0, WorkerRole.GENERATOR, model_name=ModelName("another"))}),
        PRECONDITION,
        "g0 is of model 'another'",
    ),
    refused(
        in_phase(Ready(BOTH, {lease_id(G0): LeaseRecord(lease_id(G0), G1, 200)}, 50)),
        AcquireLease(G0, 100),
        NOW,
        PRECONDITION,
        "is held by worker g1, whose id makes the same lease id as g0",
    ),
    Example(
        in_phase(Ready(BOTH, {lease_id(G0): LeaseRecord(lease_id(G0), G1, 100)}, 50)),
        AcquireLease(G0, 100),
        NOW,
        READY,
        True,
    ),
    *(refused(one, RenewLease(T0, 1), NOW, PRECONDITION, "only a GENERATOR") for one in (READ, DRAINING)),
    *(refused(one, RenewLease(G1, 1), NOW, PRECONDITION, "holds no live lease") for one in (READ, DRAINING)),
    refused(
        in_phase(Ready(BOTH, held((G0, 100)), 50)),
        RenewLease(G0, 1),
        NOW,
        PRECONDITION,
        "holds no live lease",
    ),
    refused(CLOSED, RenewLease(G0, 1), NOW, PRECONDITION, "its drain deadline passed 0 ms ago"),
    # ReturnLease, LeaseLapsed
    *(
        example
        for record, state in ((READ, READY), (GAP, DEGRADED), (DRAINING, RELEASING))
        for example in (
            Example(record, ReturnLease(lease_id(G0), G0), NOW, state, True, effects=(StatusChanged,)),
            Example(record, ReturnLease(lease_id(G1), G1), NOW, state, False, effects=()),
            refused(record, ReturnLease(lease_id(G0), G1), NOW, PRECONDITION, "is held by g0"),
            Example(record, LeaseLapsed(lease_id(G0)), NOW, state, False, effects=()),
            Example(record, LeaseLapsed(lease_id(G0)), Moment(200, WORKERS), state, True),
            Example(record, LeaseLapsed(lease_id(G1)), NOW, state, False),
        )
    ),
    Example(ONE_READER, ReturnLease(lease_id(G0), G0), NOW, RETIRED, True),
    Example(ONE_READER, ReturnLease(lease_id(G0), G0, granted_ms=0), NOW, RETIRED, True),
    Example(ONE_READER, ReturnLease(lease_id(G0), G0, granted_ms=1), NOW, RELEASING, False),
    Example(ONE_READER, ReturnLease(lease_id(G1), G1), NOW, RELEASING, False),
    Example(LAPSED_READER, LeaseLapsed(lease_id(G0)), NOW, RETIRED, True),
    Example(ONE_READER, LeaseLapsed(lease_id(G0)), NOW, RELEASING, False),
    # WorkerExpired
    Example(HALF, WorkerExpired(T0), NOW, STAGING, False),
    Example(in_phase(Staging(published(shard(A, GONE)))), WorkerExpired(GONE), NOW, STAGING, True),
    Example(GAP, WorkerExpired(T0), NOW, DEGRADED, False),
    Example(in_phase(Degraded(published(shard(A, GONE)), {})), WorkerExpired(GONE), NOW, DEGRADED, True),
    Example(ALL, WorkerExpired(T0), NOW, READY, False),
    Example(ALL, WorkerExpired(T0), Moment(1000, WORKERS), DEGRADED, True),
    Example(in_phase(Ready(BOTH | published(shard(A, GONE)), {}, 50)), WorkerExpired(GONE), NOW, READY, True),
    Example(DRAINING, WorkerExpired(T0), NOW, RELEASING, False),
    Example(DRAINING, WorkerExpired(T0), Moment(1000, WORKERS), RELEASING, True),
    Example(DEAD_OWNER, WorkerExpired(GONE), NOW, RETIRED, True),
    # RetractShard
    Example(HALF, RetractShard(A, T0), NOW, STAGING, True),
    Example(EMPTY, RetractShard(A, T0), NOW, STAGING, True),
    Example(RETRACTED, RetractShard(A, T0), NOW, STAGING, False, effects=()),
    Example(EMPTY, RetractShard(A, GONE), NOW, STAGING, False),
    Example(EMPTY, RetractShard(A, T3), NOW, STAGING, False),
    Example(EMPTY, RetractShard(SlotId("c"), T0), NOW, STAGING, False),
    Example(GAP, RetractShard(A, T0), NOW, DEGRADED, True),
    Example(ALL, RetractShard(A, T0), NOW, DEGRADED, True),
    Example(REPLICATED, RetractShard(A, T0), NOW, READY, True),
    Example(DRAINING, RetractShard(A, T0), NOW, RELEASING, True),
    Example(DRAINING, RetractShard(A, T3), NOW, RELEASING, False),
    Example(UNREAD, RetractShard(A, T0), NOW, RETIRED, True),
    # WithdrawShard
    Example(in_phase(Releasing(BOTH, {}, 150, 250, 100)), WithdrawShard(A, T0), NOW, RELEASING, True),
    Example(UNREAD, WithdrawShard(A, T0), NOW, RETIRED, True),
    Example(in_phase(Releasing(BOTH, held((G0, 100)), 1, 2, 1)), WithdrawShard(A, T0), NOW, RELEASING, True),
    refused(DRAINING, WithdrawShard(A, T0), NOW, PRECONDITION, "is still read under 1 live leases"),
    refused(DRAINING, WithdrawShard(A, T3), NOW, PRECONDITION, "is still read under 1 live leases"),
    refused(UNREAD, WithdrawShard(B, T0), NOW, Reason.NOT_FOUND, "t0 has not published slot 'b'"),
    # Release, Superseded
    *(
        example
        for event in (Release(50, 100), Superseded(50, 100))
        for example in (
            Example(EMPTY, event, NOW, RETIRED, True),
            Example(HALF, event, NOW, RELEASING, True),
            Example(in_phase(Ready({}, {}, 50), STORED), event, NOW, RETIRED, True),
            Example(in_phase(Ready({}, held((G0, 100)), 50), STORED), event, NOW, RETIRED, True),
            Example(in_phase(Ready({}, held((G0, 101)), 50), STORED), event, NOW, RELEASING, True),
            Example(ALL, event, NOW, RELEASING, True),
            Example(in_phase(Degraded({}, {})), event, NOW, RETIRED, True),
            Example(GAP, event, NOW, RELEASING, True),
        )
    ),
    Example(DRAINING, Release(49, 100), NOW, RELEASING, True),
    Example(DRAINING, Release(50, 100), NOW, RELEASING, False),
    # RetentionOver
    Example(DRAINING, RetentionOver(), NOW, RELEASING, False),
    Example(ABANDONED, RetentionOver(), NOW, RETIRED, True),
    Example(ABANDONED_AND_READ, RetentionOver(), NOW, RELEASING, False),
    Example(KEPT, RetentionOver(), NOW, RETIRED, False),
    Example(KEPT_ENOUGH, RetentionOver(), NOW, FORGOTTEN, True, effects=(StatusChanged, Erase)),
)
VERSION = Machine(version.TABLE, version, RECORDS, EVENTS, NOW, EXAMPLES)
