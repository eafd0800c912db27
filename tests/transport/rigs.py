"""Agents of either adapter, and memory to read, for the contract tests."""

from __future__ import annotations

import importlib.util
from contextlib import AsyncExitStack
from typing import Protocol

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from modelexpress_rl.transport.inprocess import Hub, InprocessAgent
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import Agent, Read, ReadList, Region

Bytes = NDArray[np.uint8]


def need_nixl() -> None:
    """Skip where NIXL isn't installed; not by importing it, which would come before it is made quiet."""
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("needs the nixl package")


def soon(delay_s: float = 10.0) -> float:
    """A deadline far enough for anything that works at all."""
    return anyio.current_time() + delay_s


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def zeros(size: int) -> Bytes:
    return np.zeros(size, np.uint8)


def region(memory: Bytes) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


def runs(source: Bytes, target: Bytes, *, run_bytes: int, order_seed: int | None = None) -> ReadList:
    """All of `source` into `target`, in runs of `run_bytes`, shuffled so that they can't be merged."""
    offsets = np.arange(0, source.nbytes, run_bytes, dtype=np.uint64)
    sizes = np.minimum(np.uint64(run_bytes), np.uint64(source.nbytes) - offsets)
    if order_seed is not None:
        order = np.random.default_rng(order_seed).permutation(len(offsets))
        offsets, sizes = offsets[order], sizes[order]
    return ReadList(offsets + np.uint64(source.ctypes.data), offsets + np.uint64(target.ctypes.data), sizes)


def one_run(remote_addr: int, local_addr: int, size_bytes: int) -> ReadList:
    columns = np.array([[remote_addr], [local_addr], [size_bytes]], np.uint64)
    return ReadList(columns[0], columns[1], columns[2])


class Rig(Protocol):
    """Makes agents, closes them at the end, and can silence one and wake it again."""

    async def agent(self, name: str) -> Agent: ...

    async def silent_agent(self, name: str) -> Agent:
        """Reads from it stay under way until `wake`."""
        ...

    async def wake(self, agent: Agent, read: Read) -> None:
        """Let `agent` serve until `read` is settled."""
        ...

    async def aclose(self) -> None: ...


class InprocessRig:
    def __init__(self) -> None:
        self._hub = Hub()
        self._agents: list[InprocessAgent] = []

    async def agent(self, name: str) -> Agent:
        self._agents.append(agent := self._hub.agent(name))
        return agent

    async def silent_agent(self, name: str) -> Agent:
        self._hub.hold(name)
        return await self.agent(name)

    async def wake(self, agent: Agent, read: Read) -> None:
        self._hub.resume(agent.name)

    async def aclose(self) -> None:
        for agent in self._agents:
            await agent.aclose()


class NixlRig:
    def __init__(self) -> None:
        self._agents = AsyncExitStack()

    async def agent(self, name: str) -> Agent:
        return await self._agents.enter_async_context(await NixlAgent.create(name, listen=False))

    async def silent_agent(self, name: str) -> Agent:
        # Nothing in its process makes progress, so it doesn't even answer the first connection.
        agent = await NixlAgent.create(name, readable=False)
        return await self._agents.enter_async_context(agent)

    async def wake(self, agent: Agent, read: Read) -> None:
        assert isinstance(agent, NixlAgent)
        deadline = soon()
        while not read.settled and anyio.current_time() < deadline:
            agent._driver.submit(agent._core.progress).result(5)
            await anyio.sleep(0.001)

    async def aclose(self) -> None:
        await self._agents.aclose()
