"""Tiny random checkpoints of models that vLLM serves, and the weights of each step."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
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
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}


def model(kind: str, step: int) -> torch.nn.Module:
    """The model of a step: `kind` is llama, qwen3 or qwen3-moe, with `-tied` behind it for a tied head."""
    name, tied = kind.removesuffix("-tied"), kind.endswith("-tied")
    torch.manual_seed(1000 + step)
    shape = {**_SHAPE, "tie_word_embeddings": tied}
    if name == "llama":
        made = LlamaForCausalLM(LlamaConfig(**shape))
    elif name == "qwen3":
        made = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **_EXPERTS, head_dim=32))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    return made.to(torch.bfloat16)


def write(folder: Path, kind: str, step: int) -> Path:
    """Write the step's checkpoint; answers its folder."""
    where = folder / f"{kind}-{step}"
    model(kind, step).save_pretrained(where)
    return where


def published(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by their names in the file: what a trainer publishes."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found
