"""Real `transformers` models, tiny: refit from what a checkpoint of each would hold."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from modelexpress_rl.errors import GeometryError, IncompleteVersionError
from modelexpress_rl.inference.engines.huggingface import HuggingFaceGeneratorContext
from tests.inference.capture.support import published, staged, state
from tests.inference.publisher import create_version
from tests.inference.world import World, halves

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 12, "num_experts_per_tok": 2, "head_dim": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 4}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gpt2": ("gpt2", {"n_positions": 16}),
}


def made(kind: str, options: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **options})).eval()


def checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would write."""
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return {name: tensor.clone() for name, tensor in tensors.items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(8)[None]).logits
    return found


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_the_model_computes_that_was_published(name: str, whole: bool) -> None:
    kind, options = MODELS[name]
    trained, model = made(kind, options, 1), made(kind, options, 2)
    tensors, wanted = checkpoint(trained), logits(trained)
    assert not torch.equal(logits(model), wanted)
    before = state(model)
    addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
    context = HuggingFaceGeneratorContext(model, load_weights_whole=whole)
    loader = context.create_adapter().loader(published(tensors))
    boxes = [staged(need, tensors) for need in loader.needs]
    loader.check(boxes)
    assert state(model) == before
    loader.install(boxes)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == addresses
    assert torch.equal(logits(model), wanted)
    read = sum(int(np.prod(need.shape)) for need in loader.needs)
    assert read == sum(p.numel() for p in model.parameters())


def test_experts_are_read_as_they_are_published_one_by_one() -> None:
    kind, options = MODELS["qwen3_moe"]
    model = made(kind, options, 1)
    tensors = checkpoint(model)
    assert "model.layers.1.mlp.experts.11.gate_proj.weight" in tensors
    assert "model.layers.1.mlp.experts.gate_up_proj" in dict(model.named_parameters())
    adapter = HuggingFaceGeneratorContext(model).create_adapter()
    down = tensors.pop("model.layers.1.mlp.experts.11.down_proj.weight")
    with pytest.raises(GeometryError, match=r"down_proj' is \(12, 16, 8\), but 11 tensors .*'.* make"):
        adapter.loader(published(tensors))
    tensors["model.layers.1.mlp.experts.11.down_proj.weight"] = down
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(GeometryError, match=r"gate_up_proj': transformers can't make it of 23 tensors"):
        adapter.loader(published(tensors))
    with pytest.raises(IncompleteVersionError, match=r"leaves 16 of 16 .*'model.norm.weight'"):
        adapter.loader(published({n: t for n, t in checkpoint(model).items() if n != "model.norm.weight"}))


def test_a_head_of_its_own_takes_the_embedding_that_a_tied_trainer_publishes() -> None:
    model = made("llama", {}, 1)
    tensors = checkpoint(made("llama", {"tie_word_embeddings": True}, 2))
    context = HuggingFaceGeneratorContext(model, aliases={"lm_head.weight": "model.embed_tokens.weight"})
    loader = context.create_adapter().loader(published(tensors))
    boxes = [staged(need, tensors) for need in loader.needs]
    loader.check(boxes)
    loader.install(boxes)
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.anyio
async def test_a_model_is_refitted_by_two_trainer_ranks(world: World) -> None:
    kind, options = MODELS["qwen3_moe"]
    model = made(kind, options, 9)
    client = await world.generator(model, context=HuggingFaceGeneratorContext(model))
    trainers = [await world.trainer(f"t{part}") for part in (0, 1)]
    for step in (1, 2):
        trained = made(kind, options, step)
        tensors = {name: tensor.numpy() for name, tensor in checkpoint(trained).items()}
        await create_version(world.control, f"v{step}", ["s0", "s1"])
        for part, trainer in enumerate(trainers):
            await trainer.publish(f"v{step}", f"s{part}", halves(tensors, part))
        await client.apply_weight(await client.stage_weight(f"v{step}"))
        assert torch.equal(logits(model), logits(trained))
