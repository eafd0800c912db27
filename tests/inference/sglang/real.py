"""One rank of SGLang's own model classes: `python -m tests.inference.sglang.real FOLDER RANK RANKS`.

It needs an environment of its own, as sglang asks for CUDA builds of torch and of kernels:

    python -m venv sglang && sglang/bin/pip install torch==2.13.0 -e '.[huggingface]' pytest hypothesis
    sglang/bin/pip install torch==2.13.0 orjson pybase64 psutil uvloop setproctitle pyzmq msgspec \\
        partial-json-parser interegular einops fastapi uvicorn requests aiohttp cloudpickle pillow ipython \\
        sentencepiece prometheus-client openai python-multipart dill watchfiles loguru
    sglang/bin/pip install --no-deps sglang==0.5.23 compressed-tensors gguf torchao torch-memory-saver triton
    MX_TEST_SGLANG=sglang/bin/python python -m pytest tests/inference/sglang/test_real_classes.py
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from modelexpress_rl import SglangGeneratorContext
from modelexpress_rl.inference.engines.sglang.update import group_of_sglang
from tests.inference.capture.support import published, staged

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama, tied": ("llama", "LlamaForCausalLM", TIED),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "qwen3, tied": ("qwen3", "Qwen3ForCausalLM", TIED),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
}


def start(folder: Path, rank: int, ranks: int) -> None:
    """What SGLang's scheduler does before it makes a model."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.server_args import ServerArgs
    from transformers import AutoConfig

    import tests.inference.sglang.absent  # noqa: F401  (before sglang)

    config = AutoConfig.for_model("llama", **SIZES)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / f"rank{rank}")
    arguments = ServerArgs(
        model_path=str(folder / f"rank{rank}"), device="cpu", dtype="float32", tp_size=ranks,
        skip_tokenizer_init=True, attention_backend="torch_native",
    )  # fmt: skip
    place = runtime_context.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=place)
    parallel_state.init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=rank, backend="gloo",
        distributed_init_method=f"file://{folder / 'rendezvous'}",
    )  # fmt: skip
    parallel_state.initialize_model_parallel(backend="gloo")


def checkpoint(kind: str, options: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """What a trained model of `transformers` would save."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **options))
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def made(kind: str, architecture: str, options: dict[str, Any]) -> Any:
    """SGLang's model, all sevens."""
    from transformers import AutoConfig

    module = importlib.import_module(f"sglang.srt.models.{kind}")
    model = getattr(module, architecture)(AutoConfig.for_model(kind, **SIZES, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    return model


def refit(kind: str, architecture: str, options: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Refit one model twice, and say how it then differs from one that SGLang itself loaded."""
    model = made(kind, architecture, options)
    addresses = {name: each.data_ptr() for name, each in model.named_parameters()}
    runner = types.SimpleNamespace(model=model, device="cpu")
    adapter = SglangGeneratorContext(runner, load_weights_whole=whole).create_adapter()
    differ: list[str] = []
    read = published_bytes = 0
    for seed in (1, 2):
        tensors = checkpoint(kind, options, seed)
        loader = adapter.loader(published(tensors))
        boxes = [staged(need, tensors) for need in loader.needs]
        loader.check(boxes)
        loader.install(boxes)
        reference = made(kind, architecture, options)
        reference.load_weights(iter(tensors.items()))
        differ += [
            n for n, each in reference.named_parameters() if not torch.equal(model.get_parameter(n), each)
        ]
        read = sum(box.data.size for box in boxes)
        published_bytes = sum(tensor.nbytes for tensor in tensors.values())
    moved = [name for name, each in model.named_parameters() if each.data_ptr() != addresses[name]]
    return {"differ": differ, "moved": moved, "read": read / published_bytes}


def main(folder: Path, rank: int, ranks: int) -> None:
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")
    warnings.simplefilter("ignore")
    start(folder, rank, ranks)
    assert torch.distributed.get_world_size(group_of_sglang()) == ranks
    found = {
        f"{name}{', whole' if whole else ''}": refit(*model, whole)
        for name, model in MODELS.items()
        for whole in (False, True)
    }
    print("found " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
