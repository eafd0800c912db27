"""Threads for hashing that step back before everything else that this host has to do.

Hashing runs beside a training step, and beside the very reads that it checks. Where cores are few,
threads of equal priority would take turns with those: a refit got a fifth slower. On Linux these
threads have a lower priority (as `nice` gives it); elsewhere they are threads like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio

T = TypeVar("T")

THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2 if sys.platform == "linux" else 1))
"""How many there are at most in this process: half of its cores stay with others."""

NICE = 5

_pool: ThreadPoolExecutor | None = None


async def run_quietly(work: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Run `work` in such a thread, at most as many at once as `limiter` has tokens.

    Without one, it is queued for these threads right away: they go from one to the next without the
    event loop between, which where cores are few comes late. A cancellation waits until it has ended, as
    that of `anyio.to_thread.run_sync` does, and work that has not begun is dropped.
    """
    if limiter is not None:
        async with limiter:
            return await run_quietly(work)
    queued = _threads().submit(work)
    done = asyncio.wrap_future(queued)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if not queued.cancel():
            with anyio.CancelScope(shield=True):
                await asyncio.wait([done])
            done.exception()  # nobody else will ask
        raise


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="mx-hash", initializer=_step_back)
    return _pool


def _step_back() -> None:
    if sys.platform == "linux":  # where a thread has a priority of its own
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)  # its threads are the parent's
