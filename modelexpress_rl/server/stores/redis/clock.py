"""The store's clock as this server knows it: it never stands still, and never goes back.

Redis' clocks are machines' clocks. Those of two nodes differ, one may be set back, and a replica that
takes over may be behind. So the store's clock is the one that is furthest ahead: each server remembers
the newest time that it was told, moves it on by its own steady clock, and hands it to every script as the
least that the time can be. What a script was told so is never ahead of the clock that it came from.
"""

from __future__ import annotations

import time

from modelexpress_rl.server.clock import Clock

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class StoreTime:
    """The first two arguments of every script; `clock` is a test's, which then rules."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._ahead_ms: int | None = None

    def arguments(self) -> tuple[str | int, str | int]:
        """The time, where a test's clock rules, or empty; and the least that it can be now."""
        if self._clock is not None:
            return self._clock.now_ms(), 0
        return "", self.least_ms()

    def least_ms(self) -> int:
        """What the store's clock shows at least; 0 before it was heard."""
        return 0 if self._ahead_ms is None else _steady_ms() + self._ahead_ms

    def now_ms(self) -> int:
        """The time now, as far as this server knows; 0 before it heard any."""
        return self.least_ms() if self._clock is None else self._clock.now_ms()

    def heard(self, now_ms: int) -> int:
        """Note a time that the store told; answers it."""
        ahead_ms = now_ms - _steady_ms()
        if self._ahead_ms is None or ahead_ms > self._ahead_ms:
            self._ahead_ms = ahead_ms
        return now_ms


def _steady_ms() -> int:
    return time.clock_gettime_ns(_STEADY) // 1_000_000
