"""The clock by which this process measures leases, registrations and timers; tests bring their own."""

from __future__ import annotations

import time
from typing import Protocol

import anyio


class Clock(Protocol):
    """A monotonic clock and the way to wait on it."""

    def now_ms(self) -> int:
        """Milliseconds since some fixed moment; never goes back."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait for `delay_s` seconds of this clock."""
        ...


class MonotonicClock:
    """The process's own monotonic clock."""

    def now_ms(self) -> int:
        """`time.monotonic`, in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    async def sleep(self, delay_s: float) -> None:
        """`anyio.sleep`."""
        await anyio.sleep(delay_s)


MONOTONIC = MonotonicClock()
