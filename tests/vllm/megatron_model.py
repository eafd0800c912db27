"""The Llama of a checkpoint's configuration as a Megatron-core GPT that trains on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron, quiet

SEED = 5
SPREAD = 0.2


class RotaryCoreAttention(demo.TorchCoreAttention):
    """The demo's attention with Llama's rotary positions, for which Megatron's own asks for a CUDA device."""

    def __init__(self, theta: float, **options: Any) -> None:
        super().__init__(**options)
        self._theta = theta

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        return super().forward(self._turned(query), self._turned(key), value, attention_mask, **options)

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        """(sequence, batch, heads, head_dim), each half of a head with the other."""
        half = heads.shape[-1] // 2
        frequencies = self._theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(len(heads), dtype=torch.float32), frequencies)[:, None, None]
        left, right = heads.float().chunk(2, dim=-1)
        turned = (
            left * angles.cos() - right * angles.sin(),
            right * angles.cos() + left * angles.sin(),
        )
        return torch.cat(turned, dim=-1).to(heads.dtype)


def build(llama: Any, seq: int) -> Any:
    """This rank's part of the model that a `LlamaConfig` describes, in bfloat16, weights its own."""
    gpt = import_megatron("megatron.core.models.gpt")
    spec_utils = import_megatron("megatron.core.transformer.spec_utils")
    shape = demo.GptShape(
        hidden=llama.hidden_size,
        layers=llama.num_hidden_layers,
        heads=llama.num_attention_heads,
        kv_groups=llama.num_key_value_heads,
        ffn=llama.intermediate_size,
        vocab=llama.vocab_size,
        seq=seq,
    )
    with quiet():
        config = replace(
            demo._transformer_config(shape, torch.bfloat16),
            layernorm_epsilon=llama.rms_norm_eps,
            init_method=None,
            init_method_std=SPREAD,
            output_layer_init_method=None,
            embedding_init_method=None,
            embedding_init_method_std=None,
        )
        spec = demo._layer_spec()
        spec.submodules.self_attention.submodules.core_attention = spec_utils.ModuleSpec(
            RotaryCoreAttention, params={"theta": llama.rope_parameters["rope_theta"]}
        )
        torch.manual_seed(SEED)
        model = gpt.GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=shape.vocab,
            max_sequence_length=shape.seq,
            share_embeddings_and_output_weights=llama.tie_word_embeddings,
            position_embedding_type="none",
        )
    return model.to(torch.bfloat16)
