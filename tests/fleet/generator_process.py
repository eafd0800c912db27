"""A generator rank of a fleet, in a process of its own: `python -m tests.fleet.generator_process NAME`."""

from __future__ import annotations

import hashlib
import sys

import anyio
import torch

from modelexpress_rl import (
    AsyncModelExpressGeneratorClient,
    ModelExpressGeneratorConfig,
    TorchGeneratorContext,
)
from modelexpress_rl.fleet import InProcessGenerator
from tests.fleet.remote import serve_calls

MODEL = "fleet"
SIZE = 256


def digest_of(weight: torch.Tensor, bias: torch.Tensor) -> str:
    """What every byte of a model comes to."""
    return hashlib.sha256(weight.numpy().tobytes() + bias.numpy().tobytes()).hexdigest()


async def main(name: str) -> None:
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(SIZE, SIZE)})
    paused: list[bool] = []

    async def digest() -> str:
        linear = module["model"]
        return digest_of(linear.weight.detach(), linear.bias.detach())

    async def pause() -> None:
        paused.append(True)

    async def resume() -> None:
        paused.clear()

    async def is_paused() -> bool:
        return bool(paused)

    config = ModelExpressGeneratorConfig(
        engine_context=TorchGeneratorContext(module), model_name=MODEL, worker_id=name
    )
    async with (
        await AsyncModelExpressGeneratorClient.initialize(config) as client,
        InProcessGenerator(client, pause=pause, resume=resume) as generator,
    ):
        await serve_calls(generator, {"digest": digest, "is_paused": is_paused})


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
