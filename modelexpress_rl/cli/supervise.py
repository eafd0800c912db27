"""`mx-rl serve --workers N`: N server processes on one port, and one that watches over them.

The kernel spreads connections over the processes (SO_REUSEPORT). That option would also let a stranger
join, so the supervisor first makes sure that nobody has the port, and holds it while it runs. A process
that dies is started again; processes whose supervisor dies end, too.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

import anyio

from modelexpress_rl.errors import DeadlineExceeded, UsageError
from modelexpress_rl.server.stores import REDIS_KINDS, shown

_LOG = logging.getLogger(__name__)

START_S = 60.0
STOP_S = 15.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
# A process that lived so long did not die of what killed the one before it.
SETTLED_S = 60.0
MOST = 256


def require_shared_store(workers: int, store: str) -> None:
    """Pass where `workers` processes may use the store together.

    Raises:
        UsageError: they may not, or the number makes no sense.
    """
    if not 1 <= workers <= MOST:
        raise UsageError(f"--workers must be between 1 and {MOST}, not {workers}")
    if workers > 1 and store.partition(":")[0] not in REDIS_KINDS:
        raise UsageError(
            f"--workers {workers} needs a store that several processes can share, such as "
            f"--store redis://HOST:PORT/0; {shown(store)} belongs to one process"
        )


def supervise(options: argparse.Namespace) -> int:
    """Run the processes until SIGTERM or SIGINT; answers the exit status.

    Raises:
        UsageError: somebody has the port.
    """
    with reserve(options.host, options.port) as reservation:
        port = reservation.getsockname()[1]
        return anyio.run(_Supervisor(options, port).run)


def reserve(host: str, port: int) -> socket.socket:
    """Hold a port that nobody else has, so that only processes of this user can join; 0: a free one.

    Raises:
        UsageError: it is taken, or the address is not one of this host's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as alone:
            # Without it a port whose connections have just ended would count as taken.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
            port = alone.getsockname()[1]
        shared = socket.socket(family)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind((host, port))
    except OSError as error:
        why = "the port is taken" if error.errno == errno.EADDRINUSE else str(error)
        raise UsageError(f"can't listen on {host}:{port}: {why}") from error
    return shared


class _Supervisor:
    def __init__(self, options: argparse.Namespace, port: int) -> None:
        self._options = options
        self._port = port
        self._count: int = options.workers
        self._running: dict[int, Process] = {}
        self._stopping = False

    async def run(self) -> int:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            try:
                for index in range(self._count):
                    await self._start(index)
                for index in range(self._count):
                    lines = await _lines_until_listening(self._running[index])
                    if not lines:
                        return await self._running[index].wait() or 1
                    self._say(lines, index)
                async with anyio.create_task_group() as tasks:
                    for index in range(self._count):
                        tasks.start_soon(self._keep, index)
                    async for number in signals:
                        _LOG.info("%s: stopping %d processes", signal.Signals(number).name, self._count)
                        break
                    self._stopping = True
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop()
        return 0

    def _say(self, lines: Sequence[str], index: int) -> None:
        """Each process's metrics, and, once the last one listens, where."""
        last = index == self._count - 1
        for line in lines:
            if last or "metrics on" in line:
                print(line, end="", flush=True)

    async def _start(self, index: int) -> Process:
        command = [sys.executable, "-m", "modelexpress_rl.cli.main", *self._options.words]
        command += ["--workers", "1", "--supervised", "--port", str(self._port)]
        if self._options.metrics_port:
            command += ["--metrics-port", str(self._options.metrics_port + index)]
        # Its stdin ends when we do, and so does it.
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        self._running[index] = process
        return process

    async def _keep(self, index: int) -> None:
        """Start a process again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = anyio.current_time()
            process = self._running[index]
            status = await process.wait()
            if anyio.current_time() - began_s > SETTLED_S:
                pause_s = FIRST_PAUSE_S
            _LOG.error("server process %d ended (%d); starting it again in %g s", index, status, pause_s)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await self._start(index)

    async def _stop(self) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.terminate()
        with anyio.move_on_after(STOP_S):
            for process in self._running.values():
                await process.wait()
        for process in self._running.values():
            if process.returncode is None:
                _LOG.error("server process %d did not end in time: killed", process.pid)
                process.kill()
                await process.wait()


async def _lines_until_listening(process: Process) -> list[str]:
    """What it says until it listens; nothing where it ends before."""
    assert process.stdout is not None
    lines: list[str] = []
    try:
        with anyio.fail_after(START_S):
            while line := (await process.stdout.readline()).decode():
                lines.append(line)
                if "listening on" in line:
                    return lines
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"server process {process.pid} does not listen after {START_S:g} s; its log says why"
        ) from error
    return []
