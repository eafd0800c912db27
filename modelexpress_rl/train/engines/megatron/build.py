"""Specs from Megatron-Bridge conversion tasks.

A task says which Megatron parameter becomes which Hugging Face tensors, and its mapping's class says
how it is sharded. Tasks are duck-typed: `param_name`, `global_param_name`, `param_weight` (None where
another pipeline stage has it), `megatron_module`, and `mapping` with `hf_param` (a name, or names under
q/k/v or gate/up).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from modelexpress_rl.train.engines.megatron.placement import ParallelRanks, spec_of
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec, fail

if TYPE_CHECKING:
    import torch

_FUSED_PARTS = {"QKVMapping": ("q", "k", "v"), "GatedMLPMapping": ("gate", "up")}
_AXIS_OF_MAPPING = {
    "QKVMapping": 0,
    "GatedMLPMapping": 0,
    "ColumnParallelMapping": 0,
    "RowParallelMapping": 1,
    "ReplicatedMapping": None,
}


def build_megatron_tensor_specs(
    conversion_tasks: Iterable[Any],
    transformer_config: Any,
    tensor_parallel_size: int,
    tensor_parallel_rank: int,
    expert_tensor_parallel_size: int = 1,
    expert_tensor_parallel_rank: int = 0,
) -> tuple[MegatronTensorSpec, ...]:
    """The specs of the tensors that this rank publishes, from Megatron-Bridge's conversion tasks.

    Tasks without a weight here are skipped, so are replicated tensors on other than tensor-parallel
    rank 0, and an output layer that is tied to the embedding: tied memory is published under one name.

    Raises:
        UsageError: a rank is out of range, or a mapping isn't a plain view of the Megatron tensor
            (values or axes are changed); the message begins with the tensor's name.
    """
    ranks = ParallelRanks(
        tensor_parallel_size, tensor_parallel_rank, expert_tensor_parallel_size, expert_tensor_parallel_rank
    )
    specs: list[MegatronTensorSpec] = []
    published: set[tuple[int, tuple[int, ...]]] = set()
    for task in conversion_tasks:
        if task is None or task.param_weight is None:
            continue
        weight: torch.Tensor = task.param_weight
        name = str(getattr(task, "global_param_name", None) or task.param_name)
        memory = (weight.data_ptr(), tuple(weight.shape))
        if name.endswith("output_layer.weight") and (memory in published or _is_tied(transformer_config)):
            continue
        published.add(memory)
        spec = spec_of(name, weight, _axis(name, task), _hf_names(name, task), ranks, transformer_config)
        if spec is not None:
            specs.append(spec)
    return tuple(specs)


def _is_tied(config: Any) -> bool:
    return getattr(config, "share_embeddings_and_output_weights", False) is True


def _hf_names(name: str, task: Any) -> tuple[str, ...]:
    kind = type(task.mapping).__name__
    hf_param = task.mapping.hf_param
    parts = _FUSED_PARTS.get(kind)
    if parts is None:
        if not isinstance(hf_param, str):
            fail(name, f"{kind} must map to one Hugging Face name, got {hf_param!r}")
        return (hf_param,)
    if not isinstance(hf_param, dict) or set(hf_param) != set(parts):
        fail(name, f"{kind} must map to names under {', '.join(parts)}, got {hf_param!r}")
    return tuple(str(hf_param[part]) for part in parts)


def _axis(name: str, task: Any) -> int | None:
    """The sharded axis. A mapping class that isn't known by its exact name may change values."""
    kind = type(task.mapping).__name__
    if getattr(task.mapping, "permute_dims", None):
        fail(name, f"{kind} permutes axes {task.mapping.permute_dims}, which has no zero-copy view")
    if kind == "AutoMapping":
        return _detected_axis(name, task)
    if kind not in _AXIS_OF_MAPPING:
        known = ", ".join(["AutoMapping", *_AXIS_OF_MAPPING])
        fail(name, f"mapping {kind} isn't known to be a plain view; known are {known}")
    return _one_dimensional(_AXIS_OF_MAPPING[kind], task.param_weight)


def _detected_axis(name: str, task: Any) -> int | None:
    """What AutoMapping finds out from the module: column, row, or replicated."""
    if name.endswith(("layer_norm_weight", "layer_norm_bias")):
        return None  # a norm fused into a column-parallel layer
    module = type(getattr(task, "megatron_module", None)).__name__
    if "ColumnParallel" in module or "VocabParallel" in module:
        return 0
    if "RowParallel" in module:
        return _one_dimensional(1, task.param_weight)
    if getattr(task.param_weight, "tensor_model_parallel", False):
        return _one_dimensional(int(task.param_weight.partition_dim), task.param_weight)
    return None


def _one_dimensional(axis: int | None, weight: torch.Tensor) -> int | None:
    """The bias of a row-parallel layer is added after the reduction, so it is replicated."""
    return None if axis == 1 and weight.dim() == 1 else axis
