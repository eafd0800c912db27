"""A trainer's config with the environment's answers filled in, and what it refuses."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from modelexpress_rl import arguments, envs
from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import UsageError
from modelexpress_rl.object_storage import ObjectStorageConfig
from modelexpress_rl.rpc import Address, parse_addresses
from modelexpress_rl.topology import Topology
from modelexpress_rl.train.config import (
    ModelExpressTrainerConfig,
    TrainerEngineContext,
    TrainerOverlap,
    TrainerStagingMode,
)
from modelexpress_rl.version import WeightPayloadFormat
from statemachines.back_pressure import BackPressure, Limits

E = TypeVar("E", bound=StrEnum)

MAX_DEVICE_INDEX = 65_535
MAX_TTL_S = 1 << 31
MAX_GENERATIONS = 1024


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What a trainer client runs with. `engine_context` and `device_index` are None with object storage
    where they were not given."""

    model_name: str
    worker_id: str
    agent_name: str
    address: Address
    staging_mode: TrainerStagingMode
    payload_format: WeightPayloadFormat
    registration_ttl_s: int
    rpc_timeout_s: float
    release_grace_s: float
    close_timeout_s: float
    max_lease_ttl_s: float
    staging_timeout_s: float
    object_storage: ObjectStorageConfig | None
    engine_context: TrainerEngineContext | None
    device_index: int | None
    host: str
    grpc_port: int
    topology: Topology
    column_blocks: ColumnBlocks | None
    overlap: TrainerOverlap
    limits: Limits


def resolve(config: ModelExpressTrainerConfig) -> TrainerSettings:
    """Fill the gaps of a config from the environment.

    Raises:
        UsageError: a value is missing or not acceptable, or two contradict; the message names it.
    """
    url = config.server_url or envs.server_url()
    storage = config.object_storage
    mode = _enum(TrainerStagingMode, "staging_mode", config.staging_mode)
    payload = _enum(WeightPayloadFormat, "payload_format", config.payload_format)
    mode = mode or TrainerStagingMode(envs.trainer_staging_mode())
    payload = payload or envs.weight_payload_format()
    _refuse_contradictions(mode, payload, storage)
    worker_id = arguments.name("worker_id", config.worker_id or uuid.uuid4().hex[:8])
    device_index = envs.local_rank() if config.device_id is None else config.device_id
    if device_index is not None:
        arguments.whole("device_id", device_index, 0, MAX_DEVICE_INDEX)
    if storage is None:
        _require_for_transport(config.engine_context, device_index)
    return TrainerSettings(
        model_name=_given("model_name", config.model_name or envs.model_name(), "MODEL_NAME"),
        worker_id=worker_id,
        agent_name=arguments.name(
            "agent_name", config.agent_name or f"trainer-{worker_id}-{socket.gethostname()}"
        ),
        address=parse_addresses(url, what="server_url" if config.server_url else envs.server_url_name()),
        staging_mode=mode,
        payload_format=payload,
        registration_ttl_s=_ttl_s(config.registration_ttl_seconds),
        rpc_timeout_s=arguments.seconds("rpc_timeout_seconds", config.rpc_timeout_seconds),
        release_grace_s=arguments.seconds(
            "release_grace_seconds", config.release_grace_seconds, or_zero=True
        ),
        close_timeout_s=arguments.seconds("close_timeout_seconds", config.close_timeout_seconds),
        max_lease_ttl_s=arguments.seconds("max_lease_ttl_seconds", config.max_lease_ttl_seconds),
        staging_timeout_s=arguments.seconds("staging_timeout_seconds", config.staging_timeout_seconds),
        object_storage=storage,
        engine_context=config.engine_context,
        device_index=device_index,
        host=envs.worker_host(),
        grpc_port=envs.worker_grpc_port(device_index or 0),
        topology=envs.topology() if config.topology is None else Topology.of(config.topology),
        column_blocks=(
            envs.column_blocks() if config.column_blocks is None else ColumnBlocks.of(config.column_blocks)
        ),
        overlap=arguments.choice(
            TrainerOverlap, "overlap", envs.trainer_overlap() if config.overlap is None else config.overlap
        ),
        limits=_limits(config),
    )


def _limits(config: ModelExpressTrainerConfig) -> Limits:
    count = envs.trainer_generations() if config.generations is None else config.generations
    arguments.whole("generations", count, 1, MAX_GENERATIONS)
    most = envs.trainer_max_generations() if config.max_generations is None else config.max_generations
    most = 2 * count if most is None else arguments.whole("max_generations", most, 1, MAX_GENERATIONS)
    if most < count:
        raise UsageError(f"max_generations: expected at least generations, which is {count}, got {most}")
    policy = envs.trainer_back_pressure() if config.back_pressure is None else config.back_pressure
    return Limits(count, most, arguments.choice(BackPressure, "back_pressure", policy))


def _refuse_contradictions(
    mode: TrainerStagingMode, payload: WeightPayloadFormat, storage: ObjectStorageConfig | None
) -> None:
    to_storage = mode is TrainerStagingMode.WRITE_TO_STORAGE
    if to_storage and storage is None:
        raise UsageError("staging_mode WRITE_TO_STORAGE needs object_storage, which is not set")
    if to_storage and payload is not WeightPayloadFormat.XOR_DELTA:
        raise UsageError(f"staging_mode WRITE_TO_STORAGE needs payload_format XOR_DELTA, not {payload.value}")
    if storage is not None and not to_storage:
        raise UsageError(f"object_storage needs staging_mode WRITE_TO_STORAGE, not {mode.value}")


def _require_for_transport(context: TrainerEngineContext | None, device_index: int | None) -> None:
    if context is None:
        raise UsageError(
            "engine_context: required without object_storage, such as MegatronTrainerContext(...)"
        )
    if not isinstance(context, TrainerEngineContext):
        raise UsageError(f"engine_context: expected a TrainerEngineContext, got {type(context).__name__}")
    if device_index is None:
        raise UsageError("device_id: not set, and neither is LOCAL_RANK; give this rank's device index")


def _enum(kind: type[E], name: str, value: E | str | None) -> E | None:
    if value is None:
        return None
    member = arguments.choice(kind, name, value)
    return None if member.value == "UNSPECIFIED" else member


def _given(name: str, value: str | None, variable: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UsageError(f"{name}: not set, and neither is {variable}")
    return arguments.name(name, value)


def _ttl_s(value: float | None) -> int:
    if value is None:
        return envs.registration_ttl_s()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return arguments.whole("registration_ttl_seconds", value, 1, MAX_TTL_S)
