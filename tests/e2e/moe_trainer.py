"""One of its ranks: `python -m tests.e2e.moe_trainer FOLDER RANK STEPS`.

It trains a step, saves its own parameters as they are, publishes them in place as `step-N`, and trains on
when nobody reads them any more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import torch

from modelexpress_rl import (
    AsyncModelExpressControlClient,
    AsyncModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightVersionRef,
)
from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.train.engines.megatron import MegatronTrainerContext
from tests.e2e import moe_model

MODEL = "moe"
STEP_S = 60.0


async def main(folder: Path, rank: int, steps: int) -> None:
    moe_model.initialize(folder / "ranks", rank)
    model = moe_model.build()
    optimizer = demo.build_optimizer(model)
    config = ModelExpressTrainerConfig(
        model_name=MODEL, device_id=rank, engine_context=MegatronTrainerContext(model=model)
    )
    async with (
        await AsyncModelExpressTrainerClient.initialize(config) as trainer,
        AsyncModelExpressControlClient.connect() as control,
    ):
        print(f"slot {await trainer.bind_tensors(model)}", flush=True)
        for step in range(1, steps + 1):
            loss = await anyio.to_thread.run_sync(demo.train_step, model, optimizer, step)
            whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            torch.save(whole, folder / f"step-{step}.rank-{rank}")
            with anyio.fail_after(STEP_S):
                await control.wait_for_state(
                    f"step-{step}", "STAGING", timeout=STEP_S, wait_for_creation=True
                )
                staged = await trainer.stage_shard(WeightVersionRef(f"step-{step}"))
                await staged.publish()
                print(f"published step-{step}, loss {loss:.3f}", flush=True)
                await staged.source_reuse_ready.wait()
    demo.shutdown_parallel()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
