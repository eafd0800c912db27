"""The orchestrator's side of the demo's socket: who has said hello, and asking each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketStream

from modelexpress_rl.cli.demo.wires import Line
from modelexpress_rl.errors import ModelExpressError


class StepFailed(ModelExpressError):
    """A process could not do what it was asked; the message is its own."""


class Peer:
    """One connected process; it does what it is asked, one thing at a time."""

    def __init__(self, line: Line, hello: dict[str, Any]) -> None:
        self._line = line
        self.hello = hello
        is_trainer = hello["role"] == "trainer"
        self.number = int(hello["rank"] if is_trainer else hello["tp"])
        self.name = f"trainer rank {self.number}" if is_trainer else f"generator TP {self.number}"
        self._turn = anyio.Lock()

    async def ask(self, command: str, answer: str, **arguments: Any) -> dict[str, Any]:
        """Ask, and return the answer.

        Raises:
            StepFailed: the process says that it failed, or it is gone.
        """
        async with self._turn:
            try:
                await self._line.send(cmd=command, **arguments)
                message = await self._line.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as gone:
                raise StepFailed(f"{self.name} is gone") from gone
        if message["event"] != answer:
            raise StepFailed(f"{self.name} could not {command}: {message.get('error', message)}")
        return message

    async def stop(self) -> None:
        """Tell it to end, if it still listens."""
        try:
            await self._line.send(cmd="stop")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


class Peers:
    """Listens on a Unix socket until as many processes as expected have said hello."""

    def __init__(self, path: Path, on_hello: Callable[[Peer], None]) -> None:
        self.path = path
        self.trainers: list[Peer] = []
        self.generators: list[Peer] = []
        self._on_hello = on_hello
        self._arrived = anyio.Event()

    async def accept(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Accept connections until cancelled."""
        listener = await anyio.create_unix_listener(self.path)
        async with listener:
            task_status.started()
            await listener.serve(self._welcome)

    async def _welcome(self, stream: SocketStream) -> None:
        line = Line(stream)
        try:
            peer = Peer(line, await line.receive())
        except anyio.EndOfStream:
            return
        ranks = self.trainers if peer.hello["role"] == "trainer" else self.generators
        ranks.append(peer)
        ranks.sort(key=lambda one: one.number)
        self._on_hello(peer)
        self._arrived.set()
        self._arrived = anyio.Event()
        await anyio.sleep_forever()

    async def wait_for(self, trainers: int, generators: int) -> None:
        """Return when so many have said hello; the caller bounds it."""
        while len(self.trainers) < trainers or len(self.generators) < generators:
            await self._arrived.wait()

    async def stop(self) -> None:
        """Tell all of them to end."""
        for peer in (*self.generators, *self.trainers):
            await peer.stop()
