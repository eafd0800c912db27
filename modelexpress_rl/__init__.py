"""Moves each weight version from the ranks that train to the ranks that generate.

The public names below are loaded when they are first used, so that importing the package costs nothing
and needs neither torch nor a transport.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelexpress_rl.control import AsyncModelExpressControlClient as AsyncModelExpressControlClient
    from modelexpress_rl.control import ModelExpressControlClient as ModelExpressControlClient
    from modelexpress_rl.errors import ModelExpressError as ModelExpressError
    from modelexpress_rl.fleet import Fleet as Fleet
    from modelexpress_rl.fleet import FleetAborted as FleetAborted
    from modelexpress_rl.fleet import FleetPolicy as FleetPolicy
    from modelexpress_rl.fleet import FleetUpdate as FleetUpdate
    from modelexpress_rl.inference.client import (
        AsyncModelExpressGeneratorClient as AsyncModelExpressGeneratorClient,
    )
    from modelexpress_rl.inference.client import ModelExpressGeneratorClient as ModelExpressGeneratorClient
    from modelexpress_rl.inference.config import ModelExpressGeneratorConfig as ModelExpressGeneratorConfig
    from modelexpress_rl.inference.engines.huggingface import (
        HuggingFaceGeneratorContext as HuggingFaceGeneratorContext,
    )
    from modelexpress_rl.inference.engines.sglang import SglangGeneratorContext as SglangGeneratorContext
    from modelexpress_rl.inference.engines.torch import TorchGeneratorContext as TorchGeneratorContext
    from modelexpress_rl.inference.engines.vllm import VllmGeneratorContext as VllmGeneratorContext
    from modelexpress_rl.monitor import ReadinessMonitor as ReadinessMonitor
    from modelexpress_rl.monitor import VersionEvent as VersionEvent
    from modelexpress_rl.object_storage import ObjectStorageConfig as ObjectStorageConfig
    from modelexpress_rl.object_storage import ObjectStorageGeneratorConfig as ObjectStorageGeneratorConfig
    from modelexpress_rl.object_storage import ObjectStorageSource as ObjectStorageSource
    from modelexpress_rl.object_storage import ObjectStorageType as ObjectStorageType
    from modelexpress_rl.train.client import (
        AsyncModelExpressTrainerClient as AsyncModelExpressTrainerClient,
    )
    from modelexpress_rl.train.client import ModelExpressTrainerClient as ModelExpressTrainerClient
    from modelexpress_rl.train.config import BackPressure as BackPressure
    from modelexpress_rl.train.config import ModelExpressTrainerConfig as ModelExpressTrainerConfig
    from modelexpress_rl.train.config import TrainerEngineContext as TrainerEngineContext
    from modelexpress_rl.train.config import TrainerOverlap as TrainerOverlap
    from modelexpress_rl.train.config import TrainerStagingMode as TrainerStagingMode
    from modelexpress_rl.train.engines.fsdp import FSDPTrainerContext as FSDPTrainerContext
    from modelexpress_rl.train.engines.megatron import MegatronTrainerContext as MegatronTrainerContext
    from modelexpress_rl.version import VersionState as VersionState
    from modelexpress_rl.version import VersionStatus as VersionStatus
    from modelexpress_rl.version import WeightPayloadFormat as WeightPayloadFormat
    from modelexpress_rl.version import WeightSource as WeightSource
    from modelexpress_rl.version import WeightVersion as WeightVersion
    from modelexpress_rl.version import WeightVersionRef as WeightVersionRef
    from modelexpress_rl.version import WeightVersionState as WeightVersionState
    from modelexpress_rl.version import WorkerStatus as WorkerStatus

_NAMES_OF_MODULE = {
    "control": ("AsyncModelExpressControlClient", "ModelExpressControlClient"),
    "errors": ("ModelExpressError",),
    "fleet": ("Fleet", "FleetAborted", "FleetPolicy", "FleetUpdate"),
    "inference.client": ("AsyncModelExpressGeneratorClient", "ModelExpressGeneratorClient"),
    "inference.config": ("ModelExpressGeneratorConfig",),
    "inference.engines.huggingface": ("HuggingFaceGeneratorContext",),
    "inference.engines.sglang": ("SglangGeneratorContext",),
    "inference.engines.torch": ("TorchGeneratorContext",),
    "inference.engines.vllm": ("VllmGeneratorContext",),
    "monitor": ("ReadinessMonitor", "VersionEvent"),
    "object_storage": (
        "ObjectStorageConfig",
        "ObjectStorageGeneratorConfig",
        "ObjectStorageSource",
        "ObjectStorageType",
    ),
    "train.client": ("AsyncModelExpressTrainerClient", "ModelExpressTrainerClient"),
    "train.config": (
        "BackPressure",
        "ModelExpressTrainerConfig",
        "TrainerEngineContext",
        "TrainerOverlap",
        "TrainerStagingMode",
    ),
    "train.engines.fsdp": ("FSDPTrainerContext",),
    "train.engines.megatron": ("MegatronTrainerContext",),
    "version": (
        "VersionState",
        "VersionStatus",
        "WorkerStatus",
        "WeightPayloadFormat",
        "WeightSource",
        "WeightVersion",
        "WeightVersionRef",
        "WeightVersionState",
    ),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__all__ = [*_MODULE_OF_NAME]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
