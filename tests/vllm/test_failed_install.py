"""An install that fails half-way, in an engine that lives in this process, so that it can be made to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelexpress_rl.errors import EngineUncertain
from modelexpress_rl.inference.engines.vllm.host import Reload
from tests.vllm.checkpoints import published, write
from tests.vllm.engines import engine, greedy
from tests.vllm.trainers import MODEL, trainer


def update(llm: Any, version_id: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version_id": version_id}})
    llm.finish_weight_update(version_id)


def addresses(model: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_a_failed_install_serves_no_version_and_the_next_one_does(
    tmp_path: Path, control_plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    steps = [write(tmp_path, "qwen3", step) for step in range(3)]
    here = {"distributed_executor_backend": "uni"}
    with (
        trainer(published(steps[0])) as source,
        engine(steps[0], "modelexpress-rl", **here) as llm,
    ):
        worker = llm.llm_engine.model_executor.driver_worker.worker
        transfer, before = worker.weight_transfer_engine, addresses(worker.get_model())
        llm.init_weight_transfer_engine({"init_info": {"model_name": MODEL}})
        update(llm, first := source.publish("step-1", published(steps[1])))
        served = greedy(llm)
        assert transfer.serving_version_id == first

        # What nobody published is refused before a live weight is touched.
        llm.start_weight_update()
        with pytest.raises(Exception, match=f"rank 0 holds {first}"):
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
        assert addresses(worker.get_model()) == before

        update(llm, second)
        assert transfer.serving_version_id == llm.get_weight_version() == second
        assert addresses(worker.get_model()) == before
        answer = greedy(llm)
        assert answer != served
    with engine(steps[2]) as fresh:
        assert greedy(fresh) == answer
