"""`mx-rl serve` as a process of its own, which can be killed."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

BOUND_S = 30.0
_LISTENING = re.compile(r"mx-rl serve: listening on (\S+:\d+) \(store (.+)\)\n")


@dataclass
class Serve:
    """A server process that has said that it listens."""

    process: Process
    address: str

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal and wait for the end; answers the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        with anyio.fail_after(BOUND_S):
            return await self.process.wait()


async def start(*options: str) -> Process:
    command = [sys.executable, "-m", "modelexpress_rl.cli.main", "serve", *options]
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


@asynccontextmanager
async def serve(*options: str, port: int = 0) -> AsyncIterator[Serve]:
    """A running server; killed at the end where it still runs."""
    process = await start("--port", str(port), "--log-level", "warning", *options)
    try:
        with anyio.fail_after(BOUND_S):
            line = (await process.stdout.readline()).decode()
            while "metrics on" in line:
                line = (await process.stdout.readline()).decode()
        listening = _LISTENING.fullmatch(line)
        assert listening is not None, f"{line!r} {(await process.stderr.read()).decode()}"
        yield Serve(process, listening[1])
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True), anyio.fail_after(BOUND_S):
            await process.communicate()


async def failed(*options: str) -> tuple[int, str, str]:
    """A server that does not come up: its exit status, stdout and stderr."""
    process = await start(*options)
    with anyio.fail_after(BOUND_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()
