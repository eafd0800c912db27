"""A request that is being answered when the weights change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, greedy_after, update
from tests.vllm.prompts import PROMPTS, TOKENS
from tests.vllm.trainers import MODEL, trainer

BEFORE = 6


def test_it_goes_on_as_if_the_new_weights_had_read_it_all(tmp_path: Path, control_plane: str) -> None:
    """Nothing that was cached of the old weights has a part in the tokens after the update."""
    from vllm import SamplingParams

    old, new = (write(tmp_path, "qwen3", step) for step in range(2))
    asked = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    with engine(old, "modelexpress-rl") as llm, trainer(published(old)) as source:
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        version_id = source.publish("step-1", published(new))
        llm.llm_engine.add_request("request", {"prompt_token_ids": PROMPTS[-1]}, asked)
        before = _tokens(llm, BEFORE)
        update(llm, version_id)
        found = _tokens(llm, TOKENS)
    assert found[: len(before)] == before
    with engine(new) as fresh:
        expected = greedy_after(fresh, PROMPTS[-1] + before, TOKENS - len(before))
    assert found[len(before) :] == expected


def _tokens(llm: Any, count: int) -> list[int]:
    """Have the engine go on until the request has so many."""
    for _ in range(10 * count):
        for output in llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) >= count:
                return tokens
    raise AssertionError(f"the engine stopped before {count} tokens")
