"""Tensors that look like the demo's model and change like it, for machines without Megatron.

Each rank makes the whole model from one seed, so that all agree, and publishes only its part of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from modelexpress_rl.cli.demo.generator_model import GeneratorShape, generator_slices
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext

SEED = 1234


class ToyModel:
    """A tensor-parallel rank whose training adds noise to every element; see `trainer.Trained`."""

    def __init__(self, rank: int, tensor_parallel: int, sizes: dict[str, int]) -> None:
        sizes = {**sizes, "kv_heads": sizes["kv_groups"]}
        del sizes["kv_groups"]
        self._rank = rank
        self._random = torch.Generator().manual_seed(SEED)
        shape = replace(GeneratorShape(**sizes), tp_size=tensor_parallel, tp_rank=rank)  # type: ignore[arg-type]
        pieces = generator_slices(shape)
        self._whole = {p.hf_name: torch.randn(p.hf_shape, generator=self._random) for p in pieces}
        self._boxes = {p.hf_name: (p.hf_shape, p.hf_offset, p.shape) for p in pieces}
        self._parts = {name: self._part(name) for name in self._published()}

    def _published(self) -> list[str]:
        whole = {name for name, (full, _, shape) in self._boxes.items() if full == shape}
        return [name for name in self._boxes if self._rank == 0 or name not in whole]

    def _part(self, name: str) -> torch.Tensor:
        _, offset, shape = self._boxes[name]
        box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        return self._whole[name][box].clone().contiguous()

    def engine_context(self) -> PlainTrainerContext:
        """One slot per rank."""
        return PlainTrainerContext(slot_id=f"toy:tensor-parallel-rank:{self._rank}")

    def tensors(self) -> list[PlainBox]:
        """This rank's boxes of the model."""
        return [
            PlainBox(name, part, full_shape=self._boxes[name][0], offset=self._boxes[name][1])
            for name, part in self._parts.items()
        ]

    def step(self, step: int) -> float:
        """Change every element of the whole model, and copy this rank's part into what is published."""
        for name, tensor in self._whole.items():
            tensor += 0.01 * torch.randn(tensor.shape, generator=self._random)
            if name in self._parts:
                self._parts[name].copy_(self._part(name))
        return 1.0 / step

    def save_reference(self, path: Path) -> None:
        """Rank 0 has the whole model anyway."""
        if self._rank == 0:
            torch.save(self._whole, path)
