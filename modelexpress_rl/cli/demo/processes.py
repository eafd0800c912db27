"""The demo's processes: started with their output in log files, watched, and always ended."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio.abc import Process

from modelexpress_rl.errors import ModelExpressError

_TAIL_LINES = 15


class ProcessDied(ModelExpressError):
    """A process of the demo ended when it should not have; the message has the end of its log."""


@dataclass(slots=True)
class Child:
    """A module as a process, in a process group of its own, so that what it started ends with it.

    It also ends with this process, however that ends.
    """

    name: str
    arguments: list[str]
    """The module, and what it is given."""
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: Process | None = None

    async def start(self) -> None:
        """Start it; a second start, after it ended, appends to the same log."""
        with self.log.open("ab") as log:
            self.process = await anyio.open_process(
                [sys.executable, "-m", "modelexpress_rl.cli.demo.child", *self.arguments],
                stdin=-3,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.process is not None and self.process.returncode is None

    async def wait(self) -> int:
        """Wait until it ends, and return its exit code."""
        assert self.process is not None
        return await self.process.wait()

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-_TAIL_LINES:])

    async def end(self, grace_s: float = 10.0) -> None:
        """Let it end by itself for `grace_s`, then terminate, then kill its whole group."""
        if self.process is None:
            return
        with anyio.CancelScope(shield=True):
            for number, patience_s in ((None, grace_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
                if number is not None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.process.pid, number)
                with anyio.move_on_after(patience_s):
                    await self.process.wait()
                    break
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
