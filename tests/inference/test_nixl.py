"""The generator over real NIXL reads, from a trainer in another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import anyio
import anyio.to_thread
import pytest

from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.server.app import Running
from tests.inference.world import Model, as_bytes, weights

pytest.importorskip("nixl")
pytestmark = [pytest.mark.anyio, pytest.mark.heavy]


class Trainer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    async def says(self, expected: str) -> None:
        out: IO[str] = self.process.stdout  # type: ignore[assignment]
        with anyio.fail_after(60):
            assert (await anyio.to_thread.run_sync(out.readline, abandon_on_cancel=True)).strip() == expected

    async def publish(self, version: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        await self.says(f"published {version}")


class Trainers:
    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    async def start(self, address: str, worker_id: str) -> Trainer:
        command = [sys.executable, "-m", "tests.inference.trainer_process", address, worker_id]
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        trainer = Trainer(process)
        await trainer.says("up")
        return trainer


@pytest.fixture
def trainers() -> Iterator[Trainers]:
    trainers = Trainers()
    yield trainers
    for process in trainers.processes:
        process.kill()
        process.communicate()


async def test_refits_from_another_process_and_outlives_it(
    plane: Running, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "20")
    model = Model()
    config = ModelExpressGeneratorConfig(
        engine_context=TorchGeneratorContext(model),
        model_name="m",
        server_url=plane.address,
        rpc_timeout_seconds=5.0,
    )
    trainer = await trainers.start(plane.address, "t0")
    async with await AsyncModelExpressGeneratorClient.initialize(config) as client:
        for version in ("v1", "v2"):
            await trainer.publish(version)
            await client.apply_weight(await client.stage_weight(version))
            assert model.bytes() == as_bytes(weights(int(version[1:])))
        assert client._parts.pool.allocations == client._parts.cache.prepared_reads == 1

        await trainer.publish("v3")
        trainer.process.kill()
        trainer.process.wait()
        with anyio.fail_after(30), pytest.raises(ModelExpressError, match=r"version v3: worker 't0'"):
            await client.stage_weight("v3")
        assert model.bytes() == as_bytes(weights(2))
        assert client.serving_version_id == "v2"

        other = await trainers.start(plane.address, "t1")
        await other.publish("v4")
        await client.apply_weight(await client.stage_weight("v4"))
        assert model.bytes() == as_bytes(weights(4))
