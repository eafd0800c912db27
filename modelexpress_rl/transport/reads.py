"""A posted read, as both adapters hand it out: set by any thread, awaited on any event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import TypeVar

import anyio

from modelexpress_rl.errors import TransferError, TransferTimeout

T = TypeVar("T")


class Completion:
    """An event that any thread sets once and any event loop may await."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came

    @property
    def done(self) -> bool:
        return self._done

    def set(self) -> None:
        """Wake everyone who waits; from any thread, more than once without harm."""
        with self._lock:
            self._done = True
            waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            # A loop that was closed meanwhile has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def wait(self, deadline: float) -> bool:
        """Wait until set, at most until `deadline` (on anyio's clock); return whether it is set."""
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._done:
                return True
            self._waiters[waiter] = None
        try:
            with anyio.CancelScope(deadline=deadline):
                await waiter
        finally:
            with self._lock:
                self._waiters.pop(waiter, None)
        return self._done


class PostedRead:
    """One posted read; implements `port.Read`. The adapter calls `finish` once, when nothing more lands."""

    def __init__(self, peer: str, total_bytes: int) -> None:
        self._peer = peer
        self._total_bytes = total_bytes
        self._ended = Completion()
        self._failure: tuple[str, BaseException | None] | None = None
        self.abandoned = False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def settled(self) -> bool:
        return self._ended.done

    def finish(self, failure: str | None = None, cause: BaseException | None = None) -> None:
        """Every byte landed (no `failure`), or it failed and no more bytes will land; from any thread."""
        if self._ended.done:
            return
        if failure is not None:
            self._failure = (failure, cause)
        self._ended.set()

    async def wait(self, deadline: float) -> None:
        started = anyio.current_time()
        if not await self._ended.wait(deadline):
            self.abandoned = True
            raise TransferTimeout(
                f"{self._what} did not end within its deadline ({anyio.current_time() - started:.3f} s after "
                "it was awaited); its buffers stay in use until it does",
                peer=self._peer,
            )
        if self._failure is not None:
            failure, cause = self._failure
            raise TransferError(f"{self._what} failed: {failure}", peer=self._peer) from cause

    async def wait_settled(self, deadline: float) -> bool:
        return await self._ended.wait(deadline)

    @property
    def _what(self) -> str:
        return f"a read of {self._total_bytes} bytes from {self._peer!r}"


async def result_of(future: Future[T]) -> T:
    """Await a future of another thread; being cancelled doesn't cancel it."""
    ended = Completion()
    future.add_done_callback(lambda _: ended.set())
    await ended.wait(float("inf"))
    return future.result()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
