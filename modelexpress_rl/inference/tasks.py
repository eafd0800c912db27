"""Structured concurrency for work that lives under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def run_under(work: Callable[[], Awaitable[T]], guard: Callable[[], Awaitable[Exception]]) -> T:
    """Run `work` for as long as `guard` runs; what `guard` returns ends the work and is raised.

    An error of either ends the other and is raised as it is, not in a group. The guard is cancelled
    when the work is done; a work that was done when the guard gave up has succeeded.
    """
    done: list[T] = []
    given_up: list[Exception] = []

    async def watch() -> None:
        given_up.append(await guard())
        working.cancel()

    working = anyio.CancelScope()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            with working:
                done.append(await work())
            group.cancel_scope.cancel()
    except BaseExceptionGroup as group_error:
        raise first_of(group_error) from None
    if done:
        return done[0]
    raise given_up[0]


async def run_to_end(write: Callable[[], None]) -> tuple[BaseException | None, BaseException | None]:
    """Run `write` in a thread until it has ended, whatever happens: (what it raised, a cancellation).

    To be called in a shielded scope. A native cancellation of the task is held back and returned: the
    thread can't be stopped, and what it uses must not be freed under it.
    """
    cancelled: BaseException | None = None
    running = asyncio.ensure_future(anyio.to_thread.run_sync(write))
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    return running.exception(), cancelled


def first_of(error: BaseException) -> BaseException:
    """The first error of a (nested) group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
