"""An owner task in which a task group lives, for clients that are opened and closed without `async with`.

background = await Background.start("trainer w1")
background.spawn(registration.run)
...
await background.aclose()

The group is a real one: a task that crashes ends its siblings. That crash is never silent: it is
logged at once, handed to `on_crash`, kept as `failure`, and raised by `check`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVarTuple

import anyio
import anyio.abc

from modelexpress_rl.errors import StateError

_log = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")
CLOSE_TIMEOUT_S = 5.0


class Background:
    """Background tasks of one object; they end with `aclose`, or with the first one that crashes."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None] | None = None) -> None:
        self.name = name
        self.on_crash = on_crash
        self._owner: asyncio.Task[None] | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._running: dict[object, str] = {}

    @classmethod
    async def start(cls, name: str, *, on_crash: Callable[[BaseException], None] | None = None) -> Background:
        """Open the group; `name` says whose tasks these are, in logs and errors.

        `on_crash` is called once, in the event loop, before the siblings of the crashed task end.
        """
        background = cls(name, on_crash)
        opened = asyncio.Event()
        background._owner = asyncio.create_task(background._own(opened), name=f"background of {name}")
        try:
            await opened.wait()
        except BaseException:
            await background.aclose()
            raise
        return background

    @property
    def failure(self) -> BaseException | None:
        """What the first crashed task raised, or None."""
        return self._failure

    @property
    def running(self) -> tuple[str, ...]:
        """The names of the tasks that have not ended."""
        return tuple(self._running.values())

    def check(self) -> None:
        """Pass while the background works.

        Raises:
            StateError: it is closed, or a task of it crashed (the cause).
        """
        if self._failure is not None:
            raise StateError(f"{self.name}: a background task crashed: {self._failure!r}") from self._failure
        if self._closing or self._group is None:
            raise StateError(f"{self.name} is closed")

    def spawn(self, run: Callable[[*Ts], Awaitable[Any]], *args: *Ts, name: str | None = None) -> None:
        """Start `run(*args)` in the group.

        Raises:
            StateError: as `check`.
        """
        self.check()
        assert self._group is not None
        self._group.start_soon(self._watched, run, args, name or getattr(run, "__qualname__", repr(run)))

    async def aclose(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Cancel what still runs and wait for it, at most `timeout_s`; idempotent.

        Shielded from the caller's cancellation. A task that doesn't end in time is named in the log.
        """
        self._closing = True
        owner = self._owner
        if owner is None or owner.done():
            return
        if self._group is not None:
            self._group.cancel_scope.cancel()
        else:
            owner.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([owner], timeout=timeout_s)
        if not owner.done():
            _log.error("%s: still running %g s after close: %s", self.name, timeout_s, self.running)
            owner.cancel()

    async def _own(self, opened: asyncio.Event) -> None:
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                opened.set()
                await anyio.sleep_forever()
        except BaseExceptionGroup as crash:
            if self._failure is None:  # pragma: no cover (a crash outside of any task)
                self._crashed("its task group", crash)
        finally:
            self._group = None
            opened.set()

    async def _watched(self, run: Callable[..., Awaitable[Any]], args: tuple[Any, ...], name: str) -> None:
        key = object()
        self._running[key] = name
        try:
            await run(*args)
        except Exception as error:
            self._crashed(name, error)
            raise
        finally:
            del self._running[key]

    def _crashed(self, task_name: str, error: BaseException) -> None:
        _log.error("%s: background task %s crashed", self.name, task_name, exc_info=error)
        if self._failure is not None:
            return
        self._failure = error
        if self.on_crash is not None:
            try:
                self.on_crash(error)
            except Exception:  # noqa: BLE001 (the crash itself is being reported)
                _log.exception("%s: on_crash failed", self.name)
