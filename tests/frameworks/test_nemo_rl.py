"""NeMo-RL's calls, by real Megatron ranks whose clients are older than their process groups."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from modelexpress_rl import (
    ModelExpressGeneratorClient,
    ModelExpressGeneratorConfig,
    TorchGeneratorContext,
    WeightVersionRef,
    WeightVersionState,
)
from modelexpress_rl.cli.demo.generator_model import GeneratorModel, GeneratorShape
from tests.frameworks import nemo_rl
from tests.frameworks.conftest import Framework

pytestmark = pytest.mark.heavy


def model() -> GeneratorModel:
    sizes = {**nemo_rl.SIZES}
    sizes["kv_heads"] = sizes.pop("kv_groups")
    return GeneratorModel(GeneratorShape(**sizes))


class Generators:
    """Two generation workers; `fails` has the next install of the second one fail."""

    def __init__(self, server_url: str, stack: contextlib.ExitStack) -> None:
        self.models = [model(), model()]
        self.fails = False
        self.clients = [
            stack.enter_context(
                ModelExpressGeneratorClient.initialize(
                    ModelExpressGeneratorConfig(
                        engine_context=TorchGeneratorContext(each),
                        model_name=nemo_rl.MODEL,
                        server_url=server_url,
                    )
                )
            )
            for each in self.models
        ]

    def update(self, version: WeightVersionRef) -> None:
        for number, client in enumerate(self.clients):
            staged = client.stage_weight(version=version)
            try:
                if self.fails and number == 1:
                    raise RuntimeError("a worker's GPU fell off the bus")
                client.apply_weight(staged)
            finally:
                staged.release()


def assert_holds(model: GeneratorModel, weights: dict[str, torch.Tensor]) -> None:
    held = dict(model.named_parameters())
    assert held.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(held[name], tensor), name


def test_every_step_reaches_every_worker_and_a_failed_one_is_tried_again(framework: Framework) -> None:
    trainers = framework.trainers
    trainers.call("join")
    with contextlib.ExitStack() as stack:
        generators = Generators(framework.server_url, stack)
        stack.callback(trainers.call, "nemo_rl", "close")

        def policy(method: str, *arguments: Any) -> list[Any]:
            return trainers.call("nemo_rl", method, *arguments)

        driver = nemo_rl.Synchronizer(framework.server_url, policy, generators.update)
        stack.callback(driver.control.close)
        slots = driver.init_communicator()
        assert len(slots) == 2
        assert all(slot.startswith("megatron:partition:") for slot in slots)

        before = None
        for step in (1, 2, 3):
            weights, nothing = policy("train", step)
            assert nothing == {}
            if step == 2:
                generators.fails = True
                with pytest.raises(RuntimeError, match="fell off the bus"):
                    driver.sync_weights()
                generators.fails = False
                assert before is not None
                assert_holds(generators.models[1], before)
            for metrics in driver.sync_weights():
                assert metrics["trainer_refit_e2e_s"] > 0
            for each in generators.models:
                assert_holds(each, weights)
            serving = {client.serving_version_id for client in generators.clients}
            assert len(serving) == 1
            before = weights
        listed = driver.control.list_weight_versions(nemo_rl.MODEL)
        assert all(version.state is WeightVersionState.RELEASING for version in listed)
