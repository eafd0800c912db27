"""A trainer of a job that goes on for many steps: `python -m tests.e2e.job_trainer STEPS`.

Version `step-N` holds N in every element. In place: the next step waits for the fence of this one.
"""

from __future__ import annotations

import sys

import anyio
import torch

from modelexpress_rl import (
    AsyncModelExpressControlClient,
    AsyncModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightVersionRef,
)
from modelexpress_rl.train.engines.plain import PlainTrainerContext

MODEL = "job"
STEP_S = 60.0


async def main(steps: int) -> None:
    weights = {"model.weight": torch.zeros(256, 256), "model.bias": torch.zeros(256)}
    config = ModelExpressTrainerConfig(
        model_name=MODEL, device_id=0, engine_context=PlainTrainerContext(slot_id="trainer:0")
    )
    async with (
        await AsyncModelExpressTrainerClient.initialize(config) as trainer,
        AsyncModelExpressControlClient.connect() as control,
    ):
        await trainer.bind_tensors(weights)
        print("up", flush=True)
        for step in range(1, steps + 1):
            for weight in weights.values():
                weight.fill_(step)
            name = f"step-{step}"
            with anyio.fail_after(STEP_S):
                await control.wait_for_state(name, "STAGING", timeout=STEP_S, wait_for_creation=True)
                staged = await trainer.stage_shard(WeightVersionRef(name))
                await staged.publish()
                await staged.source_reuse_ready.wait()
            print(f"reusable {name}", flush=True)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
