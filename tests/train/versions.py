"""Weights whose every element says which version it is of, for trainers and the generators that read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SHAPES = {"up.weight": (96, 64), "down.weight": (64, 96), "norm.weight": (64,), "embed.weight": (300, 64)}
_STEP = 1_000_003


def pattern(name: str, number: int) -> np.ndarray[Any, Any]:
    """The tensor of version `number`: each element differs from that of every other version and tensor."""
    first = (list(SHAPES).index(name) * 1009 + number) * _STEP
    count = int(np.prod(SHAPES[name]))
    values = np.arange(first, first + count, dtype=np.int64) % (1 << 31)
    return values.astype(np.int32).reshape(SHAPES[name])


def patterns(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a version."""
    return {name: pattern(name, number) for name in SHAPES}


class Module(torch.nn.Module):
    """What a generator installs them into."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            part = torch.nn.Module()
            zeros = torch.zeros(shape, dtype=torch.int32)
            part.register_parameter("weight", torch.nn.Parameter(zeros, requires_grad=False))
            self.add_module(name.removesuffix(".weight"), part)

    def differing(self, number: int) -> list[str]:
        """The tensors that are not, in every element, those of version `number`."""
        return [
            name
            for name, parameter in self.named_parameters()
            if not np.array_equal(parameter.numpy(), pattern(name, number))
        ]
