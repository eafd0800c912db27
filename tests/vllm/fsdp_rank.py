"""One of the ranks of a real FSDP2 trainer that refits a `vllm serve`, with RANK and WORLD_SIZE.

`python -m tests.vllm.fsdp_rank URL FIRST FOLDER STEPS`: trains the model of the checkpoint FIRST; see `rank`.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from modelexpress_rl import FSDPTrainerContext
from tests.vllm.rank import Training, refit

RATE = 0.5


def main(url: str, first: str, folder: str, steps: int) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def train(step: int) -> None:
        torch.manual_seed(step)
        tokens = torch.randint(0, model.config.vocab_size, (2, 16))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    def whole() -> dict[str, torch.Tensor]:
        return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

    training = Training(FSDPTrainerContext(), "COPY_TO_HOST", train, model.state_dict, whole)
    refit(training, url, first, folder, steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
