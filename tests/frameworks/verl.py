"""What verl's checkpoint engine manager does to update rollouts, step by step, in our own words.

Before every update it has all workers prepare, makes their topology of what they answer, and has them join;
then actors send, from a generator that gathers one tensor after the other on every rank, while rollout
workers receive, into their engines; then all finalize.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.frameworks import verl_double

BACKEND, MODULE = "modelexpress-rl", "modelexpress_rl.frameworks.verl"
MODEL = "verl/policy"


def engine(server_url: str, **named: Any) -> Any:
    """What a worker makes: the backend's module is imported by its name, the engine made by the backend's."""
    verl_double.install()
    importlib.import_module(MODULE)
    return verl_double.CheckpointEngineRegistry.new(
        BACKEND, bucket_size=2 << 30, model_name=MODEL, server_url=server_url, **named
    )


class Actor:
    """One rank that trains."""

    def __init__(self, server_url: str, model: Any, rank: int) -> None:
        self._engine = engine(server_url, is_master=rank == 0)
        self._model = model

    def execute(self, method: str, arguments: dict[str, Any]) -> Any:
        """A call of the engine."""
        return getattr(self._engine, method)(**arguments)

    def update_weights(self, global_steps: int) -> Any:
        """Send."""
        return asyncio.run(self._engine.send_weights(self._per_tensor(), global_steps=global_steps))

    def _per_tensor(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Rollout:
    """One worker beside an inference engine; `leaves_after` has it stop after so many tensors, once."""

    def __init__(self, server_url: str, model: Any) -> None:
        self.engine = engine(server_url)
        self.model = model
        self.leaves_after: int | None = None

    async def update_weights(self, global_steps: int) -> None:
        """Receive, and load what comes."""
        stream = self.engine.receive_weights(global_steps=global_steps)
        parameters, count = self.model.state_dict(), 0
        leaves_after, self.leaves_after = self.leaves_after, None
        try:
            async for name, tensor in stream:
                if count == leaves_after:
                    raise RuntimeError("the engine's worker died")
                parameters[name].copy_(tensor)
                count += 1
        finally:
            await stream.aclose()
        assert count == len(parameters)


class Manager:
    """The driver; `actors(method, ...)` calls every actor, `begin` and `end` are its halves."""

    def __init__(
        self, actors: Callable[..., list[Any]], begin: Callable[..., None], end: Callable[[], list[Any]],
        rollouts: list[Rollout],
    ) -> None:  # fmt: skip
        self._actors, self._begin, self._end, self._rollouts = actors, begin, end, rollouts

    def update_weights(self, global_steps: int) -> list[dict[str, float]]:
        """One update; answers the actors' metrics."""
        metadata = self._actors("execute", "prepare", {})
        size = len(metadata)
        metadata += [rollout.engine.prepare() for rollout in self._rollouts]
        backend = verl_double.CheckpointEngineRegistry.engines[BACKEND]
        of_actors, of_rollouts = backend.build_topology(size, len(self._rollouts), metadata)
        assert all(len(values) == size for values in of_actors.values())
        for rank, rollout in enumerate(self._rollouts):
            rollout.engine.init_process_group(**{name: each[rank] for name, each in of_rollouts.items()})
        self._actors("join", of_actors)
        self._begin("update_weights", global_steps)
        received = asyncio.run(self._received(global_steps))
        metrics = self._end()
        for error in received:
            if error is not None:
                raise error
        for rollout in self._rollouts:
            rollout.engine.finalize()
        self._actors("execute", "finalize", {})
        return metrics

    async def _received(self, global_steps: int) -> list[BaseException | None]:
        updates = [rollout.update_weights(global_steps) for rollout in self._rollouts]
        return await asyncio.gather(*updates, return_exceptions=True)
