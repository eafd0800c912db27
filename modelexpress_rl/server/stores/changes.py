"""Handing changes to whoever wants to know of them in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from modelexpress_rl.server.stores.port import Change, Resync
from statemachines.ids import VersionId


class _Subscriber:
    """Holds at most one pending change per version, however slow its reader is."""

    __slots__ = ("arrived", "pending")

    def __init__(self) -> None:
        self.pending: dict[VersionId | None, Change | Resync] = {}
        self.arrived = anyio.Event()

    def offer(self, change: Change | Resync) -> None:
        self.pending[change.uid if isinstance(change, Change) else None] = change
        self.arrived.set()

    async def read(self) -> AsyncIterator[Change | Resync]:
        while True:
            await self.arrived.wait()
            self.arrived = anyio.Event()
            taken, self.pending = self.pending, {}
            for change in taken.values():
                yield change


class ChangeFeed:
    """Tells every subscriber of each change; publishing never waits."""

    def __init__(self) -> None:
        self._subscribers: set[_Subscriber] = set()

    def publish(self, change: Change | Resync) -> None:
        """Tell every subscriber; call it from the event loop's thread."""
        for subscriber in self._subscribers:
            subscriber.offer(change)

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Change | Resync]]:
        """Everything that is published from now on."""
        with self._subscribed() as subscriber:
            yield subscriber.read()

    @contextmanager
    def _subscribed(self) -> Iterator[_Subscriber]:
        subscriber = _Subscriber()
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)
