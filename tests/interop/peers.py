"""The other end of the `peer_*.py` programs: processes that run the published 0.7.0."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any

import anyio.to_thread

FOLDER = Path(__file__).parent
START_TIMEOUT_S = 150.0
_OURS = ("MX_", "MODEL_", "PYTHON", "LOCAL_RANK", "RANK", "VIRTUAL_ENV")


class Raised(Exception):
    """What a command raised in the peer."""

    def __init__(self, kind: str, code: str | None, message: str) -> None:
        super().__init__(f"{kind} ({code}): {message}")
        self.kind = kind
        self.code = code
        self.message = message


class Peer:
    """A running program of 0.7.0; every call has a bound."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self._answers: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def call(self, do: str, *, timeout_s: float = 90.0, **arguments: Any) -> Any:
        """Have the peer do something.

        Raises:
            Raised: what it raised.
            AssertionError: it ended, or did not answer in time; with its log.
        """
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        return self._answer(do, timeout_s)

    async def acall(self, do: str, **arguments: Any) -> Any:
        """The same, off the event loop."""
        return await anyio.to_thread.run_sync(partial(self.call, do, **arguments))

    def kill(self) -> None:
        """End it at once, as a lost node does."""
        self.process.kill()
        self.process.wait(10)

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, about: str, timeout_s: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no answer to {about!r} within {timeout_s} s:\n{self.log}") from None
        assert line, f"the peer ended before it answered {about!r}:\n{self.log}"
        answer = json.loads(line)
        if "raised" in answer:
            raise Raised(answer["raised"], answer["code"], answer["message"])
        return answer["ok"]


class Pool:
    """Peers that one test after the other uses, since one takes seconds to start.

    One that was killed is replaced.
    """

    def __init__(self, start: Callable[[str], Peer]) -> None:
        self._start = start
        self._running: dict[str, list[Peer]] = {}

    def take(self, program: str, count: int = 1) -> list[Peer]:
        """That many peers of one program, each with whatever state the last test left in it."""
        running = [peer for peer in self._running.get(program, []) if peer.process.poll() is None]
        with ThreadPoolExecutor() as threads:
            running += threads.map(self._start, [program] * (count - len(running)))
        self._running[program] = running
        return running[:count]

    async def atake(self, program: str, count: int = 1) -> list[Peer]:
        """The same, off the event loop."""
        return await anyio.to_thread.run_sync(self.take, program, count)


@contextmanager
def started(python: Path, folder: Path, program: str, *arguments: str, **environment: str) -> Iterator[Peer]:
    """A peer that is up; killed at the end. `folder` gets its log, and is where it runs."""
    log = Path(mkdtemp(dir=folder), f"{program}.log")
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            [str(python), str(FOLDER / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=folder,
            env={**own, "MX_WORKER_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1", **environment},
        )
    peer = Peer(process, log)
    try:
        assert peer._answer("start", START_TIMEOUT_S) == "up"
        yield peer
    finally:
        process.kill()
        process.wait(10)
        peer._reader.join(5)
        for stream in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
