"""The event loop behind a blocking client: one daemon thread that runs the async client.

portal = Portal("control client")
client = portal.enter(AsyncClient.connect(...))   # an async context manager; left at close()
portal.call(client.get, "v1")
portal.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Generic, Self, TypeVar, TypeVarTuple

import anyio
from anyio.from_thread import BlockingPortal

from modelexpress_rl.errors import StateError

_log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0


class Portal:
    """Runs coroutines of one client in an event loop of its own, for callers that block.

    May be used from any thread. The thread is a daemon: a program that forgets `close` still ends.
    A child process that was forked while the portal was open can't use it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._entered = ExitStack()
        started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(_serve(started),), name=f"modelexpress_rl {name}", daemon=True
        )
        self._thread.start()
        self._portal = started.result(START_TIMEOUT_S)

    def call(self, func: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Runs `func(*args)` in the loop and returns its result; what it raises is raised here.

        An interrupt (Ctrl-C) cancels it. `func` brings its own deadline.

        Raises:
            StateError: the portal is closed, or this is a forked child, or the loop's own thread.
        """
        self._check()
        task: asyncio.Task[object] | None = None
        abandoned = False

        async def run() -> T:
            nonlocal task
            task = asyncio.current_task()
            if abandoned:
                raise asyncio.CancelledError
            return await func(*args)

        def cancel() -> None:
            if task is not None:
                task.cancel()

        try:
            # An interrupt may come before this returns the future, so it can't be cancelled by that.
            return self._portal.start_task_soon(run).result()
        except BaseException:
            abandoned = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._portal.start_task_soon(cancel)
            raise

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enters an async context manager; `close` leaves it, the last one entered first.

        Raises:
            StateError: as `call`.
        """
        self._check()
        return self._entered.enter_context(self._portal.wrap_async_context_manager(manager))

    def iterate(self, items: AsyncIterator[T]) -> BlockingIterator[T]:
        """A blocking iterator over an async one."""
        return BlockingIterator(self, items)

    def close(self) -> None:
        """Leaves what was entered and ends the loop, at most 10 s for either; idempotent.

        In a forked child it does nothing: the loop is the parent's.

        Raises:
            Exception: what leaving a context manager raised, after the loop was ended.
        """
        if self._closed or self.forked:
            return
        self._closed = True
        try:
            _bounded(self._entered.close, f"closing {self.name}")
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._portal.start_task_soon(self._stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("%s: its event loop has not ended %g s after close", self.name, CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a child process that was forked since: the loop is the parent's."""
        return os.getpid() != self._pid

    async def _stop(self) -> None:
        await self._portal.stop(cancel_remaining=True)

    def _check(self) -> None:
        if self.forked:
            raise StateError(f"{self.name}: opened in process {self._pid}, used in its fork {os.getpid()}")
        if self._closed:
            raise StateError(f"{self.name} is closed")
        if threading.current_thread() is self._thread:
            raise StateError(f"{self.name}: a blocking call in its own event loop would wait for ever")


class BlockingIterator(Generic[T]):
    """Takes items of an async iterator one by one; also a context manager. Ends it with `close`."""

    def __init__(self, portal: Portal, items: AsyncIterator[T]) -> None:
        self._portal = portal
        self._items = items

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return self._portal.call(self._next)
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Ends the iteration; idempotent."""
        aclose = getattr(self._items, "aclose", None)
        if aclose is not None and not self._portal.closed:
            self._portal.call(aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _next(self) -> T:
        return await anext(self._items)


def _bounded(run: Callable[[], None], what: str) -> None:
    """Runs `run` in a thread of its own, so that it can be left behind when it doesn't end in time."""
    done: Future[None] = Future()

    def settle() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=settle, name=what, daemon=True).start()
    try:
        done.result(CLOSE_TIMEOUT_S)
    except TimeoutError:
        if done.done():
            raise
        _log.error("%s takes over %g s; its tasks are cancelled", what, CLOSE_TIMEOUT_S)


async def _serve(started: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        started.set_result(portal)
        await portal.sleep_until_stopped()
    with anyio.move_on_after(1):
        await asyncio.get_running_loop().shutdown_asyncgens()
