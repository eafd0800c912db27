"""The demo's trainer rank on Megatron-core: a GPT under tensor parallelism, on the CPU over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelexpress_rl.cli.demo.model import build_gpt, build_optimizer, initialize_parallel, train_step
from modelexpress_rl.cli.demo.reference import reference_state_dict
from modelexpress_rl.train.engines.megatron import MegatronTrainerContext

SEED = 1234


class MegatronRank:
    """One tensor-parallel rank that really trains; see `trainer.Trained`."""

    def __init__(self, tensor_parallel: int, sizes: dict[str, int]) -> None:
        torch.set_num_threads(1)
        initialize_parallel(tensor_parallel)
        self._model = build_gpt(**sizes, seed=SEED)  # type: ignore[arg-type]
        self._optimizer = build_optimizer(self._model)

    def engine_context(self) -> MegatronTrainerContext:
        """Sizes and ranks come from Megatron's own parallel state."""
        return MegatronTrainerContext(model=self._model)

    def tensors(self) -> Any:
        """The model's parameters, as specs are made from them."""
        return self._model

    def step(self, step: int) -> float:
        """Forward, backward, optimizer step."""
        return train_step(self._model, self._optimizer, step)

    def save_reference(self, path: Path) -> None:
        """Gather every shard and convert, by code that shares nothing with the publication."""
        whole = reference_state_dict(self._model)
        if whole:
            torch.save(whole, path)
