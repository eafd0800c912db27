"""Staging and applying versions end to end: a real control plane, real manifests, memory that moves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.server.app import Running
from tests.inference.memory_agent import Network
from tests.inference.publisher import Publisher, create_version, whole

pytestmark = pytest.mark.anyio


def weights(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "linear.weight": rng.standard_normal((8, 16), dtype=np.float32),
        "linear.bias": rng.standard_normal(8, dtype=np.float32),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def bytes(self) -> dict[str, bytes]:
        return {name: p.detach().numpy().tobytes() for name, p in self.named_parameters()}


def as_bytes(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in tensors.items()}


@pytest.fixture
async def trainer(control: ControlPlane, network: Network) -> AsyncIterator[Publisher]:
    async with Publisher(control, network.agent("trainer-0"), "t0") as publisher:
        yield publisher


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def client(
    plane: Running, network: Network, model: Model
) -> AsyncIterator[AsyncModelExpressGeneratorClient]:
    config = ModelExpressGeneratorConfig(
        engine_context=TorchGeneratorContext(model),
        model_name="m",
        worker_id="g0",
        server_url=plane.address,
        lease_ttl_seconds=5,
    )
    async with await AsyncModelExpressGeneratorClient.initialize(
        config, agent=network.agent("generator-0")
    ) as client:
        yield client


async def test_stage_then_apply(
    control: ControlPlane, trainer: Publisher, client: AsyncModelExpressGeneratorClient, model: Model
) -> None:
    before = model.bytes()
    tensors = weights(1)
    await create_version(control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(tensors))
    staged = await client.stage_weight("v1")
    assert model.bytes() == before
    assert client.serving_version_id is None
    await client.apply_weight(staged)
    assert model.bytes() == as_bytes(tensors)
    assert client.serving_version_id == "v1"
    assert staged.applied
    print(dict(staged.metrics))
