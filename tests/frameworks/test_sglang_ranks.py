"""The ranks of an SGLang engine install a version all together or not at all; over gloo, two processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from modelexpress_rl import ModelExpressControlClient, WeightPayloadFormat
from modelexpress_rl.frameworks.tensor_stream import StreamPublisher
from tests.frameworks.conftest import Framework
from tests.inference.sglang.double import Model, loaded, tensors

pytestmark = pytest.mark.heavy
MODEL, SLOT = "sglang/policy", "sglang:trainer"


class Engine:
    """Publishes steps, and has the engine's ranks take them."""

    def __init__(self, framework: Framework) -> None:
        self._trainers = framework.trainers
        self.publisher = StreamPublisher(MODEL, SLOT, server_url=framework.server_url)
        self.control = ModelExpressControlClient.connect(framework.server_url)

    def update(self, step: int, broken_rank: int = -1, broken: str = "") -> list[dict[str, Any]]:
        """Publish a step as a version, and update; answers what each rank says."""
        self.publisher.copy(tensors(step).items())
        version = f"sglang:{step}"
        self.control.create_weight_version(
            MODEL, version, WeightPayloadFormat.FULL_TENSOR, [SLOT], uid=version
        )
        self.publisher.publish(version)
        said = self._trainers.call("update_sglang", version, broken_rank, broken)
        self.control.delete_weight_version(version)
        return said


@pytest.fixture
def engine(framework: Framework) -> Iterator[Engine]:
    framework.trainers.call("join")
    framework.trainers.call("start_sglang", MODEL)
    made = Engine(framework)
    yield made
    framework.trainers.call("stop_sglang")
    made.control.close()
    made.publisher.close()


def assert_all_hold(said: list[dict[str, Any]], step: int) -> None:
    for rank, each in enumerate(said):
        assert each["error"] is None
        assert each["serving"] == f"sglang:{step}"
        assert torch.equal(each["weight"], loaded(Model(rank, 2), step).qkv_proj.weight)


def test_what_one_rank_can_not_do_no_rank_does(engine: Engine) -> None:
    assert_all_hold(engine.update(1), 1)
    for rank, each in enumerate(engine.update(2, broken_rank=1, broken="stage")):
        assert re.match(
            r"StateError: version sglang:\S+ is not installed: rank 1: VersionGone: ", each["error"]
        )
        assert each["error"].endswith("rank 0 holds version sglang:1; rank 1 holds version sglang:1")
        assert each["serving"] == "sglang:1"
        assert torch.equal(each["weight"], loaded(Model(rank, 2), 1).qkv_proj.weight)
    assert_all_hold(engine.update(3), 3)
    said = engine.update(4, broken_rank=0, broken="install")
    for each in said:
        assert re.match(
            r"EngineUncertain: version sglang:4 was not installed on every rank: rank 0: .*; rank 0 holds "
            r"parts of several versions until one is installed; rank 1 holds version sglang:4",
            each["error"],
        )
    assert [each["serving"] for each in said] == [None, "sglang:4"]
    assert_all_hold(engine.update(5), 5)
