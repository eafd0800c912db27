"""What a version may be: every rule of creation, by the field that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemachines.ids import ModelName, SlotId, VersionId, WorkerId, lease_id_of
from statemachines.kernel import Reason, Refused
from statemachines.spec import ObjectRef, PayloadFormat, StorageType, VersionSpec, validate

SLOTS = VersionSpec(ModelName("m"), "key", PayloadFormat.FULL_TENSOR, (SlotId("a"), SlotId("b")))
S3 = ObjectRef("s3://bucket/a/model.safetensors.index.json", StorageType.S3)
STORED = VersionSpec(ModelName("m"), "key", PayloadFormat.FULL_HF_CHECKPOINT, object_storage=S3)
DELTA = replace(SLOTS, payload_format=PayloadFormat.XOR_DELTA, base_version_id=VersionId("base"))


@pytest.mark.parametrize(
    "spec",
    [
        SLOTS,
        STORED,
        DELTA,
        replace(STORED, starts_ready=True),
        replace(SLOTS, expected_slots=(SlotId("run:7"),)),
    ],
)
def test_a_spec_that_is_right(spec: VersionSpec) -> None:
    validate(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SLOTS, model_name=ModelName(" ")), "model_name must not be blank"),
        (replace(SLOTS, idempotency_key=""), "idempotency_key must not be blank"),
        (replace(DELTA, base_version_id=None), "base_version_id is required for XOR_DELTA"),
        (replace(DELTA, base_version_id=VersionId(" ")), "base_version_id is required for XOR_DELTA"),
        (replace(SLOTS, base_version_id=VersionId("x")), "payload_format is FULL_TENSOR"),
        (replace(STORED, base_version_id=VersionId("x")), "payload_format is FULL_HF_CHECKPOINT"),
        (replace(STORED, object_storage=None), "object_storage is required for FULL_HF_CHECKPOINT"),
        (replace(SLOTS, expected_slots=()), "expected_source_slots is empty"),
        (replace(SLOTS, expected_slots=(SlotId("a"), SlotId(""))), "every one of expected_source_slots"),
        (replace(SLOTS, expected_slots=(SlotId("b"), SlotId("a"), SlotId("a"))), "has 'a' more than once"),
        (replace(SLOTS, starts_ready=True), "state READY needs object_storage"),
        (replace(STORED, expected_slots=(SlotId("a"),)), "exclude each other"),
        (replace(STORED, object_storage=replace(S3, storage_type=StorageType.GCS)), "must be S3, not GCS"),
        *(
            (
                replace(STORED, object_storage=replace(S3, uri=uri)),
                "object_storage.uri must be s3://bucket/key",
            )
            for uri in (
                "gs://b/k",
                "s3://b",
                "s3://b/",
                "s3:///k",
                "s3://b//k",
                "s3://b/k?v=1",
                "s3://b/k#x",
                "k",
            )
        ),
    ],
)
def test_a_spec_that_is_wrong_names_its_field(spec: VersionSpec, words: str) -> None:
    with pytest.raises(Refused) as caught:
        validate(spec)
    assert caught.value.reason is Reason.INVALID
    assert words in caught.value.message


def test_lease_ids_are_those_that_0_7_clients_compute() -> None:
    assert lease_id_of(VersionId("v"), WorkerId("w")) == "d428806a"
    assert lease_id_of(VersionId("v"), WorkerId("w")) != lease_id_of(VersionId("vw"), WorkerId(""))
