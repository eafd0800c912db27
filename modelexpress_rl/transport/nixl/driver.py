"""The one thread of an agent that enters NIXL: it runs commands and polls the reads under way."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from modelexpress_rl.errors import StateError

T = TypeVar("T")


class Driver:
    """Runs what is submitted in order, and between that `poll`, as often as `poll` asks for.

    `poll` returns the seconds until it wants to be called again, None when it has nothing to do until
    the next command. An idle driver doesn't wake up.
    """

    def __init__(self, name: str, poll: Callable[[], float | None]) -> None:
        self._poll = poll
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        # A daemon: a program that forgets to close its agent, or whose NIXL hangs, still ends.
        self._thread = threading.Thread(target=self._run, name=f"modelexpress_rl {name}", daemon=True)
        self._thread.start()

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` in the thread; its result, or what it raised, is in the future.

        Raises:
            StateError: the driver was stopped.
        """
        if self._stopping:
            raise StateError("the NIXL agent is closed")
        future: Future[T] = Future()
        self._commands.append((command, future))
        self._wake.set()
        return future

    def stop(self) -> None:
        """End the thread after the commands submitted so far."""
        self._stopping = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._run_commands()
            if self._stopping and not self._commands:
                return
            delay_s = self._poll()
            if delay_s is None or delay_s > 0:
                self._wake.wait(delay_s)
            self._wake.clear()

    def _run_commands(self) -> None:
        while self._commands:
            command, future = self._commands.popleft()
            try:
                future.set_result(command())
            except BaseException as error:  # noqa: BLE001 - it is handed to whoever submitted the command
                _let_go(error)
                future.set_exception(error)
            # Not kept alive until the next command: the agent is destroyed with its last reference.
            del command, future


def _let_go(error: BaseException) -> None:
    """Empty the frames of an error, which whoever gets it may keep: they may refer to the agent."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
