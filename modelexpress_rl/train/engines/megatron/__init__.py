"""Capture of Megatron tensors: specs of what a rank holds, zero-copy aliases, its source slot."""

from __future__ import annotations

from modelexpress_rl.train.engines.megatron.adapter import MegatronTrainerContext
from modelexpress_rl.train.engines.megatron.aliases import HfShard, HfTensor, build_hf_aliases
from modelexpress_rl.train.engines.megatron.build import build_megatron_tensor_specs
from modelexpress_rl.train.engines.megatron.from_model import build_megatron_tensor_specs_from_model
from modelexpress_rl.train.engines.megatron.slots import megatron_source_slot_id
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec

__all__ = [
    "HfShard",
    "HfTensor",
    "MegatronTensorSpec",
    "MegatronTrainerContext",
    "build_hf_aliases",
    "build_megatron_tensor_specs",
    "build_megatron_tensor_specs_from_model",
    "megatron_source_slot_id",
]
