"""A control plane, a trainer and a generator that are the real ones, over NIXL or over a stand-in for it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.security import PLAIN, ServerSecurity
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.transport.inprocess import Hub
from tests.server.api import GENERATOR, Api

MODEL, SLOT = "m", "s"


class Job:
    """Made by `opened`; what is opened here is closed with it."""

    def __init__(self, plane: Running, url: str, *, nixl: bool = False) -> None:
        self.plane = plane
        self.url = url
        self.nixl = nixl
        self.hub = Hub()
        self.weights = np.zeros((4, 6), np.float32)
        self._numbers = itertools.count()
        self._stack = contextlib.AsyncExitStack()

    async def trainer(self, **config: Any) -> AsyncModelExpressTrainerClient:
        async def agent(where: Any) -> Any:
            return self.hub.agent(where.agent_name)

        client = await AsyncModelExpressTrainerClient.initialize(
            ModelExpressTrainerConfig(
                device_id=0,
                model_name=MODEL,
                server_url=self.url,
                engine_context=PlainTrainerContext({"weight": self.weights}, slot_id=SLOT),
                close_timeout_seconds=2.0,
                release_grace_seconds=0.05,
                **config,
            ),
            **({} if self.nixl else {"create_agent": agent}),
        )
        return await self._stack.enter_async_context(client)

    async def generator(self, **config: Any) -> tuple[AsyncModelExpressGeneratorClient, torch.nn.Module]:
        model = torch.nn.Linear(6, 4, bias=False)
        client = await AsyncModelExpressGeneratorClient.initialize(
            ModelExpressGeneratorConfig(
                engine_context=TorchGeneratorContext(model),
                model_name=MODEL,
                server_url=self.url,
                rpc_timeout_seconds=5.0,
                **config,
            ),
            agent=None if self.nixl else self.hub.agent(f"generator-{next(self._numbers)}"),
        )
        return await self._stack.enter_async_context(client), model

    async def publish(self, trainer: AsyncModelExpressTrainerClient, version: str, value: float) -> None:
        self.weights[...] = value
        async with AsyncModelExpressControlClient.connect(self.url) as control:
            await control.create_weight_version(MODEL, f"key {version}", "FULL_TENSOR", [SLOT], uid=version)
        await trainer.publish_version(version)

    async def refit(self, version: str, value: float, **config: Any) -> None:
        """A generator of its own stages and installs it; every byte is what was published."""
        generator, model = await self.generator(**config)
        await generator.apply_weight(await generator.stage_weight(version))
        assert (model.weight.detach().numpy() == np.float32(value)).all()
        await generator.close()

    async def lease(self, worker_id: str, version: str, *, ttl_s: int = 60) -> str:
        """A lease that a reader takes by hand, by the name that our readers know it by."""
        request = v1.AcquireVersionLeaseRequest(version_id=version, worker_id=worker_id, ttl_ms=ttl_s * 1000)
        async with grpc.aio.insecure_channel(self.plane.address) as channel:
            api = Api(channel)
            await api.register(worker_id, GENERATOR, model=MODEL, ttl_s=600)
            return (await api.control.AcquireVersionLease(request)).lease.lease_id

    async def give_back(self, lease_id: str, worker_id: str, version: str) -> None:
        async with grpc.aio.insecure_channel(self.plane.address) as channel:
            assert await Api(channel).give_back(lease_id, worker_id, uid=version)

    async def aclose(self) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def opened(
    security: ServerSecurity = PLAIN, *, scheme: str = "http", nixl: bool = False
) -> AsyncIterator[Job]:
    async with serving(MemoryStore(), security=security) as plane:
        job = Job(plane, f"{scheme}://{plane.address}", nixl=nixl)
        try:
            yield job
        finally:
            await job.aclose()
