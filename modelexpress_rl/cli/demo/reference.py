"""The plain conversion of a Megatron model to Hugging Face tensors: gather everything, then slice.

It shares no code with the aliases on purpose, since it is what proves them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron

_COLUMN_LAYERS = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
_ROW_LAYERS = ("linear_proj", "linear_fc2")


def reference_state_dict(model: Any) -> dict[str, torch.Tensor]:
    """The whole model as Hugging Face name -> contiguous CPU tensor, on tensor-parallel rank 0.

    Collective over the tensor-parallel ranks, the others get an empty dict. An output layer that is tied
    to the embedding has no name of its own.
    """
    hf: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        shards = _gather(parameter.detach())
        if shards:
            hf.update(_convert(name, shards, model.config))
    return {name: tensor.contiguous().clone() for name, tensor in hf.items()}


def _gather(local: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of every tensor-parallel rank, in rank order, on rank 0; nothing on the others."""
    parallel_state = import_megatron("megatron.core.parallel_state")
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, local.contiguous(), group=group)
    return shards if dist.get_rank(group) == 0 else []


def _convert(name: str, shards: list[torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    layer_name = name.split(".")[-2]
    if layer_name == "linear_fc1":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        prefix = _layer(name) + "mlp."
        return {
            prefix + "gate_proj.weight": torch.cat([gate for gate, _ in halves]),
            prefix + "up_proj.weight": torch.cat([up for _, up in halves]),
        }
    if layer_name == "linear_qkv":
        return _convert_qkv(_layer(name) + "self_attn.", torch.cat(shards), config)
    if layer_name in _COLUMN_LAYERS:
        return {_plain_name(name): torch.cat(shards, dim=0)}
    if layer_name in _ROW_LAYERS:
        return {_plain_name(name): torch.cat(shards, dim=1)}
    for other in shards[1:]:
        if not torch.equal(other, shards[0]):
            raise AssertionError(f"{name}: a replicated parameter differs between tensor-parallel ranks")
    return {_plain_name(name): shards[0]}


def _convert_qkv(prefix: str, fused: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    groups, head_dim = config.num_query_groups, config.kv_channels
    heads = fused.view(groups, config.num_attention_heads // groups + 2, head_dim, -1)
    return {
        prefix + "q_proj.weight": heads[:, :-2].reshape(-1, fused.shape[1]),
        prefix + "k_proj.weight": heads[:, -2].reshape(-1, fused.shape[1]),
        prefix + "v_proj.weight": heads[:, -1].reshape(-1, fused.shape[1]),
    }


def _layer(name: str) -> str:
    return f"model.layers.{name.split('.')[2]}."


def _plain_name(name: str) -> str:
    match name.split("."):
        case ["embedding", "word_embeddings", kind]:
            return f"model.embed_tokens.{kind}"
        case ["embedding", "position_embeddings", kind]:
            return f"model.embed_positions.{kind}"
        case ["output_layer", kind]:
            return f"lm_head.{kind}"
        case ["decoder", "final_layernorm", kind]:
            return f"model.norm.{kind}"
        case ["decoder", "layers", _, "input_layernorm", kind]:
            return f"{_layer(name)}input_layernorm.{kind}"
        case ["decoder", "layers", _, "pre_mlp_layernorm", kind]:
            return f"{_layer(name)}post_attention_layernorm.{kind}"
        case ["decoder", "layers", _, "self_attention", "linear_proj", kind]:
            return f"{_layer(name)}self_attn.o_proj.{kind}"
        case ["decoder", "layers", _, "mlp", "linear_fc2", kind]:
            return f"{_layer(name)}mlp.down_proj.{kind}"
    raise AssertionError(f"{name}: the demo's model has no such parameter")
