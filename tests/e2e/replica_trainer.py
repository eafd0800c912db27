"""One of several trainers that hold the same: `python -m tests.e2e.replica_trainer VERSION AGENT`.

It publishes the version and stays until it is killed.
"""

from __future__ import annotations

import sys

import anyio
import numpy as np

from modelexpress_rl import AsyncModelExpressTrainerClient, ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainTrainerContext

MODEL, SLOT = "replicated", "trainer:0"
TENSORS, TENSOR_BYTES = 12, 4 << 20


def weights() -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """What every replica holds."""
    rng = np.random.default_rng(11)
    return {f"parts.{i}": rng.random(TENSOR_BYTES // 4, dtype=np.float32) for i in range(TENSORS)}


async def main(version: str, agent_name: str) -> None:
    config = ModelExpressTrainerConfig(
        model_name=MODEL,
        device_id=0,
        agent_name=agent_name,
        registration_ttl_seconds=60,
        engine_context=PlainTrainerContext(weights(), slot_id=SLOT),
    )
    async with await AsyncModelExpressTrainerClient.initialize(config) as trainer:
        await trainer.publish_version(version)
        print("published", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
