"""Specs from a Megatron-core model's own parameters, where Megatron-Bridge isn't installed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from modelexpress_rl.train.engines.megatron.hf_naming import HfNaming, resolve_naming
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron
from modelexpress_rl.train.engines.megatron.placement import ParallelRanks, is_expert, spec_of
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec, fail

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(
    r"(\.experts\.local_experts\.)(\d+)(\.)|(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$"
)
_LEGACY_GROUPED = re.compile(r"\.experts\.weight[12]$")
_COLUMN = re.compile(r"(linear_qkv|linear_fc1|word_embeddings|output_layer)\.(weight|bias)\d*$")
_ROW = re.compile(r"(linear_proj|linear_fc2)\.weight\d*$")


def build_megatron_tensor_specs_from_model(
    model: Any,
    *,
    tensor_parallel_size: int | None = None,
    tensor_parallel_rank: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    expert_tensor_parallel_rank: int | None = None,
    hf_naming: str | HfNaming = "llama",
) -> tuple[MegatronTensorSpec, ...]:
    """The specs of the tensors that this rank publishes, from a `GPTModel` (or its virtual stages).

    Sizes and ranks that are None come from megatron's parallel state. Layers are numbered globally
    over pipeline stages, experts over expert-parallel ranks. Replicated tensors are left to
    tensor-parallel rank 0; an output layer that is tied to the embedding is left out, since its bytes
    are published as the embedding. Wrappers (DDP, Float16Module) are looked through.

    Raises:
        UsageError: megatron-core is needed and missing, a parameter has no Hugging Face name, or it is
            sharded in a way that has no zero-copy view; the message begins with the parameter's name.
    """
    ranks = _parallel_ranks(
        tensor_parallel_size, tensor_parallel_rank, expert_tensor_parallel_size, expert_tensor_parallel_rank
    )
    naming = resolve_naming(hf_naming)
    specs: list[MegatronTensorSpec] = []
    for chunk in _chunks(model):
        for name, parameter in _global_parameters(chunk):
            if name == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", False):
                continue
            _check_norm(name, chunk.config)
            axis = _axis(name, parameter, ranks)
            hf_names = _hf_names(name, naming, chunk.config)
            spec = spec_of(name, parameter, axis, hf_names, ranks, chunk.config)
            if spec is not None:
                specs.append(spec)
    return tuple(specs)


def _parallel_ranks(
    tp_size: int | None, tp_rank: int | None, etp_size: int | None, etp_rank: int | None
) -> ParallelRanks:
    def known(value: int | None, getter: str) -> int:
        if value is not None:
            return value
        return int(getattr(import_megatron("megatron.core.parallel_state"), getter)())

    return ParallelRanks(
        known(tp_size, "get_tensor_model_parallel_world_size"),
        known(tp_rank, "get_tensor_model_parallel_rank"),
        known(etp_size, "get_expert_tensor_parallel_world_size"),
        known(etp_rank, "get_expert_tensor_parallel_rank"),
    )


def _chunks(model: Any) -> Iterator[Any]:
    for chunk in model if isinstance(model, Sequence) else [model]:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        yield chunk


def _global_parameters(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under global names; one that two modules share comes once, under its first name."""
    modules = dict(chunk.named_modules())
    for name, parameter in chunk.named_parameters():
        yield _global_layer(_global_expert(name, modules), modules), parameter


def _global_layer(name: str, modules: dict[str, Any]) -> str:
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = modules[f"decoder.layers.{match[1]}"]
    return f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"


def _global_expert(name: str, modules: dict[str, Any]) -> str:
    if _LEGACY_GROUPED.search(name):
        fail(
            name,
            "the legacy grouped experts keep their weights transposed, which has no zero-copy Hugging "
            "Face view; use sequential experts or Transformer Engine's grouped experts",
        )
    match = _LOCAL_EXPERT.search(name)
    if match is None:
        return name
    module_name, rest = name[: match.start()], name[match.end() :]
    before, local, after = match[1] or match[4], match[2] or match[5], match[3] or ""
    expert = modules[module_name].local_expert_indices[int(local)]
    return f"{module_name}{before}{expert}{after}{rest}"


def _axis(name: str, parameter: torch.Tensor, ranks: ParallelRanks) -> int | None:
    """The axis by the layer's name, checked against what megatron noted on a dense parameter."""
    by_name = 0 if _COLUMN.search(name) else 1 if _ROW.search(name) else None
    if is_expert(name) or ranks.tp_size == 1:
        return by_name
    is_sharded = bool(getattr(parameter, "tensor_model_parallel", False))
    noted = int(parameter.partition_dim) if is_sharded else None  # type: ignore[attr-defined]
    if noted != by_name:
        fail(name, f"expected tensor-parallel axis {by_name} by its name, megatron says {noted}")
    return by_name


def _check_norm(name: str, config: Any) -> None:
    if "norm" in name and getattr(config, "layernorm_zero_centered_gamma", False):
        fail(name, "layernorm_zero_centered_gamma keeps weight - 1, which has no zero-copy Hugging Face view")


def _hf_names(name: str, naming: HfNaming, config: Any) -> tuple[str, ...]:
    hf_names = tuple(naming(name))
    is_fused_mlp = "linear_fc1" in name and len(hf_names) == 2
    if is_fused_mlp and not config.gated_linear_unit:
        fail(name, f"is named as a fused gate/up {hf_names}, but the model's MLP isn't gated")
    if "linear_fc1." in name and len(hf_names) == 1 and config.gated_linear_unit and "norm" not in name:
        fail(name, f"is a fused gate/up and needs two Hugging Face names, got {hf_names}")
    return hf_names
