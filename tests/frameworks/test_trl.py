"""TRL's calls, by a real FSDP2 trainer of two ranks with our `weight_transfer`, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from modelexpress_rl import ModelExpressControlClient, WeightVersionState
from tests.frameworks.conftest import Framework
from tests.frameworks.policy import assert_computes, made
from tests.frameworks.vllm_double import Engine, vllm_serve

pytestmark = pytest.mark.heavy
MODEL = "trl/policy"


def test_every_step_reaches_vllm_and_a_refused_one_is_an_error(framework: Framework) -> None:
    trainers = framework.trainers
    trainers.call("join")
    engine = Engine(made(70))

    def step(number: int) -> Any:
        return trainers.call("train_like_trl", number)[0]

    with vllm_serve(engine) as url:
        trainers.call("begin_trl", url, MODEL)
        assert engine.calls == ["init_weight_transfer_engine"]
        for number in (1, 2):
            engine.calls.clear()
            weights, error = step(number)
            assert error is None
            assert engine.calls == [
                "pause?mode=keep", "start_weight_update", "update_weights", "finish_weight_update", "resume",
            ]  # fmt: skip
            assert_computes(engine.model, weights)
        engine.broken = "CUDA is out of memory"
        _, error = step(3)
        assert "PeerError: vLLM refused update_weights: 500: RuntimeError: CUDA is out of memory" in error
        assert_computes(engine.model, weights)
        weights, error = step(4)
        assert error is None
        assert_computes(engine.model, weights)
        with ModelExpressControlClient.connect(framework.server_url) as control:
            for version in control.list_weight_versions(MODEL):
                assert version.state is WeightVersionState.RELEASING
        trainers.call("end_trl")


def test_nothing_is_sent_before_the_server_was_asked() -> None:
    from modelexpress_rl.errors import DeadlineExceeded, StateError, Unavailable
    from modelexpress_rl.frameworks.trl import ModelExpressWeightTransfer

    transfer = ModelExpressWeightTransfer("http://127.0.0.1:9", "m", timeout_s=0.0)
    with pytest.raises(StateError, match="call init_weight_transfer first"):
        transfer.send_weights([])
    with pytest.raises(DeadlineExceeded, match=r"vLLM at http://127.0.0.1:9 was not up within 0 s"):
        transfer.init_weight_transfer()
    transfer = ModelExpressWeightTransfer("http://127.0.0.1:9", "m", timeout_s=5.0)
    with pytest.raises(Unavailable, match="could not be asked to resume"):
        transfer.resume()
    assert transfer.pop_metrics() == {}
    transfer.destroy()
