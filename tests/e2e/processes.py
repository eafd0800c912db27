"""Processes of end-to-end tests: started with a bound, read line by line, always ended."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

MX_RL = (sys.executable, "-m", "modelexpress_rl.cli.main")


class Running:
    """A process whose output is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for_line(self, text: str, timeout_s: float) -> str:
        """The next line that holds `text`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise AssertionError(f"no line with {text!r} in {timeout_s} s:\n{self.text}") from None
            if line is None:
                raise AssertionError(f"the process ended without a line with {text!r}:\n{self.text}")
            if text in line:
                return line

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.text}") from None
        self._reader.join(5)
        return code

    @property
    def text(self) -> str:
        """All output so far."""
        return "".join(self.output)


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str] | None = None, cwd: str | None = None
) -> Iterator[Running]:
    """Run a command in a process group of its own, which ends with the block."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "MX_WORKER_HOST": "127.0.0.1", **(environment or {})},
        cwd=cwd,
        start_new_session=True,
    )
    run = Running(process)
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        run._reader.join(5)
        process.stdout.close()


@contextlib.contextmanager
def serve(store: str = "memory", port: int = 0, *options: str) -> Iterator[tuple[Running, str]]:
    """A control plane as a process, and its address."""
    command = [*MX_RL, "serve", "--port", str(port), "--store", store, "--log-level", "error", *options]
    with running(command) as server:
        line = server.wait_for_line("listening on", 30)
        yield server, line.split("listening on ")[1].split()[0]
