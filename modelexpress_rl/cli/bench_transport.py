"""Measuring reads between two processes of this host: big runs, short runs, tiny reads, strided copies."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import numpy as np
from anyio.abc import Process

from modelexpress_rl.errors import TransferError
from modelexpress_rl.reshard.cost import TransportCost
from modelexpress_rl.reshard.geometry import Bytes, UInt
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import ReadList, Region

BIG_RUN_BYTES = 32 << 20
SHORT_RUN_BYTES = 1 << 10
SHORT_RUNS = 16_384
ROUNDS = 5
TINY_ROUNDS = 50
_READ_S = 60.0


def machine() -> str:
    """What was measured on, for people."""
    return f"{socket.gethostname()}, {os.cpu_count()} CPUs, {platform.machine()}"


async def measure(size_bytes: int) -> TransportCost:
    """The constants of this machine; `size_bytes` is how much is read at a time.

    Raises:
        UsageError: NIXL is not installed or can't start.
        TransferError: the other process ended, or a read failed.
    """
    async with _peer(size_bytes) as (addr, meta), await NixlAgent.create(readable=False) as agent:
        memory = _memory(size_bytes)
        await agent.register([Region(memory.ctypes.data, size_bytes)])
        reader = _Reader(agent, await agent.add_peer(meta), addr, memory)
        wire_s = await reader.seconds(_runs(size_bytes, BIG_RUN_BYTES), BIG_RUN_BYTES, BIG_RUN_BYTES)
        wire_bytes_per_s = size_bytes / wire_s
        runs = min(SHORT_RUNS, size_bytes // (2 * SHORT_RUN_BYTES))
        # Every other one, so that no two can be joined.
        short_s = await reader.seconds(runs, SHORT_RUN_BYTES, 2 * SHORT_RUN_BYTES)
        read_s = await reader.seconds(1, 64, 64, rounds=TINY_ROUNDS)
        copy_bytes_per_s = await anyio.to_thread.run_sync(_copy_bytes_per_s, memory)
    run_s = (short_s - read_s - runs * SHORT_RUN_BYTES / wire_bytes_per_s) / runs
    return TransportCost(wire_bytes_per_s, max(run_s, 1e-9), read_s, copy_bytes_per_s)


class _Reader:
    """Reads from the peer into the same places of our memory."""

    def __init__(self, agent: NixlAgent, peer: str, addr: int, memory: Bytes) -> None:
        self._agent, self._peer, self._addr, self._memory = agent, peer, addr, memory

    async def seconds(self, runs: int, run_bytes: int, stride: int, *, rounds: int = ROUNDS) -> float:
        """The median time of reads of so many runs; the first, which makes connections, doesn't count."""
        at: UInt = np.arange(runs, dtype=np.uint64) * np.uint64(stride)
        sizes = np.minimum(np.uint64(run_bytes), np.uint64(self._memory.size) - at)
        reads = ReadList(np.uint64(self._addr) + at, np.uint64(self._memory.ctypes.data) + at, sizes)
        prepared = await self._agent.prepare(self._peer, reads)

        async def once() -> None:
            read = await self._agent.post(prepared)
            await read.wait(anyio.current_time() + _READ_S)

        await once()
        return statistics.median([await _timed(once) for _ in range(rounds)])


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    begun_s = time.perf_counter()
    await work()
    return time.perf_counter() - begun_s


def _copy_bytes_per_s(memory: Bytes) -> float:
    """Rows of 1 KiB out of a packed block into every other place of another, as from scratch."""
    rows = memory.size // (3 * 1024)
    words = memory[: rows * 3 * 1024].view(np.uint64)
    source = words[: rows * 128].reshape(rows, 128)
    target = words[rows * 128 :].reshape(rows, 256)[:, :128]
    times = []
    for _ in range(ROUNDS + 1):
        begun_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun_s)
    return float(source.nbytes / statistics.median(times[1:]))


def _runs(size_bytes: int, run_bytes: int) -> int:
    return -(-size_bytes // run_bytes)


def _memory(size_bytes: int) -> Bytes:
    pages = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 1  # so that every page is there
    return memory


@contextlib.asynccontextmanager
async def _peer(size_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """A process that lends memory of this size: (its address, the agent's metadata)."""
    command = [sys.executable, "-m", __name__, str(size_bytes)]
    process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
    try:
        said = json.loads(await _line(process))
        yield said["addr"], bytes.fromhex(said["meta"])
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()
            await process.aclose()


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        try:
            said += await process.stdout.receive()
        except anyio.EndOfStream:
            raise TransferError("the process to read from ended before it was ready", peer="bench") from None
    return said


async def _lend(size_bytes: int) -> None:
    memory = _memory(size_bytes)
    async with await NixlAgent.create(listen=False) as agent:
        await agent.register([Region(memory.ctypes.data, size_bytes)])
        meta = await agent.metadata()
        print(json.dumps({"addr": memory.ctypes.data, "meta": meta.hex()}), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)  # until whoever asked has gone


if __name__ == "__main__":
    anyio.run(_lend, int(sys.argv[1]))
