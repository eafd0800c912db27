"""Many agents read from a process that is killed meanwhile, and close: `python -m ... PID`.

On stdin: address, size and metadata of what the process offers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import anyio
import numpy as np

from modelexpress_rl.errors import TransferError
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import ReadList
from tests.transport.rigs import region, soon, zeros

AGENTS = 24
RUN_BYTES = 1 << 20


async def main(pid: int) -> None:
    addr, size_bytes, metadata = sys.stdin.read().split()
    offsets = np.arange(0, int(size_bytes), RUN_BYTES, dtype=np.uint64)
    agents, prepared, targets = [], [], []
    for number in range(AGENTS):
        agent = await NixlAgent.create(f"reader-{number}", readable=False)
        memory = zeros(int(size_bytes))
        await agent.register([region(memory)])
        reads = ReadList(
            offsets + np.uint64(int(addr)),
            offsets + np.uint64(memory.ctypes.data),
            np.full(len(offsets), RUN_BYTES, np.uint64),
        )
        peer = await agent.add_peer(bytes.fromhex(metadata))
        prepared.append(await agent.prepare(peer, reads))
        await (await agent.post(prepared[-1])).wait(soon(30))
        agents.append(agent)
        targets.append(memory)
    os.kill(pid, signal.SIGSTOP)
    posted = [await agent.post(each) for agent, each in zip(agents, prepared, strict=True)]
    os.kill(pid, signal.SIGKILL)
    for agent, each, read in zip(agents, prepared, posted, strict=True):
        with contextlib.suppress(TransferError):
            for _ in range(4):
                await read.wait(soon(30))
                read = await agent.post(each)
        await agent.aclose()
    print("closed")


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
