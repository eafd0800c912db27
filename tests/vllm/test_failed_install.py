"""An install that fails half-way, in an engine that lives in this process, so that it can be made to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelexpress_rl.errors import EngineUncertain
from modelexpress_rl.inference.engines.vllm.host import Reload
from tests.vllm import failing
from tests.vllm.checkpoints import published, write
from tests.vllm.engines import addresses, engine, fresh, greedy, update, worker_of
from tests.vllm.trainers import MODEL, trainer


def test_a_failed_install_serves_no_version_and_the_next_one_does(
    tmp_path: Path, control_plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [write(tmp_path, "qwen3", step) for step in range(3)]
    with trainer(published(steps[0])) as source, engine(steps[0], "modelexpress-rl") as llm:
        transfer, before = worker_of(llm).weight_transfer_engine, addresses(llm)
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        core = llm.llm_engine.engine_core.engine_core
        encoded, kept = core.scheduler.encoder_cache_manager.cached, worker_of(llm).model_runner.encoder_cache
        encoded["a picture"], kept["a picture"] = set(), torch.zeros(1)
        update(llm, first := source.publish("step-1", published(steps[1])))
        assert not encoded
        assert not kept
        served = greedy(llm)
        assert transfer.serving_version_id == first

        # What nobody published is refused before a live weight is touched.
        llm.start_weight_update()
        with pytest.raises(Exception, match=f"rank 0 holds version {first}"):
            llm.update_weights({"update_info": {"version_id": "nobody's"}})
        assert greedy(llm) == served
        assert transfer.serving_version_id == llm.get_weight_version() == first

        second = source.publish("step-2", published(steps[2]))
        done: list[Any] = []
        process = Reload.process

        def failing(self: Reload, layer: Any) -> None:
            if len(done) == 3:
                raise RuntimeError("planted")
            done.append(layer)
            process(self, layer)

        with monkeypatch.context() as patch:
            patch.setattr(Reload, "process", failing)
            llm.start_weight_update()
            with pytest.raises(EngineUncertain, match=r"planted.*parts of several versions"):
                llm.update_weights({"update_info": {"version_id": second}})
        assert transfer.serving_version_id is None
        with pytest.raises(EngineUncertain):
            transfer.finish_weight_update()
        assert llm.get_weight_version() == first
        assert addresses(llm) == before

        update(llm, second)
        assert transfer.serving_version_id == llm.get_weight_version() == second
        assert addresses(llm) == before
        answer = greedy(llm)
        assert answer != served
    assert fresh(steps[2]) == answer


def test_one_rank_that_fails_fails_all(tmp_path: Path, control_plane: str) -> None:
    steps = [write(tmp_path, "qwen3-moe-tied", step) for step in range(3)]
    with engine(steps[0], "modelexpress-rl", ranks=2) as llm, trainer(published(steps[0])) as source:
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        update(llm, first := source.publish("step-1", published(steps[1])))
        assert llm.collective_rpc(failing.held) == [first, first]
        before = greedy(llm)

        second = source.publish("step-2", published(steps[2]))
        llm.collective_rpc(failing.fail_on_rank_1)
        llm.start_weight_update()
        failed = f"rank 1: EngineUncertain: .*planted; rank 0 holds version {second}; rank 1 holds parts of"
        with pytest.raises(Exception, match=failed):
            llm.update_weights({"update_info": {"version_id": second}})
        assert llm.get_weight_version() == first
        assert llm.collective_rpc(failing.held) == [second, None]

        llm.collective_rpc(failing.mend)
        update(llm, second)
        assert llm.collective_rpc(failing.held) == [second, second]
        answer = greedy(llm)
    assert before != answer == fresh(steps[2], ranks=2)
