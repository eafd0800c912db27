"""What slime's and Miles's updates of disaggregated engines do, step by step, in our own words.

The weight updater lives on every Megatron rank. Rank 0 pauses the SGLang engines and flushes their caches;
behind a gloo barrier the ranks send; behind another, rank 0 has the engines go on. What is sent is a version:
every rank publishes its partition, and the engines read what they load.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from modelexpress_rl import (
    MegatronTrainerContext,
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
)
from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.cli.demo.reference import reference_state_dict
from tests.frameworks.actors import Remote

MODEL = "slime/policy"
REUSE_S = 60.0
SIZES: dict[str, Any] = {
    "hidden": 32, "layers": 2, "heads": 8, "kv_groups": 2, "ffn": 48, "vocab": 64, "seq": 16,
}  # fmt: skip


class WeightUpdater:
    """One Megatron rank's updater."""

    def __init__(self, server_url: str) -> None:
        self.model = demo.build_gpt(**SIZES, seed=12)
        self._optimizer = demo.build_optimizer(self.model)
        self._weight_version = 0
        self._engines: list[Any] = []
        self._staged: Any = None
        self._client = ModelExpressTrainerClient.initialize(
            ModelExpressTrainerConfig(
                engine_context=MegatronTrainerContext(model=self.model),
                model_name=MODEL,
                device_id=int(os.environ["LOCAL_RANK"]),
                server_url=server_url,
                staging_mode="COPY_TO_HOST",
            )
        )
        slots: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(slots, self._client.source_slot_id)
        self._slots = sorted(set(slots))
        self._control = ModelExpressControlClient.connect(server_url) if dist.get_rank() == 0 else None

    def connect_rollout_engines(self, engines: list[str]) -> None:
        """Rank 0 calls the engines."""
        if dist.get_rank() == 0:
            self._engines = [Remote(path) for path in engines]

    def train(self, step: int) -> dict[str, Any]:
        """One step; rank 0 answers all weights."""
        demo.train_step(self.model, self._optimizer, step)
        return reference_state_dict(self.model)

    def update_weights(self) -> dict[str, float]:
        """One update; answers its numbers."""
        self._weight_version += 1
        version = WeightVersionRef(f"slime:{self._weight_version}")
        if self._control is not None:
            for engine in self._engines:
                engine.pause_generation()
                engine.flush_cache()
            self._control.create_weight_version(
                model_name=MODEL,
                idempotency_key=version.version_id,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
                expected_source_slots=self._slots,
                uid=version.version_id,
            )
        dist.barrier()
        staged = self._client.stage_shard(version)
        staged.publish()
        dist.barrier()
        if self._control is not None:
            for engine in self._engines:
                engine.update_weights_from_modelexpress(version.version_id)
            self._control.delete_weight_version(version.version_id)
        dist.barrier()
        staged.release().wait(REUSE_S)
        if self._control is not None:
            for engine in self._engines:
                engine.continue_generation()
        dist.barrier()
        return self._client.pop_metrics()

    def close(self) -> None:
        for each in (self._client, self._control):
            if each is not None:
                each.close()
