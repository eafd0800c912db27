"""Workers as frameworks have them: processes that serve calls, one at a time, and answer or raise."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tests.e2e.processes import Running, running

ROOT = Path(__file__).parents[2]
CALL_S = 90.0


def send(connection: Connection, message: Any) -> None:
    """Send a message whole: a connection's own `send` shares the memory of tensors instead."""
    connection.send_bytes(pickle.dumps(message))


def serve(connection: Connection, target: Any) -> None:
    """Do what comes over a connection with `target`, until the other side is gone."""
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[str | None, Any] = (None, getattr(target, method)(*arguments))
        except Exception:  # noqa: BLE001 (the caller's to judge)
            answer = (traceback.format_exc(), None)
        send(connection, answer)


class Remote:
    """An object in another process, by the path of its socket."""

    def __init__(self, path: str) -> None:
        self._connection = Client(path)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Any:
            send(self._connection, (method, arguments))
            error, value = self._connection.recv()
            if error is not None:
                raise RuntimeError(f"{method}: {error}")
            return value

        return call


class Actors:
    """One process per rank; a call goes to all of them."""

    def __init__(self, processes: list[Running], connections: list[Connection]) -> None:
        self._processes = processes
        self._connections = connections

    def begin(self, method: str, *arguments: Any) -> None:
        """Call without waiting."""
        for connection in self._connections:
            send(connection, (method, arguments))

    def end(self) -> list[Any]:
        """What all ranks answer to the call that was begun, by rank."""
        deadline = time.monotonic() + CALL_S
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                raise AssertionError(f"rank {rank} does not answer:\n{self.text}")
            try:
                answers.append(connection.recv())
            except EOFError:
                raise AssertionError(f"rank {rank} is gone:\n{self.text}") from None
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error is not None]
        assert not errors, "\n".join(errors)
        return [value for _, value in answers]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call, and wait for all."""
        self.begin(method, *arguments)
        return self.end()

    @property
    def text(self) -> str:
        """What the processes have printed."""
        return "\n".join(process.text for process in self._processes)


@contextlib.contextmanager
def actors(folder: Path, count: int, *arguments: str) -> Iterator[Actors]:
    """Start so many workers; all end with the block."""
    path = str(folder / "actors")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(Listener(path))
        command = [sys.executable, "-m", "tests.frameworks.worker", path, *arguments]
        processes = []
        for rank in range(count):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            }
            processes.append(stack.enter_context(running(command, environment, cwd=str(ROOT))))
        by_rank: dict[int, Connection] = {}
        for _ in processes:
            connection = stack.enter_context(listener.accept())
            by_rank[connection.recv()] = connection
        yield Actors(processes, [by_rank[rank] for rank in range(count)])


@contextlib.contextmanager
def served(folder: Path, name: str, target: Any) -> Iterator[str]:
    """Serve an object of this process to others; gives the path for `Remote`."""
    path = str(folder / name)
    with Listener(path) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError), listener.accept() as connection:
                serve(connection, target)

        threading.Thread(target=accept, name=name, daemon=True).start()
        yield path
