"""One of the ranks of a real Megatron trainer, tensor parallel, that refits a `vllm serve`.

`python -m tests.vllm.megatron_rank URL FIRST FOLDER STEPS`, with RANK and WORLD_SIZE: trains a model like
that of the checkpoint FIRST; see `rank`. In place: nothing trains while vLLM reads.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from modelexpress_rl import MegatronTrainerContext
from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.cli.demo.reference import reference_state_dict
from tests.vllm.megatron_model import build
from tests.vllm.prompts import PROMPTS
from tests.vllm.rank import Training, refit

SEQ = 32
TOLERANCE = 0.05


def main(url: str, first: str, folder: str, steps: int) -> None:
    demo.initialize_parallel()
    model = build(AutoConfig.from_pretrained(first), SEQ)
    optimizer = demo.build_optimizer(model)

    training = Training(
        MegatronTrainerContext(model=model),
        "IN_PLACE",
        lambda step: print(f"loss {demo.train_step(model, optimizer, step):.3f}", flush=True),
        lambda: None,
        lambda: reference_state_dict(model),
    )
    refit(training, url, first, folder, steps)
    compare(model, f"{folder}/{steps}")
    demo.shutdown_parallel()


def compare(model: object, checkpoint: str) -> None:
    """What was trained is the model that the checkpoint is: it computes the same."""
    tokens = torch.tensor([PROMPTS[-1][:SEQ]])
    own = demo.logits(model, tokens)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    if dist.get_rank() == 0:
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(tokens).logits
        error = (torch.cat(parts, dim=-1).float() - theirs).norm() / theirs.norm()
        assert error < TOLERANCE, f"logits differ by {error:.3f} of their norm"


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
