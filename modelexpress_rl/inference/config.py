"""What a generator client is told: `ModelExpressGeneratorConfig`, and what the environment fills in."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelexpress_rl import arguments, envs
from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.adapter import GeneratorEngineContext
from modelexpress_rl.object_storage import ObjectStorageGeneratorConfig
from modelexpress_rl.topology import Topology
from modelexpress_rl.version import WeightSource
from statemachines.ids import ModelName, VersionId, WorkerId

DEFAULT_LEASE_TTL_S = 30
MAX_ATTEMPTS = 100
DEFAULT_IN_FLIGHT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelExpressGeneratorConfig:
    """How one generator rank refits; all but the engine is optional, and the environment fills gaps.

    `engine_context` says into what versions are installed (`TorchGeneratorContext`). `worker_id` names
    this process's life; one is made where None. TTLs are whole seconds; a lease lives 30 by default.
    `max_transfer_attempts` counts the rounds of reads for one version, the first included.
    `initial_serving_version_id` names the version that the engine holds already. `topology` labels where
    this process runs (`MX_TOPOLOGY` where None): of replicas that no one on this host has, those that share
    the most labels are read. At most `max_in_flight_bytes` are read at a time, and a source of which
    nothing arrives for `stall_timeout_seconds` is given up for a replica.
    """

    engine_context: GeneratorEngineContext | None = None
    model_name: str | None = None
    worker_id: str | None = None
    server_url: str | None = None
    registration_ttl_seconds: int | None = None
    lease_ttl_seconds: int | None = None
    max_transfer_attempts: int = 3
    max_replay_chain_length: int = 64
    rpc_timeout_seconds: float = 30.0
    object_storage: ObjectStorageGeneratorConfig | None = None
    initial_serving_version_id: str | None = None
    source_order: Sequence[WeightSource | str] | None = None
    topology: Mapping[str, str] | None = None
    max_in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES
    stall_timeout_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """A configuration with every gap filled and every value checked."""

    engine_context: GeneratorEngineContext
    model_name: ModelName
    worker_id: WorkerId
    server_url: str
    server_url_name: str
    registration_ttl_s: int
    lease_ttl_s: int
    max_transfer_attempts: int
    rpc_timeout_s: float
    transfer_timeout_s: float
    initial_serving_version_id: VersionId | None
    topology: Topology
    max_in_flight_bytes: int
    stall_timeout_s: float

    @classmethod
    def of(cls, config: ModelExpressGeneratorConfig) -> GeneratorSettings:
        """Check `config` and fill it in from the environment.

        Raises:
            UsageError: a value is missing, or not acceptable; the message names the field or variable.
        """
        if config.engine_context is None:
            raise UsageError("engine_context: expected the engine to install into, got None")
        if not hasattr(config.engine_context, "create_adapter"):
            raise UsageError(
                "engine_context: expected a context, such as TorchGeneratorContext(module), "
                f"got {arguments.shown(config.engine_context)}"
            )
        if config.object_storage is not None:
            raise UsageError("object_storage: reading versions from object storage is not implemented yet")
        model_name = config.model_name or envs.model_name()
        if model_name is None or (isinstance(model_name, str) and not model_name.strip()):
            raise UsageError("model_name: expected a name, in the configuration or in MODEL_NAME")
        arguments.name("model_name", model_name)
        _require_trainer(config.source_order)
        arguments.whole("max_replay_chain_length", config.max_replay_chain_length, 1, 1 << 20)
        worker_id = uuid.uuid4().hex[:8] if config.worker_id is None else config.worker_id
        arguments.name("worker_id", worker_id)
        initial = config.initial_serving_version_id
        if initial is not None:
            arguments.name("initial_serving_version_id", initial)
        rpc_timeout_s = float(arguments.seconds("rpc_timeout_seconds", config.rpc_timeout_seconds))
        registration_ttl_s = config.registration_ttl_seconds
        if registration_ttl_s is None:
            registration_ttl_s = envs.registration_ttl_s()
        lease_ttl_s = DEFAULT_LEASE_TTL_S if config.lease_ttl_seconds is None else config.lease_ttl_seconds
        return cls(
            engine_context=config.engine_context,
            model_name=ModelName(model_name),
            worker_id=WorkerId(worker_id),
            server_url=config.server_url or envs.server_url(),
            server_url_name="server_url" if config.server_url else envs.server_url_name(),
            registration_ttl_s=arguments.whole("registration_ttl_seconds", registration_ttl_s, 1, 1 << 31),
            lease_ttl_s=arguments.whole("lease_ttl_seconds", lease_ttl_s, 1, 1 << 31),
            max_transfer_attempts=arguments.whole(
                "max_transfer_attempts", config.max_transfer_attempts, 1, MAX_ATTEMPTS
            ),
            rpc_timeout_s=rpc_timeout_s,
            transfer_timeout_s=envs.transfer_timeout_s(),
            initial_serving_version_id=None if initial is None else VersionId(initial),
            topology=envs.topology() if config.topology is None else Topology.of(config.topology),
            max_in_flight_bytes=arguments.whole(
                "max_in_flight_bytes", config.max_in_flight_bytes, 1, 1 << 62
            ),
            stall_timeout_s=arguments.seconds("stall_timeout_seconds", config.stall_timeout_seconds),
        )


def _require_trainer(order: Sequence[WeightSource | str] | None) -> None:
    """Trainers are the only source so far: an order without them could never be served."""
    name = "MX_GENERATOR_SOURCE_ORDER" if order is None else "source_order"
    try:
        sources = [WeightSource(each) for each in (envs.generator_source_order() if order is None else order)]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name}: expected names out of {', '.join(WeightSource)}: {error}") from error
    if sources and WeightSource.TRAINER not in sources:
        raise UsageError(f"{name}: only TRAINER is implemented yet, got {', '.join(sources)}")
