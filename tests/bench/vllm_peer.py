"""The `vllm` benchmark, in an environment with vLLM: `python -m tests.bench.vllm_peer MODEL ROUNDS`.

This process trains, that is: it changes every tensor before each version. A server of its own is refitted
over HTTP: by a version that is published in place, by a checkpoint of the same weights, written to a folder
and reloaded by vLLM's own `reload_weights`, after which it must answer the same, and by a version that it has
staged ahead.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from modelexpress_rl import (
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
    WeightVersionState,
)
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from tests.e2e.processes import serve
from tests.vllm.server import ENVIRONMENT, answers, post, serving

MODEL, SLOT = "bench", "bench:0"
REUSE_S = 60.0
POLL_S = 0.01
TOKENS = 2  # a big model takes its time
EXTENSION = "modelexpress_rl.inference.engines.vllm.ahead.StagesAhead"
# The sizes of Qwen2.5-0.5B, and small ones.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


class Trainer:
    """Random weights, as a version and as a checkpoint."""

    def __init__(self, shape: str, client: ModelExpressTrainerClient) -> None:
        self.config = Qwen2Config(
            **SHAPES[shape],
            tie_word_embeddings=True,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=2,
        )
        self.config.architectures = ["Qwen2ForCausalLM"]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        self.weights = {
            name: torch.empty(parameter.shape, dtype=torch.bfloat16)
            for name, parameter in model.named_parameters()
        }
        self._client = client
        self.train(0)
        client.bind_tensors(self.weights)

    def train(self, step: int) -> None:
        """Change every element."""
        torch.manual_seed(1000 + step)
        for weight in self.weights.values():
            weight.normal_(0.5 if weight.dim() == 1 else 0, 0.1)

    def write(self, folder: Path) -> None:
        """Write a checkpoint."""
        self.config.save_pretrained(folder)
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})


def refit(client: Any, control: Any, url: str, version_id: str, *, ahead: bool) -> dict[str, float]:
    """Publish a version, and have the server install it; the figures in ms."""
    began = time.perf_counter()
    control.create_weight_version(
        model_name=MODEL,
        idempotency_key=version_id,
        payload_format=WeightPayloadFormat.FULL_TENSOR,
        expected_source_slots=[SLOT],
        uid=version_id,
    )
    staged = client.stage_shard(WeightVersionRef(version_id))
    staged.publish()
    while ahead and _rpc(url, "stage_weight_version", args=[version_id]) != ["True"]:
        time.sleep(POLL_S)
    paused = time.perf_counter()
    post(f"{url}/pause?mode=keep")
    post(f"{url}/start_weight_update")
    post(f"{url}/update_weights", update_info={"version_id": version_id})
    post(f"{url}/finish_weight_update", weight_version=version_id)
    post(f"{url}/resume")
    ended = time.perf_counter()
    control.update_weight_version_state(version_id, WeightVersionState.RELEASING)
    client.release_version(WeightVersionRef(version_id))
    staged.source_reuse_ready.wait(REUSE_S)
    if ahead:
        return {"engine_pause_staged_ahead_ms": (ended - paused) * 1e3}
    return {"engine_pause_ms": (ended - paused) * 1e3, "refit_ms": (ended - began) * 1e3}


def reload(trainer: Trainer, url: str, folder: Path) -> dict[str, float]:
    """Write a checkpoint, and have the server reload it; the figures in ms."""
    began = time.perf_counter()
    trainer.write(folder)
    paused = time.perf_counter()
    post(f"{url}/pause?mode=keep")
    _rpc(url, "reload_weights", kwargs={"weights_path": str(folder)})
    post(f"{url}/resume")
    ended = time.perf_counter()
    post(f"{url}/reset_prefix_cache")
    return {"reload_pause_ms": (ended - paused) * 1e3, "reload_ms": (ended - began) * 1e3}


def _rpc(url: str, method: str, **arguments: Any) -> list[Any]:
    answer: list[Any] = post(f"{url}/collective_rpc", method=method, **arguments)["results"]
    return answer


def measure(shape: str, rounds: int, folder: Path) -> dict[str, float]:
    """Medians over the rounds, in ms; the first one is not counted."""
    seen: dict[str, list[float]] = {}
    config = ModelExpressTrainerConfig(
        model_name=MODEL, device_id=0, engine_context=PlainTrainerContext(slot_id=SLOT)
    )
    with (
        ModelExpressTrainerClient.initialize(config) as client,
        ModelExpressControlClient.connect() as control,
    ):
        trainer = Trainer(shape, client)
        trainer.write(folder / "first")
        with serving(folder / "first", 1, "--worker-extension-cls", EXTENSION) as url:
            post(f"{url}/init_weight_transfer_engine", init_info={"model_name": MODEL})
            before = answers(url, TOKENS)
            for number in range(rounds + 1):
                trainer.train(number + 1)
                figures = refit(client, control, url, f"bench-{number}", ahead=False)
                ours = answers(url, TOKENS)
                figures |= reload(trainer, url, folder / "reloaded")
                if ours != answers(url, TOKENS):
                    raise AssertionError(f"version {number} is answered otherwise than its checkpoint")
                if ours == before:
                    raise AssertionError(f"version {number} is answered as the one before it")
                trainer.train(-number - 1)
                figures |= refit(client, control, url, f"bench-{number}-ahead", ahead=True)
                before = answers(url, TOKENS)
                if ours == before:
                    raise AssertionError(f"version {number}, staged ahead, is answered as the one before it")
                for name, figure in figures.items():
                    seen.setdefault(name, []).append(figure)
    return {name: statistics.median(values[1:]) for name, values in seen.items()}


def main(shape: str, rounds: int) -> None:
    os.environ |= ENVIRONMENT
    with serve() as (_, address), tempfile.TemporaryDirectory() as folder:
        os.environ["MODEL_EXPRESS_URL"] = address
        print(json.dumps(measure(shape, rounds, Path(folder))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
