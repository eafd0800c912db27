"""Generators that hold a version's name instead of weights, and that fail as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

import anyio

from modelexpress_rl.errors import EngineUncertain, StateError, Unavailable, VersionGone
from modelexpress_rl.fleet import Holding


class FakeGenerator:
    """A `FleetGenerator` by the book; `before` is awaited first in every call, and may fail or last long.

    What it serves is `serves`: None while it doesn't. A dead one answers nothing. A `stubborn` one doesn't
    heed a cancellation before its call is through, as one that installs in a thread.
    """

    def __init__(self, version: str | None = "v0") -> None:
        self.version = version
        self.certain = True
        self.staged: str | None = None
        self.held = False
        self.alive = True
        self.calls: list[str] = []
        self.gone: set[str] = set()
        self.before: Callable[[str, str], None] = lambda call, version: None
        self.takes_s: Callable[[str], float] = lambda call: 0.01
        self.fails_half_way = 0
        self.stubborn = False
        self.under_way = 0
        self._keep: asyncio.TimerHandle | None = None
        self._hold: asyncio.TimerHandle | None = None

    @property
    def serves(self) -> str | None:
        """The version that requests are answered with; "mixed" would be a fault."""
        if not self.alive or self.held:
            return None
        return self.version if self.certain else "mixed"

    async def stage(self, version_id: str, *, keep_s: float) -> None:
        await self._call("stage", version_id)
        if self.certain and self.version == version_id:
            return
        if version_id in self.gone:
            raise VersionGone(f"version {version_id} was released")
        self.staged = version_id
        self._keep = self._timer(self._keep, keep_s, self._give_up)

    async def install(self, version_id: str, *, hold_s: float) -> None:
        await self._call("install", version_id)
        holds_it = self.certain and self.version == version_id
        if not holds_it and self.staged != version_id:
            raise StateError(f"version {version_id} is not staged")
        self.held = True
        self._hold = self._timer(self._hold, hold_s, self._hold_is_over)
        if holds_it:
            return
        self.staged = None
        if self.fails_half_way:
            self.fails_half_way -= 1
            self.certain = False
            raise EngineUncertain(f"version {version_id}: half of it")
        self.version, self.certain = version_id, True

    async def resume(self, version_id: str) -> None:
        await self._call("resume", version_id)
        if not self.certain or self.version != version_id:
            raise StateError(f"version {version_id} is not held")
        self._serve()

    async def abort(self, version_id: str, *, back_to: str | None) -> None:
        await self._call("abort", version_id)
        if self.staged == version_id:
            self.staged = None
        if not self.certain or (self.version == version_id and version_id != back_to):
            if back_to is None or back_to in self.gone:
                raise VersionGone(f"there is no version to go back to: {back_to}")
            self.version, self.certain = back_to, True
        self._serve()

    async def holds(self) -> Holding:
        await self._call("holds", "")
        return Holding(self.version, self.certain, self.staged, self.held)

    def kill(self) -> None:
        self.alive = False
        for timer in (self._keep, self._hold):
            if timer is not None:
                timer.cancel()

    async def _call(self, call: str, version_id: str) -> None:
        self.calls.append(f"{call} {version_id}".strip())
        self._up()
        self.before(call, version_id)
        self.under_way += 1
        assert self.under_way == 1, f"{call} while another call is under way: {self.calls}"
        try:
            with anyio.CancelScope(shield=self.stubborn):
                await asyncio.sleep(self.takes_s(call))
        finally:
            self.under_way -= 1
        self._up()

    def _up(self) -> None:
        if not self.alive:
            raise Unavailable("nobody answers")

    def _serve(self) -> None:
        self.held = False
        if self._hold is not None:
            self._hold.cancel()

    def _give_up(self) -> None:
        self.staged = None

    def _hold_is_over(self) -> None:
        if self.certain:
            self.held = False

    def _timer(
        self, old: asyncio.TimerHandle | None, delay_s: float, act: Callable[[], None]
    ) -> asyncio.TimerHandle:
        if old is not None:
            old.cancel()
        # Its own timer, whoever called it: it outlives an orchestrator that is killed.
        return asyncio.get_running_loop().call_later(delay_s, act, context=Context())
