"""Weights that every process of a test makes alike, whichever package it runs.

Whole numbers that bfloat16 holds exactly; every tensor differs between any two steps below 64.
"""

from __future__ import annotations

import torch

SHAPES = {
    "gate.weight": (48, 32),
    "up.weight": (48, 32),
    "down.weight": (32, 48),
    "down.bias": (32,),
    "norm.weight": (32,),
}


def weights(step: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a step, by name."""
    made = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        count = torch.Size(shape).numel()
        values = (torch.arange(count) * 7 + step * 4 + number * 29) % 256 - 128
        made[name] = values.to(torch.bfloat16).reshape(shape)
    return made


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
