"""What users configure and see: environment, versions, object storage, and their way over the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelexpress_rl import envs
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import PeerError, UsageError
from modelexpress_rl.object_storage import (
    ObjectStorageConfig,
    ObjectStorageGeneratorConfig,
    ObjectStorageSource,
    ObjectStorageType,
)
from modelexpress_rl.rpc import convert
from modelexpress_rl.version import (
    VersionState,
    WeightPayloadFormat,
    WeightSource,
    WeightVersionRef,
    WeightVersionState,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_NAME", "LOCAL_RANK", "RANK", "MODEL_EXPRESS_URL", "MX_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


DEFAULTS: list[tuple[Callable[[], Any], Any]] = [
    (envs.server_url, "localhost:8001"),
    (envs.model_name, None),
    (envs.heartbeat_interval_s, 30),
    (envs.registration_ttl_s, 90),
    (lambda: envs.worker_grpc_port(3), 0),
    (lambda: envs.metadata_port(3), 0),
    (envs.trainer_staging_mode, "IN_PLACE"),
    (envs.trainer_overlap, "NONE"),
    (envs.trainer_generations, 2),
    (envs.trainer_max_generations, None),
    (envs.trainer_back_pressure, "WAIT"),
    (envs.weight_payload_format, WeightPayloadFormat.FULL_TENSOR),
    (envs.transfer_timeout_s, 900.0),
    (envs.reshard_publish_digest, False),
    (envs.refit_timing, True),
    (envs.generator_source_order, ()),
    (envs.refit_delta_bucket_bytes, 512 * 2**20),
    (envs.refit_full_checkpoint_batch_bytes, 4 * 2**30),
    (envs.refit_checksum_format, "adler32"),
    (envs.auth_token_path, None),
    (envs.local_rank, None),
    (envs.rank, None),
]


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [read() for read, _ in DEFAULTS] == [wanted for _, wanted in DEFAULTS]
    assert 1 <= envs.refit_delta_workers() <= 32
    assert envs.worker_host()
    assert envs.s3_tuning().multipart_part_bytes == 16 * 2**20
    monkeypatch.setenv("MODEL_NAME", "  ")
    assert envs.model_name() is None


SET: list[tuple[str, str, Callable[[], Any], Any]] = [
    ("MX_SERVER_ADDRESS", "b:2", envs.server_url, "b:2"),
    ("MODEL_EXPRESS_URL", "a:1", envs.server_url, "a:1"),
    ("MX_HEARTBEAT_INTERVAL_SECS", "5", envs.registration_ttl_s, 15),
    ("MX_WORKER_HOST", "10.0.0.7", envs.worker_host, "10.0.0.7"),
    ("MX_WORKER_GRPC_PORT", "7000", lambda: envs.worker_grpc_port(2), 7002),
    ("MX_METADATA_PORT", "7000", lambda: envs.metadata_port(0), 7000),
    ("MX_TRAINER_STAGING_MODE", "copy_to_host", envs.trainer_staging_mode, "COPY_TO_HOST"),
    ("MX_TRAINER_OVERLAP", "capture", envs.trainer_overlap, "CAPTURE"),
    ("MX_TRAINER_GENERATIONS", "3", envs.trainer_generations, 3),
    ("MX_TRAINER_MAX_GENERATIONS", "5", envs.trainer_max_generations, 5),
    ("MX_TRAINER_BACK_PRESSURE", "Skip", envs.trainer_back_pressure, "SKIP"),
    ("MX_WEIGHT_PAYLOAD_FORMAT", "XOR_DELTA", envs.weight_payload_format, WeightPayloadFormat.XOR_DELTA),
    ("MX_TRANSFER_TIMEOUT", "1.5", envs.transfer_timeout_s, 1.5),
    ("MX_RESHARD_PUBLISH_DIGEST", "True", envs.reshard_publish_digest, True),
    ("MX_REFIT_TIMING", "0", envs.refit_timing, False),
    (
        "MX_GENERATOR_SOURCE_ORDER",
        "trainer, OBJECT_STORAGE",
        envs.generator_source_order,
        (WeightSource.TRAINER, WeightSource.OBJECT_STORAGE),
    ),
    ("RANK", "12", envs.rank, 12),
    ("MX_TRAINER_COLUMN_BLOCKS", "a.*=2, b=4", lambda: envs.column_blocks().rules, (("a.*", 2), ("b", 4))),
    ("MX_TRAINER_COLUMN_BLOCKS", "4", lambda: envs.column_blocks().count("h.0.o_proj.weight", 96), 4),
    ("MX_TRANSPORT_COST_FILE", "/a/b", envs.transport_cost_file, "/a/b"),
    ("XDG_CACHE_HOME", "/c", envs.transport_cost_file, "/c/modelexpress_rl/transport-cost.json"),
]


@pytest.mark.parametrize(("name", "value", "read", "wanted"), SET)
def test_a_value_is_read(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], Any], wanted: Any
) -> None:
    monkeypatch.setenv(name, value)
    assert read() == wanted


BAD: list[tuple[str, str, Callable[[], Any]]] = [
    ("MX_HEARTBEAT_INTERVAL_SECS", "0", envs.heartbeat_interval_s),
    ("MX_HEARTBEAT_INTERVAL_SECS", "soon", envs.heartbeat_interval_s),
    ("MX_WORKER_GRPC_PORT", "65535", lambda: envs.worker_grpc_port(1)),
    ("MX_METADATA_PORT", "-1", lambda: envs.metadata_port(1)),
    ("MX_TRAINER_STAGING_MODE", "FAST", envs.trainer_staging_mode),
    ("MX_TRAINER_OVERLAP", "SOME", envs.trainer_overlap),
    ("MX_TRAINER_GENERATIONS", "0", envs.trainer_generations),
    ("MX_TRAINER_MAX_GENERATIONS", "many", envs.trainer_max_generations),
    ("MX_TRAINER_BACK_PRESSURE", "DROP", envs.trainer_back_pressure),
    ("MX_WEIGHT_PAYLOAD_FORMAT", "UNSPECIFIED", envs.weight_payload_format),
    ("MX_TRANSFER_TIMEOUT", "inf", envs.transfer_timeout_s),
    ("MX_TRANSFER_TIMEOUT", "nan", envs.transfer_timeout_s),
    ("MX_RESHARD_PUBLISH_DIGEST", "maybe", envs.reshard_publish_digest),
    ("MX_GENERATOR_SOURCE_ORDER", "TRAINER,TRAINER", envs.generator_source_order),
    ("MX_GENERATOR_SOURCE_ORDER", "TRAINER,DISK", envs.generator_source_order),
    ("MX_REFIT_CHECKSUM_FORMAT", "crc32", envs.refit_checksum_format),
    ("MX_S3_MULTIPART_PART_BYTES", "1", envs.s3_tuning),
    ("LOCAL_RANK", "-1", envs.local_rank),
    ("MX_TRAINER_COLUMN_BLOCKS", "0", envs.column_blocks),
    ("MX_TRAINER_COLUMN_BLOCKS", "a=2,b", envs.column_blocks),
    ("MX_TRAINER_COLUMN_BLOCKS", "=2", envs.column_blocks),
]


@pytest.mark.parametrize(("name", "value", "read"), BAD)
def test_a_bad_value_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: Callable[[], Any]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^{name} is '{value}'; it accepts "):
        read()


@pytest.mark.parametrize("version_id", ["", "  ", None, 7])
def test_a_blank_version_is_refused(version_id: Any) -> None:
    with pytest.raises(ValueError, match="version_id"):
        WeightVersionRef(version_id)


def test_a_record_comes_back_whole() -> None:
    message = refit.WeightVersion(
        uid="run:7",
        model_name="m",
        payload_format=convert.payload_format_to_pb(WeightPayloadFormat.XOR_DELTA),
        base_version_id="run:6",
        layout_signature="l",
        state=convert.state_to_pb(WeightVersionState.READY),
        created_at_unix_ms=5,
        object_storage=convert.object_storage_to_pb(ObjectStorageSource(ObjectStorageType.S3, "s3://b/k")),
    )
    version = convert.weight_version_from_pb(message)
    assert version.ref == WeightVersionRef("run:7")
    assert version.payload_format is WeightPayloadFormat.XOR_DELTA
    assert version.base_version_id == "run:6"
    assert version.object_storage == ObjectStorageSource(ObjectStorageType.S3, "s3://b/k")
    assert version.state is WeightVersionState.READY
    assert version.expected_source_slots == ()
    message.ClearField("base_version_id")
    assert convert.weight_version_from_pb(message).base_version_id is None


@pytest.mark.parametrize("kind", [WeightPayloadFormat, WeightVersionState, VersionState, ObjectStorageType])
def test_every_enum_value_has_a_number(kind: Any) -> None:
    to_pb = {
        WeightPayloadFormat: convert.payload_format_to_pb,
        WeightVersionState: convert.state_to_pb,
        VersionState: convert.version_state_to_pb,
        ObjectStorageType: lambda value: refit.ObjectStorageType.Value(f"OBJECT_STORAGE_TYPE_{value}"),
    }[kind]
    numbers = [to_pb(value) for value in kind]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    "message",
    [
        refit.WeightVersion(state=1),  # type: ignore[arg-type]
        refit.WeightVersion(uid="v"),
        refit.WeightVersion(uid="v", state=17),  # type: ignore[arg-type]
        refit.WeightVersion(uid="v", state=1, payload_format=9),  # type: ignore[arg-type]
    ],
)
def test_a_record_of_another_build_is_a_peer_error(message: refit.WeightVersion) -> None:
    with pytest.raises(PeerError):
        convert.weight_version_from_pb(message)


def test_a_status_says_what_is_missing() -> None:
    message = v1.VersionStatus(
        version_id="v",
        state=v1.VERSION_STATE_DEGRADED,
        expected_slots=3,
        covered_slots=1,
        missing_slots=["a"],
        live_leases=2,
        reason="worker w expired",
    )
    status = convert.version_status_from_pb(message)
    assert str(status) == "v DEGRADED, 1/3 slots, 2 leases, missing a, ... (worker w expired)"
    assert status.state.wire is WeightVersionState.STAGING
    assert status.drain_deadline_unix_ms is None


def test_object_storage_is_checked() -> None:
    config = ObjectStorageConfig("S3", "s3://bucket/run/")  # type: ignore[arg-type]
    assert config.storage_type is ObjectStorageType.S3
    ObjectStorageConfig(ObjectStorageType.S3, "s3://bucket")
    for uri in ("", "s3://", "s3:///k", "s3://b//k", "s3://b/k?x", "s3://b/k#x", "gs://b/k", "/b/k"):
        with pytest.raises(UsageError, match="uri_prefix"):
            ObjectStorageConfig(ObjectStorageType.S3, uri)
    with pytest.raises(UsageError, match="only S3"):
        ObjectStorageConfig(ObjectStorageType.GCS, "s3://b/k")
    whole = ObjectStorageConfig(ObjectStorageType.S3, "s3://b/k", "v0", "/seed", "http://minio", "eu")
    assert (whole.initial_base_version_id, whole.endpoint_url, whole.region_name) == (
        "v0",
        "http://minio",
        "eu",
    )
    with pytest.raises(UsageError, match="seed_checkpoint_path must not be blank"):
        ObjectStorageConfig(ObjectStorageType.S3, "s3://b/k", "v0", " ")
    with pytest.raises(UsageError, match="refit_checkpoint_dir"):
        ObjectStorageGeneratorConfig(ObjectStorageType.S3, "v0", "/seed", "")
    with pytest.raises(UsageError, match="max_size"):
        ObjectStorageGeneratorConfig(
            ObjectStorageType.S3, "v0", "/seed", "/dir", refit_checkpoint_max_size_gb=0
        )
