"""What a version is: what its creator asked for, checked, before it has any life.

The rules and their reasons are those of the 0.7.0 wire (CreateWeightVersion).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from statemachines.ids import ModelName, SlotId, VersionId
from statemachines.kernel import Reason, Refused


class PayloadFormat(StrEnum):
    """How a version carries its weights."""

    FULL_TENSOR = "FULL_TENSOR"
    XOR_DELTA = "XOR_DELTA"
    FULL_HF_CHECKPOINT = "FULL_HF_CHECKPOINT"


class StorageType(StrEnum):
    """The object stores that the wire can name; only S3 is accepted."""

    S3 = "S3"
    AZURE = "AZURE"
    GCS = "GCS"


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Where a version's safetensors index lies in object storage."""

    uri: str
    storage_type: StorageType


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A creation request: two requests are the same request exactly when their specs are equal."""

    model_name: ModelName
    idempotency_key: str
    payload_format: PayloadFormat
    expected_slots: tuple[SlotId, ...] = ()
    base_version_id: VersionId | None = None
    object_storage: ObjectRef | None = None
    starts_ready: bool = False
    layout_signature: str = ""


def validate(spec: VersionSpec) -> None:
    """Refuse a request that contradicts itself.

    Raises:
        Refused: INVALID, with the field that is wrong.
    """
    _required("model_name", spec.model_name)
    _required("idempotency_key", spec.idempotency_key)
    fmt = spec.payload_format
    if fmt is PayloadFormat.XOR_DELTA and not (spec.base_version_id or "").strip():
        raise _invalid("base_version_id is required for XOR_DELTA: a delta changes a version that exists")
    if fmt is not PayloadFormat.XOR_DELTA and spec.base_version_id is not None:
        raise _invalid(f"base_version_id is only for XOR_DELTA, and payload_format is {fmt.value}")
    if fmt is PayloadFormat.FULL_HF_CHECKPOINT and spec.object_storage is None:
        raise _invalid("object_storage is required for FULL_HF_CHECKPOINT")
    if spec.object_storage is not None:
        _validate_storage(spec, spec.object_storage)
    else:
        _validate_slots(spec)


def _validate_slots(spec: VersionSpec) -> None:
    if not spec.expected_slots:
        raise _invalid(
            "expected_source_slots is empty, and there is no object_storage: nobody could publish it"
        )
    for slot in spec.expected_slots:
        _required("every one of expected_source_slots", slot)
    if len(set(spec.expected_slots)) != len(spec.expected_slots):
        twice = sorted({slot for slot in spec.expected_slots if spec.expected_slots.count(slot) > 1})
        raise _invalid(f"expected_source_slots has {twice[0]!r} more than once")
    if spec.starts_ready:
        raise _invalid("state READY needs object_storage: a version with source slots starts in STAGING")


def _validate_storage(spec: VersionSpec, storage: ObjectRef) -> None:
    if spec.expected_slots:
        raise _invalid("expected_source_slots and object_storage exclude each other")
    if storage.storage_type is not StorageType.S3:
        raise _invalid(f"object_storage.storage_type must be S3, not {storage.storage_type.value}")
    uri = storage.uri
    scheme, _, path = uri.partition("://")
    parts = path.split("/")
    if scheme != "s3" or "?" in uri or "#" in uri or len(parts) < 2 or not all(parts):
        raise _invalid(
            f"object_storage.uri must be s3://bucket/key without '?', '#' or an empty path part, not {uri!r}"
        )


def _required(field: str, value: str) -> None:
    if not value.strip():
        raise _invalid(f"{field} must not be blank")


def _invalid(message: str) -> Refused:
    return Refused(Reason.INVALID, message)
