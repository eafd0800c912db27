"""verl's calls of our checkpoint engine, by a real FSDP2 trainer of two ranks and two rollout workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("transformers")

from modelexpress_rl.errors import StateError, UsageError
from tests.frameworks import verl
from tests.frameworks.conftest import Framework
from tests.frameworks.policy import assert_computes, made

pytestmark = pytest.mark.heavy


def test_every_step_reaches_every_rollout_and_a_failed_update_is_repeated(framework: Framework) -> None:
    trainers = framework.trainers
    trainers.call("join")

    def begin(method: str, *arguments: Any) -> None:
        trainers.begin("verl", method, *arguments)

    def actors(method: str, *arguments: Any) -> list[Any]:
        begin(method, *arguments)
        return trainers.end()

    rollouts = [verl.Rollout(framework.server_url, made(80 + rank)) for rank in range(2)]
    manager = verl.Manager(actors, begin, trainers.end, rollouts)
    for step in (1, 2):
        weights = trainers.call("train", step)[0]
        if step == 2:
            rollouts[1].leaves_after = 3
            with pytest.raises(RuntimeError, match="worker died"):
                manager.update_weights(step)
        for metrics in manager.update_weights(step):
            assert metrics["trainer_refit_e2e_s"] > 0
        for rollout in rollouts:
            assert_computes(rollout.model, weights)
    actors("execute", "close", {})
    for rollout in rollouts:
        rollout.engine.close()
        rollout.engine.close()


def test_each_actor_keeps_its_share() -> None:
    verl.verl_double.install()
    from modelexpress_rl.frameworks.verl import ModelExpressCheckpointEngine as Engine

    actors, rollouts = Engine.build_topology(2, 1, [{"run": "a.1"}, {"run": "b.1"}, {"run": "c.1"}])
    slots = ["verl:actor:0", "verl:actor:1"]
    assert actors == {"rank": [0, 1], "run": ["a.1"] * 2, "slots": [slots] * 2}
    assert rollouts == {"rank": [None], "run": ["a.1"], "slots": [slots]}


def test_calls_out_of_order_are_refused() -> None:
    engine = verl.engine("http://127.0.0.1:9")
    with pytest.raises(StateError, match="init_process_group was not called"):
        asyncio.run(engine.send_weights([], global_steps=1))
    engine.finalize()
    with pytest.raises(UsageError, match="global_steps: expected the step of this update"):
        engine._version(None)
