"""Records of every kind, by hand and by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from modelexpress_rl.server.stores.port import VersionEntry
from statemachines.ids import SlotId, VersionId, lease_id_of
from statemachines.lease import LeaseRecord
from statemachines.spec import ObjectRef, PayloadFormat, StorageType, VersionSpec
from statemachines.version import begin
from statemachines.version_records import (
    Degraded,
    Publication,
    Ready,
    Releasing,
    Retired,
    Staging,
    VersionRecord,
)
from statemachines.worker import WorkerRecord, WorkerRole, WorkerState

# Anything a caller may use as an identity: nothing in it may mean anything to a store.
ODD_IDS = (
    "run:7",
    "..",
    "../../etc/passwd",
    "foo:shards",
    "foo",
    "foo:",
    "{foo}",
    "a\0b",
    "a",
    "a' OR '1'='1",
    "%",
    "*",
    " leading",
    "new\nline",
    "gewichte-ä-漢字-🙂",
    "x" * 1024,
)


def spec(key: str = "key", model: str = "model", slots: tuple[str, ...] = ("s0", "s1")) -> VersionSpec:
    return VersionSpec(model, key, PayloadFormat.FULL_TENSOR, tuple(SlotId(slot) for slot in slots))


def entry(uid: str, sequence: int, *, model: str = "model", key: str | None = None) -> VersionEntry:
    wanted = spec(key if key is not None else f"key of {uid}", model)
    return VersionEntry(begin(VersionId(uid), wanted, 1_000, sequence), 0, "created")


def published(uid: str, *worker_ids: str) -> VersionEntry:
    """A version of two slots, the first of which these workers publish."""
    shards = [Publication(SlotId("s0"), worker_id, 1, 2, "digest", "host:1", 1) for worker_id in worker_ids]
    record = entry(uid, 1).record
    staging = Staging({shard.key: shard for shard in shards})
    return VersionEntry(VersionRecord(record.uid, record.spec, 1_000, 1, staging), 0, "created")


def retired(uid: str, sequence: int, *, model: str = "model") -> VersionEntry:
    record = entry(uid, sequence, model=model).record
    return VersionEntry(VersionRecord(record.uid, record.spec, 1_000, sequence, Retired(9_000)), 5, "over")


def worker(worker_id: str, *, life: int = 1, deadline_ms: int = 10_000, model: str = "model") -> WorkerRecord:
    return WorkerRecord(worker_id, WorkerRole.TRAINER, model, life, deadline_ms)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ids = texts.filter(str.strip)
counts = st.integers(0, 2**63 - 1)
publications = st.builds(Publication, ids, ids, counts, counts, ids, ids, counts)
shards = st.lists(publications, max_size=4).map(lambda some: {shard.key: shard for shard in some})
left = st.frozensets(st.tuples(ids, ids, counts), max_size=3)


@st.composite
def version_records(draw: st.DrawFn) -> VersionRecord:
    uid = draw(ids)
    holders = draw(st.lists(st.tuples(ids, counts), max_size=3))
    leases = {
        lease_id_of(uid, who): LeaseRecord(lease_id_of(uid, who), who, deadline) for who, deadline in holders
    }
    phase = draw(
        st.one_of(
            st.builds(Staging, shards, left),
            st.builds(Ready, shards, st.just(leases), counts, left),
            st.builds(Degraded, shards, st.just(leases), left),
            st.builds(Releasing, shards, st.just(leases), counts, counts, counts),
            st.builds(Retired, counts),
        )
    )
    wanted = draw(
        st.builds(
            VersionSpec,
            ids,
            ids,
            st.sampled_from(PayloadFormat),
            st.lists(ids, max_size=4).map(tuple),
            st.none() | ids,
            st.none() | st.builds(ObjectRef, ids, st.sampled_from(StorageType)),
            st.booleans(),
            texts,
        )
    )
    return VersionRecord(uid, wanted, draw(counts), draw(counts), phase)


version_entries = st.builds(VersionEntry, version_records(), counts, texts)
worker_records = st.builds(
    WorkerRecord,
    ids,
    st.sampled_from(WorkerRole),
    ids,
    counts,
    counts,
    st.sampled_from(WorkerState),
    st.none() | ids,
    st.booleans(),
)
