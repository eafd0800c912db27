"""The generator's process of the `transfer` benchmark: JSON lines in, JSON lines out."""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.reshard.needs import Need
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import ReadList, Region
from modelexpress_rl.version import WeightVersionRef
from tests.bench.transfer_cases import Case, Tensor, case, needs, values

RAW_RUN_BYTES = 32 << 20


class Engine:
    """Needs a case's tensors, and compares what it gets."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.step: int | None = None
        self._needs = needs(tensors)

    def create_adapter(self) -> Engine:
        """It is its own adapter."""
        return self

    def loader(self, _: Mapping[str, PublishedTensor]) -> Engine:
        """And its own loader."""
        return self

    @property
    def needs(self) -> Sequence[Need]:
        """What it loads."""
        return self._needs

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """Nothing can fail."""

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """Compare every byte, where there is a step to compare with."""
        if self.step is None:
            return
        for number, (tensor, each) in enumerate(zip(self.tensors, staged, strict=True)):
            expected = values(number, tensor, tensor.need, self.step)
            found = each.data.view(np.int32).reshape(expected.shape)
            assert np.array_equal(found, expected), f"{tensor.name} differs"


class Raw:
    """Reads of big runs with nothing around them."""

    def __init__(self, agent: NixlAgent, remote: dict[str, Any]) -> None:
        self._agent = agent
        self._remote = remote
        pages = mmap.mmap(-1, remote["bytes"])
        pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(pages, np.uint8)
        self._memory[:] = 0

    async def prepare(self, total_bytes: int) -> None:
        """Read so many bytes from now on."""
        await self._agent.register([Region(self._memory.ctypes.data, self._remote["bytes"])])
        peer = await self._agent.add_peer(bytes.fromhex(self._remote["meta"]))
        offsets = np.arange(0, total_bytes, RAW_RUN_BYTES, dtype=np.uint64)
        sizes = np.minimum(np.uint64(RAW_RUN_BYTES), np.uint64(total_bytes) - offsets)
        local = np.uint64(self._memory.ctypes.data) + offsets
        reads = ReadList(np.uint64(self._remote["addr"]) + offsets, local, sizes)
        self._prepared = await self._agent.prepare(peer, reads)

    async def seconds(self) -> float:
        """One read."""
        started = time.perf_counter()
        read = await self._agent.post(self._prepared)
        await read.wait(anyio.current_time() + 60)
        return time.perf_counter() - started


async def main(server: str, name: str, mib: str) -> None:
    """Answer until the input ends."""
    chosen: Case = case(name)
    engine = Engine(chosen.tensors(int(mib) << 20))
    needed = sum(each.need[1][0] * each.need[1][1] * 4 for each in engine.tensors)
    config = ModelExpressGeneratorConfig(engine_context=engine, model_name=name, server_url=server)
    async with (
        await AsyncModelExpressGeneratorClient.initialize(config) as client,
        await NixlAgent.create(readable=False) as agent,
    ):
        raw = Raw(agent, await _read())
        await raw.prepare(needed)
        await raw.seconds()
        while message := await _read():
            before = await raw.seconds()
            staged = await client.stage_weight(WeightVersionRef(message["version"]))
            metrics = dict(staged.metrics)
            after = await raw.seconds()
            engine.step = message["step"] if message["compare"] else None
            await client.apply_weight(staged)
            _write({**metrics, "raw_s": (before + after) / 2, "needed": needed})


async def _read() -> dict[str, Any]:
    line = await asyncio.to_thread(sys.stdin.readline)
    message: dict[str, Any] = json.loads(line) if line else {}
    return message


def _write(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
