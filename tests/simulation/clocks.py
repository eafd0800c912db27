"""Clocks of processes and of the store: each begins somewhere and runs a little fast or slow."""

from __future__ import annotations

import asyncio

from tests.simulation.loop import SimLoop


class SimClock:
    """Implements both `modelexpress_rl.clock.Clock` (seconds) and, with `store`, that of the server."""

    def __init__(self, loop: SimLoop, *, offset_ms: int, rate: float) -> None:
        self._loop = loop
        self._offset_ms = offset_ms
        self._rate = rate

    def now_ms(self) -> int:
        return self._offset_ms + int(self._loop.time() * 1000 * self._rate)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(delay_s, 0) / self._rate)


class SimStoreClock(SimClock):
    """The clock that a store lives by; its sleeps are in milliseconds."""

    async def sleep(self, duration_ms: float) -> None:
        await super().sleep(duration_ms / 1000)
