"""A generator of that job: `python -m tests.e2e.job_generator STEPS`; it looks at every element."""

from __future__ import annotations

import sys

import anyio
import torch

from modelexpress_rl import (
    AsyncModelExpressGeneratorClient,
    ModelExpressGeneratorConfig,
    ReadinessMonitor,
    TorchGeneratorContext,
    WeightVersionRef,
)
from modelexpress_rl.errors import TryAgainError
from tests.e2e.job_trainer import MODEL, STEP_S

ATTEMPTS = 5


async def main(steps: int) -> None:
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(256, 256)})
    config = ModelExpressGeneratorConfig(engine_context=TorchGeneratorContext(module), model_name=MODEL)
    async with (
        await AsyncModelExpressGeneratorClient.initialize(config) as generator,
        ReadinessMonitor.connect() as monitor,
    ):
        print("up", flush=True)
        for step in range(1, steps + 1):
            with anyio.fail_after(STEP_S):
                await monitor.wait_until_ready(f"step-{step}", timeout_s=STEP_S)
                await _refit(generator, f"step-{step}")
            wrong = sum(int((parameter != step).sum()) for parameter in module.parameters())
            print(f"serving {generator.serving_version_id} wrong {wrong}", flush=True)


async def _refit(generator: AsyncModelExpressGeneratorClient, name: str) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            staged = await generator.stage_weight(WeightVersionRef(name))
            await generator.apply_weight(staged)
            return
        except TryAgainError as error:
            print(f"again {name}: {type(error).__name__}: {error}", flush=True)
            if attempt == ATTEMPTS:
                raise


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
