"""The generated code is what the .proto files say, and they say what modelexpress 0.7.0 speaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit

ROOT = Path(__file__).resolve().parents[2]

# Message: "number name type", as read off the published 0.7.0 package ("+" repeated, "?" optional).
MESSAGES = {
    "WorkerRegistration": "1 worker_id string, 2 role WorkerRole, 3 model_name string,"
    "4 expires_at_unix_ms uint64",
    "RegisterWorkerRequest": "1 worker WorkerRegistration, 2 ttl_seconds uint32",
    "RegisterWorkerResponse": "1 worker WorkerRegistration",
    "WeightVersion": "1 uid string, 2 model_name string, 3 idempotency_key string,"
    "4 payload_format WeightPayloadFormat, 5 base_version_id ?string, 6 expected_source_slots +string,"
    "7 layout_signature string, 8 state WeightVersionState, 9 created_at_unix_ms uint64,"
    "10 object_storage ObjectStorageSource",
    "ObjectStorageSource": "1 uri string, 2 storage_type ObjectStorageType",
    "CreateWeightVersionRequest": "1 model_name string, 2 idempotency_key string,"
    "3 payload_format WeightPayloadFormat, 4 base_version_id ?string, 5 expected_source_slots +string,"
    "6 object_storage ObjectStorageSource, 7 state WeightVersionState, 8 uid ?string",
    "CreateWeightVersionResponse": "1 version WeightVersion",
    "GetWeightVersionRequest": "1 uid string",
    "GetWeightVersionResponse": "1 version WeightVersion",
    "DeleteWeightVersionRequest": "1 uid string",
    "DeleteWeightVersionResponse": "1 version WeightVersion",
    "UpdateWeightVersionStateRequest": "1 uid string, 2 state WeightVersionState",
    "UpdateWeightVersionStateResponse": "1 version WeightVersion",
    "WeightVersionShard": "1 version_id string, 2 source_slot_id string, 3 worker_id string,"
    "4 tensor_count uint64, 5 total_bytes uint64, 6 manifest_digest string, 7 manifest_endpoint string",
    "CreateWeightVersionShardRequest": "1 shard WeightVersionShard",
    "CreateWeightVersionShardResponse": "1 shard WeightVersionShard, 2 version WeightVersion",
    "ListWeightVersionShardsRequest": "1 version_id string",
    "ListWeightVersionShardsResponse": "1 shards +WeightVersionShard",
    "DeleteWeightVersionShardRequest": "1 version_id string, 2 source_slot_id string, 3 worker_id string",
    "DeleteWeightVersionShardResponse": "1 deleted bool",
    "VersionLease": "1 lease_id string, 2 version_id string, 3 worker_id string, 4 expires_at_unix_ms uint64",
    "RegisterVersionLeaseRequest": "1 version_id string, 2 worker_id string, 3 ttl_seconds uint32",
    "RegisterVersionLeaseResponse": "1 lease VersionLease",
    "DeleteVersionLeaseRequest": "1 version_id string, 2 lease_id string, 3 worker_id string",
    "DeleteVersionLeaseResponse": "1 deleted bool",
    "GetWeightVersionShardManifestRequest": "1 version_id string, 2 source_slot_id string",
    "GetWeightVersionShardManifestResponse": "1 manifest bytes, 2 manifest_digest string",
}

ENUMS = {
    "WorkerRole": ("WORKER_ROLE_", "UNSPECIFIED TRAINER GENERATOR"),
    "WeightPayloadFormat": (
        "WEIGHT_PAYLOAD_FORMAT_",
        "UNSPECIFIED FULL_TENSOR XOR_DELTA FULL_HF_CHECKPOINT",
    ),
    "WeightVersionState": ("WEIGHT_VERSION_STATE_", "UNSPECIFIED STAGING READY RELEASING"),
    "ObjectStorageType": ("OBJECT_STORAGE_TYPE_", "UNSPECIFIED S3 AZURE GCS"),
}

RPCS = [
    "CreateWeightVersion",
    "GetWeightVersion",
    "DeleteWeightVersion",
    "UpdateWeightVersionState",
    "RegisterWorker",
    "CreateWeightVersionShard",
    "ListWeightVersionShards",
    "DeleteWeightVersionShard",
    "RegisterVersionLease",
    "DeleteVersionLease",
]

SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def test_generated_code_is_not_stale() -> None:
    done = subprocess.run(
        [sys.executable, "proto/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_message_table_is_complete() -> None:
    assert set(refit.DESCRIPTOR.message_types_by_name) == set(MESSAGES)
    assert set(refit.DESCRIPTOR.enum_types_by_name) == set(ENUMS)
    assert refit.DESCRIPTOR.package == "model_express.refit"
    assert v1.DESCRIPTOR.package == "modelexpress_rl.v1"


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_are_those_of_the_wire(name: str) -> None:
    wanted = [field.strip() for field in MESSAGES[name].split(",")]
    assert [_describe(field) for field in refit.DESCRIPTOR.message_types_by_name[name].fields] == wanted


@pytest.mark.parametrize("name", ENUMS)
def test_enum_values_are_those_of_the_wire(name: str) -> None:
    prefix, values = ENUMS[name]
    wanted = {prefix + value: number for number, value in enumerate(values.split())}
    found = refit.DESCRIPTOR.enum_types_by_name[name].values_by_name
    assert {value: found[value].number for value in found} == wanted


def test_services_are_those_of_the_wire() -> None:
    services = refit.DESCRIPTOR.services_by_name
    assert set(services) == {"RefitService", "RefitWorkerService"}
    assert [method.name for method in services["RefitService"].methods] == RPCS
    assert [method.name for method in services["RefitWorkerService"].methods] == [
        "GetWeightVersionShardManifest"
    ]
    for service in services.values():
        for method in service.methods:
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"
            assert not method.client_streaming
            assert not method.server_streaming


def _describe(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        kind = field.message_type.name
    elif field.enum_type is not None:
        kind = field.enum_type.name
    else:
        kind = SCALARS[field.type]
    mark = "+" if field.label == FieldDescriptor.LABEL_REPEATED else "?" if _is_optional(field) else ""
    return f"{field.number} {field.name} {mark}{kind}"


def _is_optional(field: FieldDescriptor) -> bool:
    return field.containing_oneof is not None
