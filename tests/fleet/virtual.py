"""Fleets on virtual time: an hour passes in no time, and everything follows from one seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests.simulation.clocks import SimClock
from tests.simulation.loop import SimLoop, determinism

T = TypeVar("T")


def on_virtual_time(work: Callable[[SimClock], Awaitable[T]], *, seed: int = 0) -> tuple[T, float]:
    """What `work` returns, and how many virtual seconds that took."""
    with determinism(seed):
        loop = SimLoop(random.Random(seed))
        asyncio.set_event_loop(loop)
        try:
            clock = SimClock(loop, offset_ms=1_000_000, rate=1.0)
            answer = loop.run_until_complete(work(clock))  # type: ignore[arg-type]
            took_s = loop.time()
            left = [task for task in asyncio.all_tasks(loop) if not task.done()]
            assert not left, left
            assert not loop.failures, loop.failures
            return answer, took_s
        finally:
            loop.close()
            asyncio.set_event_loop(None)
