"""The store that all replicas share, and the way from each to it, which may be slow, lossy or cut.

The records are in the memory store, which keeps the contract of every store; this adds what a network
and a failover do: delays, lost replies, outages, missed changes, and a store that comes back empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import Change, Committed, Resync, StoreUnavailable, VersionEntry
from statemachines.ids import VersionId, WorkerId
from statemachines.worker import WorkerRecord
from tests.simulation.clocks import SimStoreClock
from tests.simulation.loop import Process


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit, as it happened: what was stored before and after it, and the store's clock then."""

    now_ms: int
    subject: VersionId | WorkerId
    before: VersionEntry | WorkerRecord | None
    after: VersionEntry | WorkerRecord | None
    by: str


@dataclass
class StoreWays:
    """What is wrong between replicas and the store at present."""

    latency_s: tuple[float, float] = (0.0002, 0.003)
    loses: float = 0.0
    out: bool = False


class SharedStore:
    """The records, and who is told of commits."""

    def __init__(self, clock: SimStoreClock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.ways = StoreWays()
        self.on_commit: Callable[[Commit], None] = lambda commit: None
        self.births = 0
        self._feeds: list[_Feed] = []
        self.records = self._born()

    def _born(self) -> MemoryStore:
        self.births += 1
        made = MemoryStore(self.clock)
        made._store_id = f"store-{self.births}"
        return made

    def flush(self) -> None:
        """The store comes back empty, under another id."""
        self.records = self._born()
        self.resync()

    def resync(self) -> None:
        """Whoever listens for changes may have missed some."""
        for feed in self._feeds:
            feed.offer(Resync())

    def committed(self, commit: Commit, change: Change | None) -> None:
        """Tell of a commit."""
        self.on_commit(commit)
        if change is not None:
            for feed in self._feeds:
                if self.ways.out:
                    feed.missed = True
                else:
                    feed.offer(change)

    @contextlib.contextmanager
    def feed(self) -> Any:
        feed = _Feed()
        self._feeds.append(feed)
        try:
            yield feed
        finally:
            self._feeds.remove(feed)

    def forget(self, process: Process) -> None:
        """A replica died: its subscription goes with it."""
        self._feeds = [feed for feed in self._feeds if feed.owner is not process]


@dataclass(eq=False)
class _Feed:
    owner: Process | None = None
    missed: bool = False
    pending: list[Change | Resync] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, change: Change | Resync) -> None:
        if self.missed:
            self.missed, change = False, Resync()
        if change not in self.pending:
            self.pending.append(change)
            self.arrived.set()

    async def read(self) -> AsyncIterator[Change | Resync]:
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            taken, self.pending = self.pending, []
            for change in taken:
                yield change


class SimStore:
    """The store as one replica reaches it; implements `stores.port.Store`.

    `before_commit` and `after_commit` are called around each commit: a replica may die there.
    """

    kind: ClassVar[str] = "memory"

    def __init__(self, shared: SharedStore, process: Process) -> None:
        self._shared = shared
        self._process = process
        self.before_commit: Callable[[], None] = lambda: None
        self.after_commit: Callable[[], None] = lambda: None

    @property
    def store_id(self) -> str:
        return self._shared.records.store_id

    async def close(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        async def reached(*args: Any, **named: Any) -> Any:
            await self._there()
            answer = await getattr(self._shared.records, name)(*args, **named)
            await self._back()
            return answer

        return reached

    async def commit_version(self, uid: VersionId, entry: VersionEntry | None, **how: Any) -> Any:
        return await self._commit("commit_version", "_versions", uid, entry, how)

    async def commit_worker(self, worker_id: WorkerId, record: WorkerRecord | None, **how: Any) -> Any:
        return await self._commit("commit_worker", "_workers", worker_id, record, how)

    @contextlib.asynccontextmanager
    async def changes(self) -> AsyncIterator[AsyncIterator[Change | Resync]]:
        with self._shared.feed() as feed:
            feed.owner = self._process
            yield feed.read()

    async def _commit(self, method: str, table: str, subject: Any, after: Any, how: dict[str, Any]) -> Any:
        await self._there()
        self.before_commit()
        await self._gone_where_killed()
        shared, records = self._shared, self._shared.records
        stored = getattr(records, table).get(subject)
        result = await getattr(records, method)(subject, after, **how)
        if isinstance(result, Committed):
            before = None if stored is None else stored.entry if table == "_versions" else stored.record
            change = None
            if table == "_versions" and (known := after or before) is not None:
                change = Change(subject, known.record.spec.model_name)
            now_ms = shared.clock.now_ms()
            shared.committed(Commit(now_ms, subject, before, after, self._process.name), change)
            self.after_commit()
            await self._gone_where_killed()
        await self._back()
        return result

    async def _gone_where_killed(self) -> None:
        if not self._process.alive:
            await asyncio.sleep(0)  # never returns: nothing of a dead process runs again

    async def _there(self) -> None:
        ways, rng = self._shared.ways, self._shared.rng
        await asyncio.sleep(rng.uniform(*ways.latency_s))
        if ways.out or (ways.loses and rng.random() < ways.loses):
            raise StoreUnavailable("the simulation cut the way to the store")

    async def _back(self) -> None:
        ways, rng = self._shared.ways, self._shared.rng
        if ways.loses or ways.out:
            await asyncio.sleep(rng.uniform(*ways.latency_s))
            if ways.out or rng.random() < ways.loses:
                raise StoreUnavailable("the simulation lost the store's reply")
