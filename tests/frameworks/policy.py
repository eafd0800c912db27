"""The model of the FSDP2 trainers, a tiny Qwen3 with a tied head, and what a generator of it must compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WIRE = torch.bfloat16


def made(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The model, random."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3", **{**SIZES, **options})
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Trained:
    """One rank's part of the model under FSDP2, and its optimizer."""

    def __init__(self, ranks: int) -> None:
        self.model = made(1)
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, number: int) -> None:
        """One step of training."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(SIZES["vocab_size"], (2, 12), generator=generator)
        self._optimizer.zero_grad()
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()

    def whole(self) -> dict[str, torch.Tensor]:
        """All weights, as torch itself gathers them; collective."""
        return {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in self.model.state_dict().items()
        }


def logits(model: Any) -> torch.Tensor:
    """What the model says to some tokens."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(9)[None]).logits
    return found


def assert_computes(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """The model is the fresh one with these weights."""
    fresh = made(99, next(iter(model.parameters())).dtype)
    fresh.load_state_dict(dict(weights))
    assert torch.equal(logits(model), logits(fresh))
