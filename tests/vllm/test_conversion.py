"""A trainer publishes under its own names and in its own layouts, as PRIME-RL's may: the context converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from modelexpress_rl import ModelExpressGeneratorClient, ModelExpressGeneratorConfig, VllmGeneratorContext
from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, greedy, worker_of
from tests.vllm.trainers import MODEL, trainer

GATE, UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"


def to_native(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up stacked, down transposed, and other names for all."""
    native: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(GATE):
            both = torch.stack([tensor, tensors[name.replace("gate_proj", "up_proj")]])
            native[name.replace(GATE, "w13").replace("model.", "net.")] = both
        elif name.endswith("down_proj.weight"):
            native[name.replace("model.", "net.")] = tensor.t().contiguous()
        elif not name.endswith(UP):
            native[name.replace("model.", "net.")] = tensor
    return native


def to_hugging_face(native: dict[str, Any]) -> dict[str, Any]:
    """The other way round."""
    tensors: dict[str, Any] = {}
    for name, tensor in native.items():
        stem = name.replace("net.", "model.")
        if name.endswith("w13"):
            tensors[stem.replace("w13", GATE)], tensors[stem.replace("w13", UP)] = tensor.unbind()
        else:
            tensors[stem] = tensor.t() if name.endswith("down_proj.weight") else tensor
    return tensors


def client_of(llm: Any, *convert: Any) -> ModelExpressGeneratorClient:
    worker = worker_of(llm)
    context = VllmGeneratorContext(worker.get_model(), worker.vllm_config, *convert)
    return ModelExpressGeneratorClient.initialize(
        ModelExpressGeneratorConfig(engine_context=context, model_name=MODEL)
    )


def test_native_tensors_are_converted_where_they_are_loaded(tmp_path: Path, control_plane: str) -> None:
    first, second = (write(tmp_path, "llama", step) for step in (0, 1))
    assert to_hugging_face(to_native(published(second))).keys() == published(second).keys()
    with engine(first) as llm:
        answers = [greedy(llm)]
        for tensors, convert in ((to_native(published(second)), [to_hugging_face]), (published(second), [])):
            with trainer(tensors) as source, client_of(llm, *convert) as client:
                client.apply_weight(client.stage_weight(source.publish(f"step-{len(answers)}", tensors)))
            llm.reset_prefix_cache()
            answers.append(greedy(llm))
    assert answers[0] != answers[1] == answers[2]
