"""`LLM` in a program: refitted engines answer as engines that were started from the same weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, fresh, greedy, update
from tests.vllm.trainers import MODEL, trainer

CASES = [
    ("llama", 1),
    ("qwen2-tied", 1),
    ("qwen3", 1),
    ("qwen3-tied", 1),
    ("qwen3-moe", 1),
    ("qwen3-moe", 2),
]
STEPS = 2


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_a_refitted_engine_answers_as_a_fresh_one(
    kind: str, ranks: int, tmp_path: Path, control_plane: str
) -> None:
    steps = [write(tmp_path, kind, step) for step in range(STEPS + 1)]
    answers = []
    with engine(steps[0], "modelexpress-rl", ranks) as llm, trainer(published(steps[0])) as source:
        answers.append(greedy(llm))
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        for number, step in enumerate(steps[1:], 1):
            update(llm, source.publish(f"step-{number}", published(step)))
            answers.append(greedy(llm))
    assert answers[-1] == fresh(steps[-1], ranks)
    assert all(before != after for before, after in itertools.pairwise(answers))
