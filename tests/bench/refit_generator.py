"""The generator's process of the `refit` benchmark: JSON lines in, JSON lines out."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import anyio
import numpy as np
import torch

from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import ReadList, Region
from modelexpress_rl.version import WeightVersionRef
from tests.bench.peer import manifest_of, read, write
from tests.bench.refit import MODEL, _weights
from tests.bench.result import resident_bytes

RAW_ROUNDS = 3


class Module(torch.nn.Module):
    """Parameters of the benchmark's names."""

    def __init__(self, model_bytes: int) -> None:
        super().__init__()
        for name, weight in _weights(model_bytes).items():
            _, index, _ = name.split(".")
            if not hasattr(self, "layers"):
                self.layers = torch.nn.ModuleDict()
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(torch.zeros_like(weight), requires_grad=False)
            self.layers[index] = layer


async def main(server: str) -> None:
    """Answer until the input ends."""
    first = await read()
    model_bytes = first["model_bytes"]
    module = Module(model_bytes)
    before = resident_bytes()
    config = ModelExpressGeneratorConfig(
        engine_context=TorchGeneratorContext(module), model_name=MODEL, server_url=server
    )
    async with await AsyncModelExpressGeneratorClient.initialize(config) as client:
        write({"ready": True})
        while message := await read():
            started = time.monotonic()
            staged = await client.stage_weight(WeightVersionRef(message["version"]))
            staged_at = time.monotonic()
            await client.apply_weight(staged)
            answer: dict[str, Any] = {
                "applied_at": time.monotonic(),
                "staged_gib_s": model_bytes / (staged_at - started) / 2**30,
                "unverified_ratio": staged.metrics.get("unverified_bytes", 0) / model_bytes,
                "extra_ratio": (resident_bytes() - before) / model_bytes,
            }
            found = [int(p.view(torch.int32)[-1, -1]) for p in module.parameters()]
            assert found == message["expect"], f"expected {message['expect']}, found {found}"
            if message["raw"]:
                answer["raw_gib_s"] = await _raw(server, message["version"], model_bytes)
            write(answer)


async def _raw(server: str, version: str, model_bytes: int) -> float:
    """Read the very same buffers with nothing around the reads: one run per tensor, one peer."""
    manifest = await manifest_of(server, version)
    remote = np.sort(manifest.table.addr)
    size_bytes = np.full(len(remote), model_bytes // len(remote), np.uint64)
    target = np.empty(model_bytes, np.uint8)
    target[:] = 0
    local = target.ctypes.data + np.arange(len(remote), dtype=np.uint64) * size_bytes
    agent = await NixlAgent.create(readable=False)
    try:
        await agent.register([Region(target.ctypes.data, model_bytes)])
        peer = await agent.add_peer(manifest.agent_meta)
        prepared = await agent.prepare(peer, ReadList(remote, local, size_bytes))
        speeds = []
        for _ in range(RAW_ROUNDS):
            started = time.monotonic()
            read = await agent.post(prepared)
            await read.wait(anyio.current_time() + 60)
            speeds.append(model_bytes / (time.monotonic() - started) / 2**30)
        return statistics.median(speeds[1:])
    finally:
        await agent.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
