"""Between the messages of the wire and the records of the machines, both ways, with the wire's checks.

What a request lacks is INVALID, and the message names the field. Sizes are bounded, so that no caller
can make a record that the store or another client chokes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import intern

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.server.commands import WIRE_STATE
from modelexpress_rl.server.views import View, live_publications
from statemachines import version
from statemachines.ids import LeaseId, ModelName, SlotId, VersionId, WorkerId
from statemachines.kernel import Reason, Refused
from statemachines.lease import LeaseRecord
from statemachines.spec import ObjectRef, PayloadFormat, StorageType, VersionSpec
from statemachines.version import VersionRecord, VersionState
from statemachines.version_records import Publication, Ready, Releasing
from statemachines.worker import WorkerRecord, WorkerRole, live

MAX_TEXT = 1024
MAX_URI = 4096
MAX_SLOTS = 65_536
MISSING_SHOWN = 16
BRIEF = "mx-brief"

_ROLES = {refit.WORKER_ROLE_TRAINER: WorkerRole.TRAINER, refit.WORKER_ROLE_GENERATOR: WorkerRole.GENERATOR}
_FORMATS = {
    refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR: PayloadFormat.FULL_TENSOR,
    refit.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA: PayloadFormat.XOR_DELTA,
    refit.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT: PayloadFormat.FULL_HF_CHECKPOINT,
}
_STORAGES = {
    refit.OBJECT_STORAGE_TYPE_S3: StorageType.S3,
    refit.OBJECT_STORAGE_TYPE_AZURE: StorageType.AZURE,
    refit.OBJECT_STORAGE_TYPE_GCS: StorageType.GCS,
}
_STATES = {
    refit.WEIGHT_VERSION_STATE_STAGING: VersionState.STAGING,
    refit.WEIGHT_VERSION_STATE_READY: VersionState.READY,
    refit.WEIGHT_VERSION_STATE_RELEASING: VersionState.RELEASING,
}
_ROLES_OUT = {role: number for number, role in _ROLES.items()}
_FORMATS_OUT = {fmt: number for number, fmt in _FORMATS.items()}
_STORAGES_OUT = {kind: number for number, kind in _STORAGES.items()}
_STATES_OUT = {state: number for number, state in _STATES.items()}

# From the wire.


def text(field: str, value: str, longest: int = MAX_TEXT) -> str:
    """A required string.

    Raises:
        Refused: INVALID where it is blank or too long.
    """
    if not value.strip():
        raise invalid(f"{field} must not be blank")
    if len(value) > longest:
        raise invalid(f"{field} has {len(value)} characters, more than {longest}")
    return value


def ttl_ms(field: str, value_ms: int, longest_ms: int | None) -> int:
    """A time to live, in ms.

    Raises:
        Refused: INVALID where it is 0, or longer than the bound.
    """
    if value_ms == 0:
        raise invalid(f"{field} must be positive")
    if longest_ms is not None and value_ms > longest_ms:
        raise invalid(
            f"{field} is {value_ms / 1000:g} s, and this server grants at most {longest_ms / 1000:g} s"
        )
    return value_ms


def role_in(value: refit.WorkerRole.ValueType) -> WorkerRole:
    """A worker's role; INVALID where it is none."""
    if value not in _ROLES:
        raise invalid(f"worker.role must be TRAINER or GENERATOR, not {int(value)}")
    return _ROLES[value]


def state_in(value: refit.WeightVersionState.ValueType) -> VersionState:
    """A state as 0.7 names them; INVALID where it is none."""
    if value not in _STATES:
        raise invalid(f"state must be STAGING, READY or RELEASING, not {int(value)}")
    return _STATES[value]


def spec_in(request: refit.CreateWeightVersionRequest) -> tuple[VersionId | None, VersionSpec]:
    """What a creation asks for; `statemachines.spec.validate` checks the rest of it.

    Raises:
        Refused: INVALID, with the field.
    """
    uid = VersionId(text("uid", request.uid)) if request.HasField("uid") else None
    model_name = ModelName(text("model_name", request.model_name))
    key = text("idempotency_key", request.idempotency_key)
    if request.payload_format not in _FORMATS:
        raise invalid(
            "payload_format must be FULL_TENSOR, XOR_DELTA or FULL_HF_CHECKPOINT, "
            f"not {int(request.payload_format)}"
        )
    state = state_in(request.state)
    if state is VersionState.RELEASING:
        raise invalid("state must be STAGING or READY: no version begins in RELEASING")
    if len(request.expected_source_slots) > MAX_SLOTS:
        raise invalid(
            f"expected_source_slots has {len(request.expected_source_slots)} slots, more than {MAX_SLOTS}"
        )
    slots = tuple(
        SlotId(intern(text("every one of expected_source_slots", slot)))
        for slot in request.expected_source_slots
    )
    base = None
    if request.HasField("base_version_id"):
        base = VersionId(text("base_version_id", request.base_version_id))
    storage = _storage_in(request.object_storage) if request.HasField("object_storage") else None
    return uid, VersionSpec(
        model_name,
        key,
        _FORMATS[request.payload_format],
        slots,
        base,
        storage,
        starts_ready=state is VersionState.READY,
    )


def _storage_in(storage: refit.ObjectStorageSource) -> ObjectRef:
    if storage.storage_type not in _STORAGES:
        raise invalid(f"object_storage.storage_type must be S3, not {int(storage.storage_type)}")
    return ObjectRef(text("object_storage.uri", storage.uri, MAX_URI), _STORAGES[storage.storage_type])


def shard_in(shard: refit.WeightVersionShard) -> tuple[VersionId, Publication]:
    """What a worker publishes; INVALID where a field is blank."""
    version_id = VersionId(text("shard.version_id", shard.version_id))
    # Interned: the same slots, workers and endpoints come back with every version.
    return version_id, Publication(
        SlotId(intern(text("shard.source_slot_id", shard.source_slot_id))),
        WorkerId(intern(text("shard.worker_id", shard.worker_id))),
        shard.tensor_count,
        shard.total_bytes,
        text("shard.manifest_digest", shard.manifest_digest),
        intern(text("shard.manifest_endpoint", shard.manifest_endpoint)),
    )


def version_id_in(value: str, field: str = "version_id") -> VersionId:
    return VersionId(text(field, value))


def worker_id_in(value: str, field: str = "worker_id") -> WorkerId:
    return WorkerId(text(field, value))


def slot_id_in(value: str) -> SlotId:
    return SlotId(text("source_slot_id", value))


def grant_in(value: str) -> tuple[LeaseId, int | None]:
    """A lease as `grant_out` names it, or by its id alone, as 0.7 does; then when it was granted is None."""
    lease_id, dot, granted = text("lease_id", value).partition(".")
    try:
        return LeaseId(lease_id), int(granted, 16) if dot else None
    except ValueError:
        return LeaseId(value), None


def invalid(message: str) -> Refused:
    """The refusal of a request that is wrong by itself."""
    return Refused(Reason.INVALID, message)


# To the wire.


def wants_brief(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether the caller has no use for the slots of the version in an answer.

    A thousand ranks that publish would otherwise get a thousand slots each.
    """
    return any(key == BRIEF for key, _ in metadata or ())


def version_out(record: VersionRecord, *, brief: bool = False) -> refit.WeightVersion:
    """A version as 0.7 sees it: DEGRADED is STAGING again, RETIRED is RELEASING; `brief`: without slots."""
    spec = record.spec
    message = refit.WeightVersion(
        uid=record.uid,
        model_name=spec.model_name,
        idempotency_key=spec.idempotency_key,
        payload_format=_FORMATS_OUT[spec.payload_format],
        base_version_id=spec.base_version_id,
        expected_source_slots=() if brief else spec.expected_slots,
        layout_signature=spec.layout_signature,
        state=_STATES_OUT[WIRE_STATE[record.state]],
        created_at_unix_ms=record.created_at_ms,
    )
    if spec.object_storage is not None:
        storage_type = _STORAGES_OUT[spec.object_storage.storage_type]
        message.object_storage.CopyFrom(
            refit.ObjectStorageSource(uri=spec.object_storage.uri, storage_type=storage_type)
        )
    return message


def shard_out(version_id: VersionId, shard: Publication) -> refit.WeightVersionShard:
    return refit.WeightVersionShard(
        version_id=version_id,
        source_slot_id=shard.slot_id,
        worker_id=shard.worker_id,
        tensor_count=shard.tensor_count,
        total_bytes=shard.total_bytes,
        manifest_digest=shard.manifest_digest,
        manifest_endpoint=shard.manifest_endpoint,
    )


def shards_out(record: VersionRecord, moment: version.Moment) -> list[refit.WeightVersionShard]:
    """The shards of live workers, sorted by (source_slot_id, worker_id)."""
    return [shard_out(record.uid, shard) for shard in live_publications(record, moment)]


def grant_out(version_id: VersionId, held: LeaseRecord) -> refit.VersionLease:
    """A lease whose name says which of a worker's leases on the version it is, one after the other.

    A return that arrives late then ends no later lease.
    """
    message = lease_out(version_id, held)
    message.lease_id = f"{held.lease_id}.{held.granted_ms:x}"
    return message


def lease_out(version_id: VersionId, held: LeaseRecord) -> refit.VersionLease:
    return refit.VersionLease(
        lease_id=held.lease_id,
        version_id=version_id,
        worker_id=held.worker_id,
        expires_at_unix_ms=held.deadline_ms,
    )


def registration_out(record: WorkerRecord) -> refit.WorkerRegistration:
    return refit.WorkerRegistration(
        worker_id=record.worker_id,
        role=_ROLES_OUT[record.role],
        model_name=record.model_name,
        expires_at_unix_ms=record.deadline_ms,
    )


def worker_status_out(record: WorkerRecord, now_ms: int) -> v1.WorkerStatus:
    message = v1.WorkerStatus(
        worker_id=record.worker_id,
        role=_ROLES_OUT[record.role],
        model_name=record.model_name,
        life=v1.WORKER_LIFE_LIVE if live(record, now_ms) else v1.WORKER_LIFE_EXPIRED,
        expires_at_unix_ms=record.deadline_ms,
        serving_uncertain=record.uncertain,
    )
    if record.serving is not None:
        message.serving_version_id = record.serving
    return message


def real_state_out(state: VersionState) -> v1.VersionState.ValueType:
    """A state by its own name."""
    return v1.VersionState.Value(f"VERSION_STATE_{state.value}")


def drain_deadline_out(record: VersionRecord) -> int:
    return record.phase.drain_deadline_ms if isinstance(record.phase, Releasing) else 0


def status_out(view: View) -> v1.VersionStatus:
    """All that a monitor wants to know of a version."""
    record, moment = view.record, view.moment
    expected = record.spec.expected_slots
    missing = sorted(version.missing_slots(record, record.publications, moment))
    leases = version.live_leases(record, moment.now_ms)
    ready_at_ms = view.entry.ready_at_ms
    if not ready_at_ms and isinstance(record.phase, Ready):
        ready_at_ms = record.phase.since_ms
    return v1.VersionStatus(
        version_id=record.uid,
        model_name=record.spec.model_name,
        sequence=record.sequence,
        revision=view.revision,
        state=real_state_out(record.state),
        expected_slots=len(expected),
        covered_slots=len(expected) - len(missing),
        missing_slots=missing[:MISSING_SHOWN],
        live_publications=len(live_publications(record, moment)),
        live_leases=len(leases),
        last_lease_deadline_unix_ms=max((held.deadline_ms for held in leases), default=0),
        drain_deadline_unix_ms=drain_deadline_out(record),
        created_at_unix_ms=record.created_at_ms,
        ready_at_unix_ms=ready_at_ms,
        now_unix_ms=moment.now_ms,
        reason=view.entry.reason,
    )
