"""The servers that the control benchmark measures: real processes, on stores of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running `mx-rl serve`."""

    address: str
    metrics: str
    pid: int
    store_pid: int | None = None

    def cpu_s(self) -> float:
        """Processor time that the server has used so far."""
        return _cpu_s(self.pid)

    def store_cpu_s(self) -> float:
        """The same for a store that is a process of its own; 0 otherwise."""
        return 0.0 if self.store_pid is None else _cpu_s(self.store_pid)

    def resident_bytes(self) -> int:
        """Its resident memory now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def available(stores: list[str]) -> list[str]:
    """Those of `stores` that can be had here."""
    return [name for name in stores if name != "redis" or shutil.which("redis-server")]


@contextlib.contextmanager
def server(store: str, *options: str) -> Iterator[Server]:
    """A server on a fresh store: memory, sqlite or redis."""
    with tempfile.TemporaryDirectory(prefix="mx-rl-bench-") as directory, contextlib.ExitStack() as stack:
        store_pid = None
        address = store
        if store == "sqlite":
            address = f"sqlite:{directory}/store.db"
        elif store == "redis":
            port, store_pid = stack.enter_context(_redis(directory))
            address = f"redis://127.0.0.1:{port}/0"
        command = [sys.executable, "-m", "modelexpress_rl.cli.main", "serve", "--store", address]
        command += ["--port", "0", "--metrics-port", "0", "--log-level", "warning", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield Server(*_addresses(process), process.pid, store_pid)
        finally:
            process.terminate()
            process.communicate(timeout=30)


def _addresses(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    metrics = ""
    for line in process.stdout:
        words = line.split()
        if "metrics" in words:
            metrics = words[-1]
        if "listening" in words:
            return words[words.index("on") + 1], metrics
    raise RuntimeError("mx-rl serve did not come up; see above")


@contextlib.contextmanager
def _redis(directory: str) -> Iterator[tuple[int, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", directory]
    command += ["--save", "", "--appendonly", "no", "--loglevel", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > deadline_s:
                raise RuntimeError("redis-server did not come up")
            time.sleep(0.01)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)
