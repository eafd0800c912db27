"""Tiny random checkpoints of models that vLLM serves, and the weights of each step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One KV head, of which each of two ranks has the whole.
_EXPERTS = {
    "num_key_value_heads": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
# As llm-compressor writes it: weights by output channel, activations by token.
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def model(kind: str, step: int) -> torch.nn.Module:
    """The model of a step: `kind` is llama, qwen2, qwen3 or qwen3-moe, with `-tied` for a tied head."""
    name, tied = kind.removesuffix("-tied").removesuffix("-int8"), kind.endswith("-tied")
    torch.manual_seed(1000 + step)
    shape = {**_SHAPE, "tie_word_embeddings": tied}
    if name == "llama":
        made = LlamaForCausalLM(LlamaConfig(**shape))
    elif name == "qwen2":
        made = Qwen2ForCausalLM(Qwen2Config(**shape))
    elif name == "qwen3":
        made = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(shape | _EXPERTS), head_dim=32))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return made.to(torch.bfloat16)


def write(folder: Path, kind: str, step: int) -> Path:
    """Write the step's checkpoint, quantized where `kind` ends in `-int8`; answers its folder."""
    where = folder / f"{kind}-{step}"
    model(kind, step).save_pretrained(where)
    if kind.endswith("-int8"):
        _quantize(where)
    return where


def _quantize(where: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    given = json.loads((where / "config.json").read_text())
    for layer in range(given["num_hidden_layers"]):
        scale = torch.empty(1).uniform_(0.5, 1.5)
        tensors[f"model.layers.{layer}.self_attn.q_scale"] = scale
    for name, tensor in published(where).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (tensor.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    (where / "config.json").write_text(json.dumps({**given, "quantization_config": _INT8}))


def published(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by their names in the file: what a trainer publishes."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found
