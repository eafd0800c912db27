"""Versions that are staged while the engine generates, by the worker extension."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, fresh, greedy, update, worker_of
from tests.vllm.trainers import MODEL, trainer

WAIT_S = 20.0
EXTENSION = "modelexpress_rl.inference.engines.vllm.ahead.StagesAhead"


def wait_until(ended: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ended():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_update_finds_the_version_staged(
    tmp_path: Path, control_plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [write(tmp_path, "qwen3", step) for step in range(4)]
    with (
        engine(steps[0], "modelexpress-rl", worker_extension_cls=EXTENSION) as llm,
        trainer(published(steps[0])) as source,
    ):
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        client, staged = worker_of(llm).weight_transfer_engine._client, []
        stage = client.stage_weight

        def noting(version_id: str) -> Any:
            staged.append(version_id)
            return stage(version_id)

        monkeypatch.setattr(client, "stage_weight", noting)

        def ahead(version_id: str) -> bool:
            (staged,) = llm.collective_rpc("stage_weight_version", args=(version_id,))
            return bool(staged)

        before = greedy(llm)
        first = source.publish("step-1", published(steps[1]))
        assert not ahead(first)
        assert greedy(llm) == before
        wait_until(lambda: ahead(first))
        assert greedy(llm) == before
        update(llm, first)
        assert staged == [first]
        source.release(first)

        ahead("nobody's")  # refused, in the background
        second = source.publish("step-2", published(steps[2]))
        ahead(second)
        third = source.publish("step-3", published(steps[3]))
        update(llm, third)  # another than what is staged
        assert staged == [first, "nobody's", second, third]
        answer = greedy(llm)
    assert answer == fresh(steps[3])
