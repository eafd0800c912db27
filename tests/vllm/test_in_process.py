"""`LLM` in a program: refitted engines answer as engines that were started from the same weights."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, fresh, greedy, update
from tests.vllm.trainers import MODEL, trainer

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 1, {}),
    ("qwen2-tied", 1, {}),
    ("qwen3", 1, {}),
    ("qwen3-tied", 1, {}),
    ("qwen3-moe", 1, {}),
]
if os.environ.get("MX_TEST_VLLM") == "all":
    CASES += [
        ("llama-tied", 2, {}),
        ("qwen3-moe", 2, {}),
        ("qwen3-moe", 2, {"enable_expert_parallel": True}),
    ]
STEPS = 2


@pytest.mark.parametrize(("kind", "ranks", "options"), CASES)
def test_a_refitted_engine_answers_as_a_fresh_one(
    kind: str, ranks: int, options: dict[str, Any], tmp_path: Path, control_plane: str
) -> None:
    steps = [write(tmp_path, kind, step) for step in range(STEPS + 1)]
    answers = []
    with engine(steps[0], "modelexpress-rl", ranks, **options) as llm, trainer(published(steps[0])) as source:
        answers.append(greedy(llm))
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        for number, step in enumerate(steps[1:], 1):
            update(llm, source.publish(f"step-{number}", published(step)))
            answers.append(greedy(llm))
    assert answers[-1] == fresh(steps[-1], ranks, **options)
    assert all(before != after for before, after in itertools.pairwise(answers))
