"""A clock that moves only when it is told to."""

from __future__ import annotations

import anyio


class VirtualClock:
    """See `modelexpress_rl.server.clock.Clock`; `advance` wakes whoever has slept for long enough."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._sleepers: list[tuple[int, anyio.Event]] = []

    def now_ms(self) -> int:
        return self._now_ms

    async def sleep(self, duration_ms: int) -> None:
        if duration_ms <= 0:
            await anyio.lowlevel.checkpoint()
            return
        woken = anyio.Event()
        self._sleepers.append((self._now_ms + duration_ms, woken))
        await woken.wait()

    def advance(self, duration_ms: int) -> None:
        self._now_ms += duration_ms
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self._now_ms]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self._now_ms]
        for _, woken in due:
            woken.set()
