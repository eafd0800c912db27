"""A process that offers memory over NIXL: `python -m tests.transport.target NAME SIZE_BYTES SEED`.

It prints one line of JSON and then obeys stdin: `fill SEED`, each answered by a line.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Self

import anyio
import numpy as np

from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import Region


def pattern(size_bytes: int, seed: int) -> np.ndarray:
    """Bytes that differ between seeds and between places; cheaper to make than noise."""
    words = np.arange(size_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.view(np.uint8)


class Target:
    """Such a process, seen from the test; it starts at once, `ready` waits until it serves."""

    def __init__(self, name: str, size_bytes: int, seed: int, env: Mapping[str, str] | None = None) -> None:
        self.size_bytes = size_bytes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.target", name, str(size_bytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            text=True,
        )
        self.metadata = b""
        self.region = Region(0, 0)

    async def ready(self) -> Self:
        line = await anyio.to_thread.run_sync(self._line)
        facts = json.loads(line)
        self.metadata = base64.b64decode(facts["metadata"])
        self.region = Region(facts["addr"], self.size_bytes)
        return self

    async def fill(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"fill {seed}\n")
        self.process.stdin.flush()
        assert await anyio.to_thread.run_sync(self._line) == "filled\n"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        with self.process:  # closes the pipes and waits
            pass

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the target process ended with {self.process.poll()}"
        return line


async def main(name: str, size_bytes: int, seed: int) -> None:
    memory = pattern(size_bytes, seed)
    async with await NixlAgent.create(name) as agent:
        await agent.register([Region(memory.ctypes.data, memory.nbytes)])
        metadata = base64.b64encode(await agent.metadata()).decode()
        print(json.dumps({"metadata": metadata, "addr": memory.ctypes.data}), flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            memory[:] = pattern(size_bytes, int(line.split()[1]))
            print("filled", flush=True)


if __name__ == "__main__":
    # NIXL imports a torch without CUDA only to learn that it has none; that is most of the start.
    sys.modules["torch"] = None  # type: ignore[assignment]
    anyio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
