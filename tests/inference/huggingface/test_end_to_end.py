"""Models of `transformers` that train refit models that generate, by the public clients, over NIXL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("nixl")

from transformers.core_model_loading import revert_weight_conversion

from modelexpress_rl import (
    FSDPTrainerContext,
    ModelExpressControlClient,
    ModelExpressGeneratorClient,
    ModelExpressGeneratorConfig,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
)
from modelexpress_rl.inference.engines.huggingface import HuggingFaceGeneratorContext
from tests.e2e.processes import serve
from tests.inference.huggingface.test_models import MODELS, logits, made

pytestmark = pytest.mark.heavy
STEPS = 2
CASES = ["llama", "llama, tied", "qwen3, tied", "qwen3_moe"]


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A control plane as a process of its own."""
    with serve() as (_, address):
        yield address


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize("published_as", ["it is", "a checkpoint"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_model_that_trains(
    name: str, published_as: str, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    kind, options = MODELS[name]
    trained, serving = made(kind, options, 1), made(kind, options, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    model_name = f"{name} as {published_as}"

    def as_checkpoint(tensors: dict[str, Any]) -> dict[str, Any]:
        return dict(revert_weight_conversion(trained, tensors))

    convert = as_checkpoint if published_as == "a checkpoint" else None
    context = FSDPTrainerContext(tensors=trained, wire_dtype=None, convert_native_to_hf=convert)
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(
            ModelExpressTrainerClient.initialize(
                ModelExpressTrainerConfig(
                    model_name=model_name, device_id=0, server_url=server_url, engine_context=context
                )
            )
        )
        generator = stack.enter_context(
            ModelExpressGeneratorClient.initialize(
                ModelExpressGeneratorConfig(
                    engine_context=HuggingFaceGeneratorContext(serving),
                    model_name=model_name,
                    server_url=server_url,
                )
            )
        )
        control = stack.enter_context(ModelExpressControlClient.connect(server_url))
        addresses = {each: parameter.data_ptr() for each, parameter in serving.named_parameters()}
        before = logits(serving)
        for step in range(STEPS):
            train(trained, optimizer, step)
            version = control.create_weight_version(
                model_name, f"{model_name} {step}", WeightPayloadFormat.FULL_TENSOR, [trainer.source_slot_id]
            )
            staged = trainer.stage_shard(WeightVersionRef(version.version_id))
            staged.publish()
            assert torch.equal(logits(serving), before)
            generator.apply_weight(generator.stage_weight(version.ref))
            control.delete_weight_version(version.version_id)
            staged.release().wait(30.0)
            fresh = made(kind, options, 3)
            fresh.load_state_dict(trained.state_dict())
            before = logits(serving)
            assert torch.equal(before, logits(fresh))
        assert {each: parameter.data_ptr() for each, parameter in serving.named_parameters()} == addresses
