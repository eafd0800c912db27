"""The source slot of a Megatron rank: which partition of the model it holds.

Data-parallel replicas hold the same partition and share a slot; every other rank has its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec

SLOT_PREFIX = "megatron:partition:"


def megatron_source_slot_id(specs: Iterable[MegatronTensorSpec]) -> str:
    """The slot id of the partition that these specs describe: layout only, neither bytes nor order."""
    described = [_describe(spec) for spec in sorted(specs, key=lambda spec: spec.name)]
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return SLOT_PREFIX + hashlib.sha256(text.encode()).hexdigest()


def _describe(spec: MegatronTensorSpec) -> dict[str, object]:
    span = spec.local_shard_range
    return {
        "name": spec.name,
        "role": spec.role,
        "hf_names": list(spec.hf_names),
        "global_shape": list(spec.global_shape),
        "placement_kind": spec.placement_kind,
        "shard_axis": spec.shard_axis,
        "local_shard_range": None if span is None else list(span),
        "extras": dict(spec.extras),
    }
