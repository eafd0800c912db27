"""One of the ranks of a real FSDP2 trainer that refits a `vllm serve`, with RANK and WORLD_SIZE.

`python -m tests.vllm.fsdp_rank URL FIRST FOLDER STEPS`: trains the model of the checkpoint FIRST, publishes
after every step, and rank 0 drives the server and prints its answers. FOLDER gets each step's checkpoint.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from modelexpress_rl import (
    FSDPTrainerContext,
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
    WeightVersionState,
)
from tests.vllm.trainer_process import answers, install, post
from tests.vllm.trainers import MODEL

RATE = 0.5


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step on random tokens, the same on every rank."""
    torch.manual_seed(step)
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def main(url: str, first: str, folder: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = AutoModelForCausalLM.from_pretrained(first, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = ModelExpressTrainerConfig(
        model_name=MODEL, device_id=rank, staging_mode="COPY_TO_HOST", engine_context=FSDPTrainerContext()
    )
    with (
        ModelExpressTrainerClient.initialize(config) as client,
        ModelExpressControlClient.connect() as control,
    ):
        if rank == 0:
            post(f"{url}/init_weight_transfer_engine", init_info={"model_name": MODEL})
        for step in range(1, steps + 1):
            train(model, optimizer, step)
            version_id = f"run.token:{step}"
            staged = client.stage_shard(WeightVersionRef(version_id), tensors=model.state_dict())
            slots: list[Any] = [None] * size
            dist.all_gather_object(slots, staged.source_slot_id)
            if rank == 0:
                control.create_weight_version(
                    model_name=MODEL,
                    idempotency_key=version_id,
                    payload_format=WeightPayloadFormat.FULL_TENSOR,
                    expected_source_slots=slots,
                    uid=version_id,
                )
            dist.barrier()
            staged.publish()
            dist.barrier()
            if rank == 0:
                install(url, version_id)
                print(json.dumps(answers(url)), flush=True)
                control.update_weight_version_state(version_id, WeightVersionState.RELEASING)
            dist.barrier()
            client.release_version(WeightVersionRef(version_id))
            full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            if rank == 0:
                whole.load_state_dict(full)
                whole.save_pretrained(f"{folder}/{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
