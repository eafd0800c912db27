"""Hashing threads have a lower priority, are few, and hold their callers until they have ended."""

from __future__ import annotations

import os
import sys
import threading

import anyio
import pytest

from modelexpress_rl import quiet_threads
from modelexpress_rl.quiet_threads import NICE, THREADS, run_quietly

pytestmark = [pytest.mark.anyio]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
async def test_they_step_back_and_nobody_else_does() -> None:
    def own_priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own_priority()
    assert await run_quietly(own_priority, anyio.CapacityLimiter(1)) == min(before + NICE, 19)
    assert own_priority() == before
    assert await anyio.to_thread.run_sync(own_priority) == before


async def test_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await run_quietly(fail, anyio.CapacityLimiter(1))


@pytest.mark.parametrize("limited", [True, False])
async def test_a_cancellation_waits_for_the_thread(limited: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []
    limiter = anyio.CapacityLimiter(1) if limited else None

    def work() -> None:
        begun.set()
        ended.append(may_end.wait(10))

    async with anyio.create_task_group() as group:
        group.start_soon(run_quietly, work, limiter)
        await anyio.to_thread.run_sync(begun.wait, 10)
        group.cancel_scope.cancel()
        may_end.set()
    assert ended == [True]


async def test_what_waits_for_a_thread_goes_on_without_the_loop_and_is_dropped_by_a_cancellation() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        begun.set()
        may_end.wait(10)
        ran.append(0)

    def fail() -> None:
        ran.append(-1)
        raise ValueError("nobody hears it")

    async with anyio.create_task_group() as group:
        for _ in range(THREADS):
            group.start_soon(run_quietly, first)
        await anyio.to_thread.run_sync(begun.wait, 10)
        group.start_soon(run_quietly, ended.set)
        async with anyio.create_task_group() as dropped:
            dropped.start_soon(run_quietly, fail)
            await anyio.wait_all_tasks_blocked()
            dropped.cancel_scope.cancel()
        may_end.set()
        # The event loop is held: nothing but the threads themselves can take up what is queued.
        assert ended.wait(10)
    assert ran == [0] * THREADS


def test_a_forked_child_makes_its_own() -> None:
    async def double() -> int:
        return await run_quietly(lambda: 42, anyio.CapacityLimiter(1))

    assert anyio.run(double) == 42
    child = os.fork()
    if child == 0:
        os._exit(0 if anyio.run(double) == 42 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert quiet_threads._pool is not None
