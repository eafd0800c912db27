"""From global Megatron parameter names to Hugging Face names, Llama and Qwen style."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelexpress_rl.errors import UsageError

HfNaming = Callable[[str], tuple[str, ...]]
"""Takes a Megatron name with global layer and expert numbers, gives the names of a spec's `hf_names`:
(q, k, v) for a fused QKV, (gate, up) for a fused gate/up, one name otherwise.
"""

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "embedding.position_embeddings.weight": "model.embed_positions.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_layernorm.bias": "model.norm.bias",
    "output_layer.weight": "lm_head.weight",
}

# Below `decoder.layers.N.`; the norms of Transformer Engine's fused layers lie inside the linear layer.
_LAYER = {
    "input_layernorm": ("input_layernorm",),
    "self_attention.linear_qkv.layer_norm": ("input_layernorm",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1.layer_norm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_expert.down_proj",),
    "mlp.shared_experts.gate": ("mlp.shared_expert_gate",),
}
_EXPERT = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}

_LAYER_PARAMETER = re.compile(r"decoder\.layers\.(\d+)\.(.+?)[._](weight|bias)")
_SEQUENTIAL_EXPERT = re.compile(
    r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)"
)
_GROUPED_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


def llama_names(megatron_name: str) -> tuple[str, ...]:
    """Hugging Face names in the Llama, Qwen2/3 and Qwen2/3-MoE style; fused tensors give several.

    Raises:
        UsageError: the style has no name for it; the message begins with the Megatron name.
    """
    if megatron_name in _TOP:
        return (_TOP[megatron_name],)
    if match := _SEQUENTIAL_EXPERT.fullmatch(megatron_name):
        layer, expert, linear, kind = match.groups()
        return _expert_names(layer, expert, linear, kind)
    if match := _GROUPED_EXPERT.fullmatch(megatron_name):
        layer, linear, kind, expert = match.groups()
        return _expert_names(layer, expert, linear, kind)
    if (match := _LAYER_PARAMETER.fullmatch(megatron_name)) and match[2] in _LAYER:
        return tuple(f"model.layers.{match[1]}.{hf}.{match[3]}" for hf in _LAYER[match[2]])
    raise UsageError(
        f"{megatron_name}: no Hugging Face name in the llama style; give hf_naming a function that names it"
    )


def _expert_names(layer: str, expert: str, linear: str, kind: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.mlp.experts.{expert}.{hf}.{kind}" for hf in _EXPERT[linear])


_STYLES: dict[str, HfNaming] = {"llama": llama_names, "qwen": llama_names}


def resolve_naming(naming: str | HfNaming) -> HfNaming:
    """The naming function of a style's name, or the function itself.

    Raises:
        UsageError: there is no such style.
    """
    if callable(naming):
        return naming
    if naming not in _STYLES:
        raise UsageError(f"hf_naming must be one of {', '.join(_STYLES)} or a function, got {naming!r}")
    return _STYLES[naming]
