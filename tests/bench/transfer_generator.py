"""The generator's process of the `transfer` benchmark: JSON lines in, JSON lines out."""

from __future__ import annotations

import asyncio
import mmap
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import anyio
import numpy as np

from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.reshard.needs import Need
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import PreparedRead, ReadList, Region
from modelexpress_rl.version import WeightVersionRef
from tests.bench.peer import manifest_of, read, write
from tests.bench.transfer_cases import Case, Tensor, case, needs, values

RAW_RUN_BYTES = 32 << 20
RAW_ROUNDS = 3  # the first makes connections


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
    """Reads of the very memory that a version lies in, in big runs, with nothing around them."""

    def __init__(self, agent: NixlAgent, server: str, total_bytes: int) -> None:
        self._agent = agent
        self._server = server
        self._total_bytes = total_bytes
        pages = mmap.mmap(-1, total_bytes)
        pages.madvise(mmap.MADV_HUGEPAGE)
        self._memory = np.frombuffer(pages, np.uint8)
        self._memory[:] = 0

    async def register(self) -> None:
        """Make ready to read."""
        await self._agent.register([Region(self._memory.ctypes.data, self._total_bytes)])

    async def prepared(self, version: str) -> PreparedRead:
        """As many bytes of a version as are needed of it, in the order of their addresses."""
        manifest = await manifest_of(self._server, version)
        order = np.argsort(manifest.table.addr)
        addr, size = manifest.table.addr[order], manifest.table.size_bytes[order].astype(np.uint64)
        fresh = np.append(True, addr[1:] != addr[:-1] + size[:-1])
        first = np.flatnonzero(fresh)
        addr, size = addr[first], np.add.reduceat(size, first)
        runs, left = [], self._total_bytes
        for begin, length in zip(addr.tolist(), size.tolist(), strict=True):
            for at in range(0, length, RAW_RUN_BYTES):
                run = min(RAW_RUN_BYTES, length - at, left)
                runs += [(begin + at, run)] if run else []
                left -= run
        remote, sizes = np.array(runs, np.uint64).T.copy()
        local = np.uint64(self._memory.ctypes.data) + np.cumsum(sizes) - sizes
        peer = await self._agent.add_peer(manifest.agent_meta)
        return await self._agent.prepare(peer, ReadList(remote, local, sizes))

    async def seconds(self, prepared: PreparedRead) -> float:
        """One read."""
        started = time.perf_counter()
        read = await self._agent.post(prepared)
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
        raw = Raw(agent, server, needed)
        await raw.register()
        while message := await read():
            staged = await client.stage_weight(WeightVersionRef(message["version"]))
            metrics = dict(staged.metrics)
            prepared = await raw.prepared(message["version"])
            raw_s = [await raw.seconds(prepared) for _ in range(RAW_ROUNDS)]
            engine.step = message["step"] if message["compare"] else None
            await client.apply_weight(staged)
            write({**metrics, "raw_s": statistics.median(raw_s[1:]), "needed": needed})


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
