"""What one rank of a real trainer does that refits a `vllm serve`, whatever it trains with.

It trains, stages and publishes step after step, and rank 0 drives the server, prints its answers as JSON, and
writes the weights of the step, gathered and not by way of a publication, as a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from modelexpress_rl import (
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    TrainerEngineContext,
    WeightPayloadFormat,
    WeightVersionRef,
    WeightVersionState,
)
from tests.vllm.server import answers, install, post
from tests.vllm.trainers import MODEL

REUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Training:
    """One rank's part in a training: `step` trains, `tensors` are those to publish (None: those bound).

    `whole` is collective, and answers on rank 0 with all weights under their Hugging Face names.
    """

    context: TrainerEngineContext
    staging_mode: str
    step: Callable[[int], None]
    tensors: Callable[[], Any]
    whole: Callable[[], dict[str, torch.Tensor]]


def refit(training: Training, url: str, first: str, folder: str, steps: int) -> None:
    """Refit the server at `url` after every step; FOLDER gets each step's checkpoint, as FIRST is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    config = ModelExpressTrainerConfig(
        model_name=MODEL,
        device_id=rank,
        staging_mode=training.staging_mode,
        engine_context=training.context,
    )
    with (
        ModelExpressTrainerClient.initialize(config) as client,
        ModelExpressControlClient.connect() as control,
    ):
        if rank == 0:
            post(f"{url}/init_weight_transfer_engine", init_info={"model_name": MODEL})
        for step in range(1, steps + 1):
            training.step(step)
            version = WeightVersionRef(f"run.token:{step}")
            staged = client.stage_shard(version, tensors=training.tensors())
            slots: list[Any] = [None] * size
            dist.all_gather_object(slots, staged.source_slot_id)
            if rank == 0:
                control.create_weight_version(
                    model_name=MODEL,
                    idempotency_key=version.version_id,
                    payload_format=WeightPayloadFormat.FULL_TENSOR,
                    expected_source_slots=slots,
                    uid=version.version_id,
                )
            dist.barrier()
            staged.publish()
            dist.barrier()
            if rank == 0:
                install(url, version.version_id)
                print(json.dumps(answers(url)), flush=True)
                control.update_weight_version_state(version.version_id, WeightVersionState.RELEASING)
            dist.barrier()
            client.release_version(version)
            staged.source_reuse_ready.wait(REUSE_S)
            whole = training.whole()
            if rank == 0:
                missing, unexpected = model.load_state_dict(whole, strict=False)
                tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
                assert not unexpected, unexpected
                assert set(missing) <= set(tied), missing
                model.save_pretrained(f"{folder}/{step}")
