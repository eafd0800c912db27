"""What a trainer client is told: `ModelExpressTrainerConfig`, and the context that names its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from statemachines.back_pressure import BackPressure

if TYPE_CHECKING:
    from modelexpress_rl.object_storage import ObjectStorageConfig
    from modelexpress_rl.train.adapter import TrainerEngineAdapter
    from modelexpress_rl.version import WeightPayloadFormat

__all__ = [
    "BackPressure",
    "ModelExpressTrainerConfig",
    "TrainerEngineContext",
    "TrainerOverlap",
    "TrainerStagingMode",
]


class TrainerStagingMode(StrEnum):
    """Where the published bytes lie.

    IN_PLACE lends the trainer's own tensors: nothing may write them until `source_reuse_ready`. The
    copy modes copy them, so that training goes on at `publish_ready`. WRITE_TO_STORAGE uploads them.
    """

    UNSPECIFIED = "UNSPECIFIED"
    IN_PLACE = "IN_PLACE"
    COPY_TO_DEVICE = "COPY_TO_DEVICE"
    COPY_TO_HOST = "COPY_TO_HOST"
    WRITE_TO_STORAGE = "WRITE_TO_STORAGE"


class TrainerOverlap(StrEnum):
    """What of a publication goes on by itself once `publish_version` has returned.

    NONE: nothing; it returns once the control plane has confirmed the version, as in 0.7. PUBLISH: the
    announcement; it returns once the copy is made. CAPTURE: the copy, too; it returns at once, and the
    trainer may write its weights again when `weights_free` completes.
    """

    NONE = "NONE"
    PUBLISH = "PUBLISH"
    CAPTURE = "CAPTURE"


class TrainerEngineContext(ABC):
    """Which engine trains, and what its adapter must know.

    The adapter is built at the first tensor operation, not when the client is: process groups may not
    exist before.
    """

    @abstractmethod
    def create_adapter(self) -> TrainerEngineAdapter:
        """Build the engine's adapter."""


@dataclass(frozen=True, slots=True)
class ModelExpressTrainerConfig:
    """How one trainer rank publishes; everything is optional, and the environment fills gaps.

    `device_id` is the device index (`LOCAL_RANK` where None). `agent_name` names the NIXL agent and
    must be unique in the job; `worker_id` names this process's life. Both are made where None.
    `registration_ttl_seconds` is whole seconds. `process_group` and `object_storage` belong to
    WRITE_TO_STORAGE. `topology` labels where this process runs (`MX_TOPOLOGY` where None): generators
    prefer replicas that share theirs. `column_blocks` (`MX_TRAINER_COLUMN_BLOCKS` where None) is for the
    copy modes: in how many blocks of columns row-parallel weights are stored, or which tensors by patterns
    of their names: the least common multiple of the readers' tensor-parallel sizes. Where neither is given,
    the readers say with what they ask for which it should be, and 1 keeps tensors as they are.

    `overlap` (`MX_TRAINER_OVERLAP`, NONE) says what of a publication goes on while training does. The copy
    modes copy into `generations` of memory (`MX_TRAINER_GENERATIONS`, 2), so that a version is captured
    while others are read. `back_pressure` (`MX_TRAINER_BACK_PRESSURE`, WAIT) says what happens where readers
    hold all of them: WAIT for `staging_timeout_seconds`; SKIP the version; or GROW, which makes one more, up
    to `max_generations` (`MX_TRAINER_MAX_GENERATIONS`, twice `generations`), and then waits.

    Further bounds, in seconds: `release_grace_seconds` is how long a released publication waits for
    the orchestrator to release the version before it is retracted; `close_timeout_seconds` how long
    `close` waits for readers; `max_lease_ttl_seconds` the longest lease that a server grants which
    doesn't say; `staging_timeout_seconds` how long a capture waits for a free generation.
    """

    device_id: int | None = None
    agent_name: str | None = None
    model_name: str | None = None
    staging_mode: TrainerStagingMode | str | None = None
    payload_format: WeightPayloadFormat | str | None = None
    worker_id: str | None = None
    server_url: str | None = None
    registration_ttl_seconds: int | None = None
    rpc_timeout_seconds: float = 30.0
    process_group: Any = None
    object_storage: ObjectStorageConfig | None = None
    engine_context: TrainerEngineContext | None = None
    release_grace_seconds: float = 5.0
    close_timeout_seconds: float = 10.0
    max_lease_ttl_seconds: float = 300.0
    staging_timeout_seconds: float = 300.0
    topology: Mapping[str, str] | None = None
    column_blocks: int | Mapping[str, int] | None = None
    overlap: TrainerOverlap | str | None = None
    generations: int | None = None
    max_generations: int | None = None
    back_pressure: BackPressure | str | None = None
