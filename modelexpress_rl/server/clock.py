"""The clock that a store lives by: Unix milliseconds that never go back, and sleeping by them."""

from __future__ import annotations

import time
from typing import Protocol

import anyio

# CLOCK_BOOTTIME also counts the time that the machine was suspended: leases lapse then, too.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Where time comes from; tests bring one that only moves when it is told to."""

    def now_ms(self) -> int:
        """Unix milliseconds; never less than an earlier answer. May be called from any thread."""
        ...

    async def sleep(self, duration_ms: int) -> None:
        """Return once `duration_ms` have passed by this clock."""
        ...


class SystemClock:
    """The machine's wall clock at the start, moved on by its steady clock.

    A wall clock that is set while the server runs therefore neither expires everything at once nor
    keeps the dead alive.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.clock_gettime(_STEADY)

    def now_ms(self) -> int:
        return int((self._offset_s + time.clock_gettime(_STEADY)) * 1000)

    async def sleep(self, duration_ms: int) -> None:
        await anyio.sleep(max(duration_ms, 0) / 1000)


class StoreClock:
    """`source`, never earlier than `floor_ms`: what a store's earlier runs have already shown."""

    def __init__(self, source: Clock, floor_ms: int = 0) -> None:
        self._source = source
        self._ahead_ms = max(0, floor_ms - source.now_ms())

    def now_ms(self) -> int:
        return self._source.now_ms() + self._ahead_ms

    async def sleep(self, duration_ms: int) -> None:
        await self._source.sleep(duration_ms)
