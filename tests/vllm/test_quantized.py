"""A quantized model: what vLLM makes of its tensors after loading is made anew."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.checkpoints import published, write
from tests.vllm.engines import addresses, engine, fresh, greedy, model_of, update
from tests.vllm.trainers import MODEL, trainer


def test_int8_weights_and_scales(tmp_path: Path, control_plane: str) -> None:
    """Weights are packed, scales of attention are taken and their parameters dropped."""
    steps = [write(tmp_path, "qwen3-int8", step) for step in range(3)]
    with engine(steps[0], "modelexpress-rl") as llm, trainer(published(steps[0])) as source:
        before = addresses(llm)
        answers = [greedy(llm)]
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        for number, step in enumerate(steps[1:], 1):
            tensors = published(step)
            update(llm, source.publish(f"step-{number}", tensors))
            answers.append(greedy(llm))
            for index, layer in enumerate(model_of(llm).model.layers):
                scale = tensors[f"model.layers.{index}.self_attn.q_scale"].item()
                assert layer.self_attn.attn._q_scale.item() == scale
                assert not hasattr(layer.self_attn.attn, "q_scale")
        assert addresses(llm) == before
    assert answers[-1] == fresh(steps[-1])
    assert answers[0] != answers[1] != answers[2]
