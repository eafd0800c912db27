"""What TRL's asynchronous trainers do to sync weights, step by step, in our own words.

The main process has a `weight_transfer`: it pauses vLLM, and behind a barrier is handed an iterator over all
parameters, which gathers one after the other; the other ranks run through the same iterator for its
collectives. Behind another barrier the main process has vLLM resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class Trainer:
    """One rank; `weight_transfer` is used on the main process only."""

    def __init__(self, model: Any, weight_transfer: Any) -> None:
        self._model = model
        self.weight_transfer = weight_transfer if dist.get_rank() == 0 else None

    def begin(self) -> None:
        """Before training."""
        if self.weight_transfer is not None:
            self.weight_transfer.init_weight_transfer()

    def sync_weight(self) -> None:
        """After a step of training."""
        if self.weight_transfer is not None:
            self.weight_transfer.pause()
        dist.barrier()
        failure = None
        if self.weight_transfer is not None:
            try:
                self.weight_transfer.send_weights(self._streaming_iter())
            except Exception as error:  # noqa: BLE001 (the other ranks wait at the barrier)
                failure = error
        else:
            for _ in self._streaming_iter():
                pass
        dist.barrier()
        if self.weight_transfer is not None:
            self.weight_transfer.resume()
        if failure is not None:
            raise failure

    def end(self) -> None:
        """After training."""
        if self.weight_transfer is not None:
            self.weight_transfer.destroy()

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            yield name.removeprefix("module."), full
