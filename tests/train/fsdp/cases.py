"""The models of the real ranks, their conversions, and what a reference is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

STEPS = 3
HIDDEN, VOCABULARY, HEADS = 8, 11, (8, 4, 4)
SEED = 5
COPY_MODES = ("COPY_TO_HOST", "COPY_TO_DEVICE")


class Block(nn.Module):
    """Fused projections, a norm, and what isn't floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, sum(HEADS))
        self.out = nn.Linear(HEADS[0], HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).split(HEADS, -1)
        hidden = hidden + self.out(q * torch.cat([k, v], -1))
        gate, up = self.gate_up.unbind()
        if self.training:
            self.calls += 1
            self.mask ^= True
        return hidden + functional.silu(hidden @ gate) * (hidden @ up)


class Model(nn.Module):
    """Rows that don't divide by the ranks (11 and 1), and a scalar-like head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).clone()  # FSDP2 warns of views as a result


def to_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fused rows to their parts, and the stacked gate and up to two tensors of their own layout."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".qkv." in name:
            parts = tensor.split(HEADS)
            named |= {name.replace("qkv", f"{p}_proj"): t for p, t in zip("qkv", parts, strict=True)}
        elif name.endswith("gate_up"):
            stem = name.removesuffix("gate_up")
            named |= {f"{stem}gate.weight": tensor[0].t(), f"{stem}up.weight": tensor[1].t()}
        else:
            named[f"model.{name}"] = tensor
    return named


def cast(tensors: Mapping[str, Tensor], keep: str) -> dict[str, Tensor]:
    """Everything of floating point to bfloat16, but names with `keep`."""
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() and keep not in name else tensor
        for name, tensor in tensors.items()
    }


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, may_write: Callable[[], Any] = lambda: None
) -> float:
    """One step; the tokens differ from step to step and not from rank to rank.

    `may_write` returns once the optimizer may write the weights.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    optimizer.zero_grad()
    loss = model(tokens).square().mean()
    loss.backward()
    may_write()
    optimizer.step()
    with torch.no_grad():  # an evaluation, after which FSDP2 leaves the root's parameters gathered
        model.eval()(tokens)
        model.train()
    return float(loss.detach())


def optimizer_of(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05)
