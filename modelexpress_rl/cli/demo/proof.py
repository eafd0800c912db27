"""What a generator rank must hold after a refit, worked out anew from the trainer's whole weights.

It shares no code with the plan or with the mapping that installed them: chunks and concatenations only.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import nn

from modelexpress_rl.cli.demo.generator_model import GeneratorShape


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on one rank after one step.

    `wrong` names parameters whose bytes are not the reference's; `unchanged` those that are still what
    they were before the step, so that a transfer which did nothing is seen.
    """

    parameters: int
    size_bytes: int
    digest: str
    wrong: tuple[str, ...]
    unchanged: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every parameter is right, and new."""
        return not self.wrong and not self.unchanged


def prove(model: nn.Module, shape: GeneratorShape, reference: Path, before: dict[str, bytes]) -> Proof:
    """Compare every parameter byte for byte, and note its digest in `before` for the next step."""
    whole: dict[str, torch.Tensor] = torch.load(reference, weights_only=True, mmap=True)
    wrong, unchanged = [], []
    size_bytes, everything = 0, sha256()
    for name, parameter in model.named_parameters():
        held = parameter.detach()
        if not torch.equal(_bytes(held), _bytes(expected_parameter(name, whole, shape))):
            wrong.append(name)
        digest = sha256(_bytes(held).numpy().data).digest()
        if before.get(name) == digest:
            unchanged.append(name)
        before[name] = digest
        everything.update(digest)
        size_bytes += held.numel() * held.element_size()
    return Proof(len(before), size_bytes, everything.hexdigest()[:12], tuple(wrong), tuple(unchanged))


def expected_parameter(name: str, whole: dict[str, torch.Tensor], shape: GeneratorShape) -> torch.Tensor:
    """The part of the reference that this rank's parameter `name` must equal."""
    size, rank = shape.tp_size, shape.tp_rank
    if name.endswith("qkv_proj.weight"):
        kv_parts = min(size, shape.kv_heads)
        kv_rank = rank * kv_parts // size
        q, k, v = (whole[name.replace("qkv", part)] for part in "qkv")
        return torch.cat([q.chunk(size)[rank], k.chunk(kv_parts)[kv_rank], v.chunk(kv_parts)[kv_rank]])
    if name.endswith("gate_up_proj.weight"):
        gate, up = (whole[name.replace("gate_up", part)] for part in ("gate", "up"))
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return whole[name].chunk(size, dim=1)[rank]
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return whole[name].chunk(size)[rank]
    return whole[name]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
