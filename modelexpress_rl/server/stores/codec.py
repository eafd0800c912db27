"""Records to JSON and back, with the number of the schema, trusting nothing that is read.

A damaged record raises `StoredRecordError` with the record's name and what is wrong with it; it is
never half understood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from modelexpress_rl.server.stores.port import KeyHolder, StoredRecordError, VersionEntry
from statemachines.ids import LeaseId, ModelName, SlotId, VersionId, WorkerId
from statemachines.lease import LeaseRecord
from statemachines.spec import ObjectRef, PayloadFormat, StorageType, VersionSpec
from statemachines.version_records import (
    Degraded,
    Leases,
    Left,
    Phase,
    Publication,
    Publications,
    Ready,
    Releasing,
    Retired,
    Staging,
    VersionRecord,
    VersionState,
)
from statemachines.worker import WorkerRecord, WorkerRole, WorkerState

SCHEMA = 1

T = TypeVar("T")
Json = dict[str, Any]


def encode_version(entry: VersionEntry) -> str:
    """A version, all of it."""
    record = entry.record
    return _dump(
        {
            "uid": record.uid,
            "spec": _spec_out(record.spec),
            "created_at_ms": record.created_at_ms,
            "sequence": record.sequence,
            "ready_at_ms": entry.ready_at_ms,
            "reason": entry.reason,
            "phase": _phase_out(record),
        }
    )


def decode_version(uid: VersionId, text: str | bytes) -> VersionEntry:
    """The version that `encode_version` wrote under this uid.

    Raises:
        StoredRecordError: it is something else.
    """

    def build(body: Json) -> VersionEntry:
        if body["uid"] != uid:
            raise ValueError(f"it is of version {body['uid']!r}")
        record = VersionRecord(
            uid,
            _spec_in(body["spec"]),
            _count(body["created_at_ms"]),
            _count(body["sequence"]),
            _phase_in(body["phase"]),
        )
        return VersionEntry(record, _count(body["ready_at_ms"]), _text(body["reason"]))

    return _load(f"version {uid!r}", text, build)


def encode_worker(record: WorkerRecord) -> str:
    """A registration."""
    return _dump(
        {
            "worker_id": record.worker_id,
            "role": record.role.value,
            "model": record.model_name,
            "life": record.life,
            "deadline_ms": record.deadline_ms,
            "state": record.state.value,
            "serving": record.serving,
            "uncertain": record.uncertain,
        }
    )


def decode_worker(worker_id: WorkerId, text: str | bytes) -> WorkerRecord:
    """The registration that `encode_worker` wrote.

    Raises:
        StoredRecordError: it is something else.
    """

    def build(body: Json) -> WorkerRecord:
        serving = body["serving"]
        return WorkerRecord(
            worker_id,
            WorkerRole(body["role"]),
            ModelName(_text(body["model"])),
            _count(body["life"]),
            _count(body["deadline_ms"]),
            WorkerState(body["state"]),
            None if serving is None else VersionId(_text(serving)),
            bool(body["uncertain"]),
        )

    return _load(f"worker {worker_id!r}", text, build)


def encode_holder(holder: KeyHolder) -> str:
    """Who holds an idempotency key."""
    return _dump({"uid": holder.uid, "spec": _spec_out(holder.spec)})


def decode_holder(idempotency_key: str, text: str | bytes) -> KeyHolder:
    """The holder that `encode_holder` wrote.

    Raises:
        StoredRecordError: it is something else.
    """
    return _load(
        f"idempotency key {idempotency_key!r}",
        text,
        lambda body: KeyHolder(VersionId(_text(body["uid"])), _spec_in(body["spec"])),
    )


def _spec_out(spec: VersionSpec) -> Json:
    storage = spec.object_storage
    return {
        "model": spec.model_name,
        "key": spec.idempotency_key,
        "format": spec.payload_format.value,
        "slots": list(spec.expected_slots),
        "base": spec.base_version_id,
        "storage": None if storage is None else [storage.uri, storage.storage_type.value],
        "starts_ready": spec.starts_ready,
        "layout": spec.layout_signature,
    }


def _spec_in(body: Json) -> VersionSpec:
    base, storage = body["base"], body["storage"]
    return VersionSpec(
        ModelName(_text(body["model"])),
        _text(body["key"]),
        PayloadFormat(body["format"]),
        tuple(SlotId(_text(slot)) for slot in body["slots"]),
        None if base is None else VersionId(_text(base)),
        None if storage is None else ObjectRef(_text(storage[0]), StorageType(storage[1])),
        bool(body["starts_ready"]),
        _text(body["layout"]),
    )


def _phase_out(record: VersionRecord) -> Json:
    phase = record.phase
    body: Json = {"state": record.state.value}
    if record.publications:
        body["publications"] = [
            [
                shard.slot_id,
                shard.worker_id,
                shard.tensor_count,
                shard.total_bytes,
                shard.manifest_digest,
                shard.manifest_endpoint,
                shard.life,
            ]
            for shard in record.publications.values()
        ]
    if record.leases:  # an ended lease is never filed: its state need not be kept
        body["leases"] = [
            [held.worker_id, held.lease_id, held.deadline_ms, held.granted_ms]
            for held in record.leases.values()
        ]
    if record.left:
        body["left"] = sorted(record.left)
    if isinstance(phase, Ready):
        body["since_ms"] = phase.since_ms
    elif isinstance(phase, Releasing):
        body["drain_deadline_ms"] = phase.drain_deadline_ms
        body["abandon_at_ms"] = phase.abandon_at_ms
        body["retention_ms"] = phase.retention_ms
    elif isinstance(phase, Retired):
        body["forget_at_ms"] = phase.forget_at_ms
    return body


def _phase_in(body: Json) -> Phase:
    state = VersionState(body["state"])
    if state is VersionState.RETIRED:
        return Retired(_count(body["forget_at_ms"]))
    publications, leases, left = _publications_in(body), _leases_in(body), _left_in(body)
    if state is VersionState.STAGING:
        return Staging(publications, left)
    if state is VersionState.READY:
        return Ready(publications, leases, _count(body["since_ms"]), left)
    if state is VersionState.DEGRADED:
        return Degraded(publications, leases, left)
    if state is VersionState.RELEASING:
        spans = (_count(body[name]) for name in ("drain_deadline_ms", "abandon_at_ms", "retention_ms"))
        return Releasing(publications, leases, *spans)
    raise ValueError(f"state {state.value} is never stored")


def _publications_in(body: Json) -> Publications:
    shards: dict[tuple[SlotId, WorkerId], Publication] = {}
    for slot, worker, tensors, size_bytes, digest, endpoint, life in body.get("publications", ()):
        shard = Publication(
            SlotId(_text(slot)),
            WorkerId(_text(worker)),
            _count(tensors),
            _count(size_bytes),
            _text(digest),
            _text(endpoint),
            _count(life),
        )
        shards[shard.key] = shard
    return shards


def _leases_in(body: Json) -> Leases:
    leases: dict[LeaseId, LeaseRecord] = {}
    for worker, lease, deadline_ms, granted_ms in body.get("leases", ()):
        held = LeaseRecord(
            LeaseId(_text(lease)), WorkerId(_text(worker)), _count(deadline_ms), granted_ms=_count(granted_ms)
        )
        leases[held.lease_id] = held
    return leases


def _left_in(body: Json) -> Left:
    return frozenset(
        (SlotId(_text(slot)), WorkerId(_text(worker)), _count(life))
        for slot, worker, life in body.get("left", ())
    )


def _dump(body: Mapping[str, Any]) -> str:
    return json.dumps({"schema": SCHEMA, **body}, ensure_ascii=False, separators=(",", ":"))


def _load(name: str, text: str | bytes, build: Callable[[Json], T]) -> T:
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("it is not an object")
        schema = body.get("schema")
        if type(schema) is not int or schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}, this release reads {SCHEMA}")
        return build(body)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise StoredRecordError(
            f"the stored record of {name} can't be read: {type(error).__name__}: {error}"
        ) from error


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {value!r:.80}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a whole number, found {value!r:.80}")
    return value
