"""PRIME-RL's calls, by a real FSDP2 trainer of two ranks, refit two inference workers after every step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from modelexpress_rl import ModelExpressGeneratorClient, ModelExpressGeneratorConfig, WeightVersionRef
from modelexpress_rl.inference.engines.huggingface import HuggingFaceGeneratorContext
from tests.frameworks import prime_rl
from tests.frameworks.conftest import Framework
from tests.frameworks.policy import WIRE, assert_computes, made

pytestmark = pytest.mark.heavy
STEPS = 3
MODE = "COPY_TO_DEVICE"


def test_every_step_reaches_every_worker(framework: Framework) -> None:
    framework.trainers.call("join")
    models = [made(50 + rank, WIRE) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                ModelExpressGeneratorClient.initialize(
                    ModelExpressGeneratorConfig(
                        engine_context=HuggingFaceGeneratorContext(model),
                        model_name=prime_rl.MODEL,
                        server_url=framework.server_url,
                    )
                )
            )
            for model in models
        ]

        def update(uid: str) -> None:
            for client in clients:
                staged = client.stage_weight(version=WeightVersionRef(uid))
                try:
                    client.apply_weight(staged)
                finally:
                    staged.release()

        receiver = prime_rl.Receiver(framework.folder / "prime", framework.server_url, update)
        stack.callback(receiver.control.close)
        framework.trainers.begin("train_like_prime_rl", STEPS, MODE)
        uids = []
        for step in range(1, STEPS + 1):
            uids.append(receiver.receive(step))
            weights = torch.load(framework.folder / f"prime-{step}.pt")
            for model in models:
                assert_computes(model, weights)
            assert all(client.serving_version_id == uids[-1] for client in clients)
        receiver.wait_forgotten(uids[-1])
        (framework.folder / "look-again").touch()
        _check(framework.trainers.end(), uids)


def _check(said: list[list[dict[str, Any]]], uids: list[str]) -> None:
    slots = [f"publisher:global-rank:{rank}" for rank in range(2)]
    for ranks in zip(*said, strict=True):
        for each in ranks:
            assert each["slots"] == slots
            assert each["metrics"]["trainer_refit_e2e_s"] > 0
            assert all(isinstance(value, (int, float)) for value in each["metrics"].values())
            assert each["again"] == {}
    assert [each["uid"] for each in said[0]] == [each["uid"] for each in said[1]] == uids
    assert all(uid.startswith("run.") and uid.endswith(f":{step}") for step, uid in enumerate(uids, 1))
    assert [each["ended"] for each in said[0]] == ["RELEASING"] * (STEPS - 1) + ["NOT_FOUND"]
