"""Prints the parameters of everything public, as JSON; run with the Python of either package.

    python tests/interop/signatures.py

An instance's attributes, and what only an engine's adapter is asked, are not among it.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

NAMES = [
    "ModelExpressControlClient",
    "ModelExpressGeneratorClient",
    "ModelExpressTrainerClient",
    "ModelExpressGeneratorConfig",
    "ModelExpressTrainerConfig",
    "FSDPTrainerContext",
    "MegatronTrainerContext",
    "ObjectStorageConfig",
    "ObjectStorageGeneratorConfig",
    "ObjectStorageSource",
    "SglangGeneratorContext",
    "VllmGeneratorContext",
    "WeightVersion",
    "WeightVersionRef",
]
ELSEWHERE = {
    "modelexpress_rl.train.adapter": ["WeightVersionShardManifest"],
    "modelexpress_rl.train.engines.megatron": ["MegatronTensorSpec", "build_megatron_tensor_specs"],
}
ENUMERATIONS = [
    "TrainerStagingMode",
    "WeightPayloadFormat",
    "WeightSource",
    "WeightVersionState",
    "ObjectStorageType",
]


def parameters(value: Any) -> list[tuple[str, bool, bool]]:
    """Name, whether it may be given by position, whether it may be left out."""
    return [
        (each.name, "POSITIONAL" in each.kind.name, each.default is not each.empty)
        for each in inspect.signature(value).parameters.values()
    ]


def public() -> Iterator[tuple[str, Any]]:
    """Everything public by its name."""
    package = importlib.import_module("modelexpress_rl")
    yield from ((name, getattr(package, name)) for name in NAMES)
    for module, names in ELSEWHERE.items():
        yield from ((f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in names)


def main() -> None:
    found: dict[str, Any] = {}
    for name, value in public():
        if not name.endswith("Client"):  # which are made by their class methods
            found[name] = parameters(value)
        if inspect.isclass(value):
            for member, function in inspect.getmembers(value, callable):
                if not member.startswith("_"):
                    found[f"{name}.{member}"] = parameters(function)
    package = importlib.import_module("modelexpress_rl")
    found |= {name: {each.name: each.value for each in getattr(package, name)} for name in ENUMERATIONS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
