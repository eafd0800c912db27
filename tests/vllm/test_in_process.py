"""`LLM` in a program: refitted engines answer as engines that were started from the same weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, greedy
from tests.vllm.trainers import MODEL, trainer

CASES = [
    ("llama", 1),
    ("llama-tied", 2),
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
    with engine(steps[-1], tensor_parallel_size=ranks) as fresh:
        expected = greedy(fresh)
    answers = []
    with (
        engine(steps[0], "modelexpress-rl", tensor_parallel_size=ranks) as llm,
        trainer(published(steps[0])) as source,
    ):
        answers.append(greedy(llm))
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        for number, step in enumerate(steps[1:], 1):
            version_id = source.publish(f"step-{number}", published(step))
            llm.start_weight_update()
            llm.update_weights({"update_info": {"version_id": version_id}})
            llm.finish_weight_update(version_id)
            assert llm.get_weight_version() == version_id
            answers.append(greedy(llm))
    assert answers[-1] == expected
    assert all(before != after for before, after in itertools.pairwise(answers))
