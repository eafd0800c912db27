"""Protobuf messages to and from the classes that users see.

A message of a peer that has no counterpart (an enum value of a newer build, a record without a uid) is
a `PeerError`, not a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import PeerError
from modelexpress_rl.object_storage import ObjectStorageSource, ObjectStorageType
from modelexpress_rl.version import (
    VersionState,
    VersionStatus,
    WeightPayloadFormat,
    WeightVersion,
    WeightVersionState,
    WorkerRole,
    WorkerStatus,
)

E = TypeVar("E", bound=StrEnum)


def payload_format_to_pb(value: WeightPayloadFormat) -> refit.WeightPayloadFormat.ValueType:
    """The wire's number of a payload format."""
    return refit.WeightPayloadFormat.Value(f"WEIGHT_PAYLOAD_FORMAT_{value.value}")


def state_to_pb(value: WeightVersionState) -> refit.WeightVersionState.ValueType:
    """The wire's number of a version state."""
    return refit.WeightVersionState.Value(f"WEIGHT_VERSION_STATE_{value.value}")


def version_state_to_pb(value: VersionState) -> v1.VersionState.ValueType:
    """The number of a version's real state."""
    return v1.VersionState.Value(f"VERSION_STATE_{value.value}")


def object_storage_to_pb(value: ObjectStorageSource) -> refit.ObjectStorageSource:
    """The message of an object storage source."""
    kind = refit.ObjectStorageType.Value(f"OBJECT_STORAGE_TYPE_{value.storage_type.value}")
    return refit.ObjectStorageSource(uri=value.uri, storage_type=kind)


def object_storage_from_pb(message: refit.ObjectStorageSource) -> ObjectStorageSource:
    """The source that a version names.

    Raises:
        PeerError: its storage type is unknown.
        UsageError: its URI or type is not one that this build reads.
    """
    kind = _enum(
        ObjectStorageType, refit.ObjectStorageType, message.storage_type, "OBJECT_STORAGE_TYPE_", "storage"
    )
    return ObjectStorageSource(kind, message.uri)


def weight_version_from_pb(message: refit.WeightVersion) -> WeightVersion:
    """The record of a version.

    Raises:
        PeerError: it has no uid, or an enum value that this build does not know.
    """
    if not message.uid:
        raise PeerError("the control plane answered a version without a uid")
    what = f"version {message.uid!r}"
    has_storage = message.HasField("object_storage")
    return WeightVersion(
        version_id=message.uid,
        model_name=message.model_name,
        payload_format=_enum(
            WeightPayloadFormat,
            refit.WeightPayloadFormat,
            message.payload_format,
            "WEIGHT_PAYLOAD_FORMAT_",
            what,
        ),
        base_version_id=message.base_version_id if message.HasField("base_version_id") else None,
        object_storage=object_storage_from_pb(message.object_storage) if has_storage else None,
        expected_source_slots=tuple(message.expected_source_slots),
        layout_signature=message.layout_signature,
        state=_enum(
            WeightVersionState, refit.WeightVersionState, message.state, "WEIGHT_VERSION_STATE_", what
        ),
        created_at_unix_ms=message.created_at_unix_ms,
    )


def version_status_from_pb(message: v1.VersionStatus) -> VersionStatus:
    """The status that our service tells.

    Raises:
        PeerError: its state is one that this build does not know.
    """
    what = f"version {message.version_id!r}"
    return VersionStatus(
        version_id=message.version_id,
        model_name=message.model_name,
        state=_enum(VersionState, v1.VersionState, message.state, "VERSION_STATE_", what),
        sequence=message.sequence,
        revision=message.revision,
        expected_slots=message.expected_slots,
        covered_slots=message.covered_slots,
        missing_slots=tuple(message.missing_slots),
        live_publications=message.live_publications,
        live_leases=message.live_leases,
        last_lease_deadline_unix_ms=message.last_lease_deadline_unix_ms or None,
        drain_deadline_unix_ms=message.drain_deadline_unix_ms or None,
        created_at_unix_ms=message.created_at_unix_ms or None,
        ready_at_unix_ms=message.ready_at_unix_ms or None,
        now_unix_ms=message.now_unix_ms or None,
        reason=message.reason,
    )


def worker_status_from_pb(message: v1.WorkerStatus) -> WorkerStatus:
    """A worker, as our service tells it.

    Raises:
        PeerError: its role is one that this build does not know.
    """
    what = f"worker {message.worker_id!r}"
    uncertain = message.serving_uncertain
    serving = message.serving_version_id if message.HasField("serving_version_id") else None
    return WorkerStatus(
        worker_id=message.worker_id,
        role=_enum(WorkerRole, refit.WorkerRole, message.role, "WORKER_ROLE_", what),
        model_name=message.model_name,
        live=message.life == v1.WORKER_LIFE_LIVE,
        expires_at_unix_ms=message.expires_at_unix_ms,
        serving_version_id=None if uncertain else serving,
        serving_uncertain=uncertain,
    )


def version_status_from_record(
    version: WeightVersion, shards: list[refit.WeightVersionShard] | None
) -> VersionStatus:
    """The status as far as a server of 0.7 tells it; `shards` None: it was not asked for them."""
    covered = {shard.source_slot_id for shard in shards or ()} & set(version.expected_source_slots)
    missing = sorted(set(version.expected_source_slots) - covered)
    return VersionStatus(
        version_id=version.version_id,
        model_name=version.model_name,
        state=VersionState(version.state.value),
        expected_slots=len(version.expected_source_slots),
        covered_slots=len(covered),
        missing_slots=tuple(missing[:16]),
        live_publications=None if shards is None else len(shards),
        created_at_unix_ms=version.created_at_unix_ms or None,
    )


def _enum(kind: type[E], pb_enum: object, number: int, prefix: str, what: str) -> E:
    try:
        return kind(pb_enum.Name(number).removeprefix(prefix))  # type: ignore[attr-defined]
    except ValueError:
        raise PeerError(f"{what}: {kind.__name__} {number} is unknown to this build") from None
