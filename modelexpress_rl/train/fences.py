"""Fences: one-time signals that complete or break, waited for in a coroutine or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import anyio
import anyio.to_thread

from modelexpress_rl.errors import DeadlineExceeded, FenceBroken, StateError


@runtime_checkable
class CompletionFence(Protocol):
    """What an engine adapter may hand over: `wait` blocks, or is a coroutine function; `Fence` is one."""

    def wait(self) -> Any:
        """Return, or return an awaitable that returns, when the fence has completed."""
        ...


class Fence:
    """Completes once or breaks once, and then for ever; `what` names it in errors.

    It belongs to a publication, not to the handle that shows it: dropping the handle changes nothing.
    `complete` and `break_` are idempotent, the first one counts, and are called in the client's loop;
    waiting works from any loop and any thread.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._future: Future[None] = Future()

    def __repr__(self) -> str:
        state = "complete" if self.done else "broken" if self._future.done() else "open"
        return f"<Fence {self.what}: {state}>"

    @property
    def done(self) -> bool:
        """Whether it has completed."""
        return self._future.done() and self._future.exception() is None

    @property
    def ended(self) -> bool:
        """Whether it has completed or broken."""
        return self._future.done()

    def complete(self) -> None:
        """What the fence stands for has happened."""
        if not self._future.done():
            self._future.set_result(None)

    def break_(self, reason: str) -> None:
        """What the fence stands for can't happen any more."""
        if not self._future.done():
            self._future.set_exception(FenceBroken(f"{self.what}: {reason}"))

    async def wait(self) -> None:
        """Return when it has completed; awaiting the fence itself does the same.

        Raises:
            FenceBroken: it can't complete; the message says why.
        """
        if not self._future.done():
            await self._end()
        self._result()

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()

    def wait_blocking(self, timeout_s: float | None = None) -> None:
        """Block this thread until it has completed.

        Raises:
            FenceBroken: it can't complete; the message says why.
            DeadlineExceeded: `timeout_s` passed first.
            StateError: an event loop runs in this thread, which a blocking wait would stop for ever.
        """
        if not self._future.done() and _loop_runs_here():
            raise StateError(f"{self.what}: wait_blocking() in a coroutine; await wait() instead")
        self._block(timeout_s)

    def _block(self, timeout_s: float | None) -> None:
        try:
            self._future.exception(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.what}: not complete after {timeout_s:g} s") from error
        self._result()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when it completes or breaks; at once where it has."""
        self._future.add_done_callback(lambda _: callback())

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def end(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the waiter's loop is closed: nobody waits
                loop.call_soon_threadsafe(wake)

        self._future.add_done_callback(end)
        await ended

    def _result(self) -> None:
        broken = self._future.exception()
        if broken is not None:
            # A new one each time: a raised exception collects the traceback of whoever raises it.
            raise FenceBroken(str(broken))


class BlockingFence:
    """The view of a fence that the blocking clients give: `wait` blocks.

    As every call of those clients it may also be made where an event loop runs (a notebook, an actor of
    an asynchronous framework): what completes the fence runs in the client's own thread.
    """

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    @property
    def done(self) -> bool:
        """Whether it has completed."""
        return self._fence.done

    def wait(self, timeout_s: float | None = None) -> None:
        """Block this thread until it has completed.

        Raises:
            FenceBroken: it can't complete; the message says why.
            DeadlineExceeded: `timeout_s` passed first.
        """
        self._fence._block(timeout_s)


def completed_fence(what: str) -> Fence:
    """A fence that has completed."""
    fence = Fence(what)
    fence.complete()
    return fence


async def wait_for(fence: CompletionFence, timeout_s: float, what: str) -> None:
    """Wait for any fence, a blocking one in a thread, for at most `timeout_s`.

    Raises:
        DeadlineExceeded: it did not complete in time; a blocking one goes on holding its thread.
    """
    with anyio.move_on_after(timeout_s):
        if inspect.iscoroutinefunction(fence.wait):
            await fence.wait()
            return
        outcome = await anyio.to_thread.run_sync(fence.wait, abandon_on_cancel=True)
        if inspect.isawaitable(outcome):
            await outcome
        return
    raise DeadlineExceeded(f"{what}: not complete after {timeout_s:g} s")


async def complete_after(fence: Fence, other: CompletionFence, timeout_s: float, what: str) -> None:
    """Complete `fence` once `other`, named `what`, has; break it where that doesn't within `timeout_s`."""
    try:
        await wait_for(other, timeout_s, what)
    except BaseException as error:
        fence.break_(f"{what} failed: {error!r}")
        if not isinstance(error, Exception):
            raise
    else:
        fence.complete()


def broken_fence(what: str, reason: str) -> Fence:
    """A fence that has broken."""
    fence = Fence(what)
    fence.break_(reason)
    return fence


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
