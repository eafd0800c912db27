"""What the generator's tests share: a model, its weights at a step, trainers and clients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import torch

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.transport.inprocess import Hub
from tests.inference.publisher import Held, Publisher

ROWS, COLUMNS = 64, 128


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights of `Model` that differ in every tensor from every other step's."""
    rng = np.random.default_rng(step)
    return {
        "linear.weight": rng.standard_normal((ROWS, COLUMNS), dtype=np.float32),
        "linear.bias": rng.standard_normal(ROWS, dtype=np.float32),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(COLUMNS, ROWS)

    def bytes(self) -> dict[str, bytes]:
        return {name: p.detach().numpy().tobytes() for name, p in self.named_parameters()}


def as_bytes(tensors: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {name: data.tobytes() for name, data in tensors.items()}


def halves(tensors: dict[str, np.ndarray[Any, Any]], part: int) -> list[Held]:
    """What tensor-parallel rank `part` of two holds: half of the rows of everything."""
    held = []
    for name, data in tensors.items():
        rows = len(data) // 2
        box = np.ascontiguousarray(data[part * rows : (part + 1) * rows])
        held.append(Held(name, box, (part * rows, *(0,) * (data.ndim - 1)), data.shape))
    return held


class World:
    """One control plane, one network, any number of trainers and generators."""

    def __init__(self, address: str, control: ControlPlane, hub: Hub) -> None:
        self.address = address
        self.control = control
        self.hub = hub
        self._stack = contextlib.AsyncExitStack()

    async def trainer(self, worker_id: str = "t0", *, ttl_s: int = 60) -> Publisher:
        agent = self.hub.agent(f"agent-{worker_id}")
        return await self._stack.enter_async_context(Publisher(self.control, agent, worker_id, ttl_s=ttl_s))

    async def generator(
        self, model: torch.nn.Module, *, worker_id: str = "g0", context: Any = None, **config: Any
    ) -> AsyncModelExpressGeneratorClient:
        config.setdefault("lease_ttl_seconds", 5)
        client = await AsyncModelExpressGeneratorClient.initialize(
            ModelExpressGeneratorConfig(
                engine_context=context or TorchGeneratorContext(model),
                model_name="m",
                worker_id=worker_id,
                server_url=self.address,
                **config,
            ),
            agent=self.hub.agent(f"agent-{worker_id}"),
        )
        return await self._stack.enter_async_context(client)

    async def status(self, version: str) -> v1.VersionStatus:
        async with self.control.watch_version(v1.WatchVersionRequest(version_id=version)) as messages:
            async for message in messages:
                return message.status
        raise AssertionError("no status")

    async def no_lease(self, version: str) -> None:
        """Wait until nobody holds a lease on the version."""

        async def free() -> bool:
            return (await self.status(version)).live_leases == 0

        await until(free)

    async def aclose(self) -> None:
        await self._stack.aclose()


async def until(holds: Callable[[], Awaitable[bool]], *, within_s: float = 5.0) -> None:
    """Poll until `holds` returns true, for at most `within_s`."""
    end = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < end, "it did not come true in time"
        await anyio.sleep(0.01)


async def true_soon(holds: Callable[[], bool], *, within_s: float = 5.0) -> None:
    async def ask() -> bool:
        return holds()

    await until(ask, within_s=within_s)


@contextlib.asynccontextmanager
async def opened(address: str, control: ControlPlane, hub: Hub) -> AsyncIterator[World]:
    world = World(address, control, hub)
    try:
        yield world
    finally:
        await world.aclose()
