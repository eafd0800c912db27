"""A store in this process's memory: for tests, demos and jobs that end with their control plane."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import AsyncIterator, Collection, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar
from uuid import uuid4

from modelexpress_rl.server.clock import Clock, StoreClock, SystemClock
from modelexpress_rl.server.stores.changes import ChangeFeed
from modelexpress_rl.server.stores.port import (
    Change,
    CommitResult,
    Committed,
    KeyHolder,
    Place,
    Rejected,
    Resync,
    StoredVersion,
    StoredWorker,
    VersionEntry,
    VersionRead,
    WorkersRead,
    publishers,
)
from statemachines.ids import ModelName, VersionId, WorkerId
from statemachines.version import VersionState
from statemachines.worker import WorkerRecord

K = TypeVar("K", bound=Hashable)


class _WakeIndex(Generic[K]):
    """When each key is due; the earliest is found without looking at the others."""

    def __init__(self) -> None:
        self._due: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._pushed = 0  # breaks ties, so that keys are never compared

    def set(self, key: K, wake_at_ms: int | None) -> None:
        if self._due.get(key) == wake_at_ms:
            return
        if wake_at_ms is None:
            self._due.pop(key, None)
            return
        self._due[key] = wake_at_ms
        self._pushed += 1
        heapq.heappush(self._heap, (wake_at_ms, self._pushed, key))
        if len(self._heap) > 64 + 2 * len(self._due):  # renewals leave a stale item each
            self._heap = [item for item in self._heap if self._is_current(item)]
            heapq.heapify(self._heap)

    def earliest(self) -> int | None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int, limit: int) -> list[K]:
        taken: dict[K, tuple[int, int, K]] = {}
        while self._heap and self._heap[0][0] <= now_ms and len(taken) < limit:
            item = heapq.heappop(self._heap)
            if self._is_current(item):
                taken[item[2]] = item
        for item in taken.values():  # they stay due until a commit moves them
            heapq.heappush(self._heap, item)
        return list(taken)

    def _is_current(self, item: tuple[int, int, K]) -> bool:
        return self._due.get(item[2]) == item[0]


@dataclass(slots=True)
class _Model:
    """The versions of one model: all of them by sequence, and those that are not RETIRED."""

    by_sequence: list[tuple[int, VersionId]] = field(default_factory=list[tuple[int, VersionId]])
    active: dict[VersionId, int] = field(default_factory=dict[VersionId, int])


class MemoryStore:
    """See `Store`; nothing outlives the process."""

    kind: ClassVar[str] = "memory"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = StoreClock(clock or SystemClock())
        self._store_id = uuid4().hex
        self._sequence = 0
        self._revision = 0
        self._versions: dict[VersionId, StoredVersion] = {}
        self._models: dict[ModelName, _Model] = {}
        self._version_wakes: _WakeIndex[VersionId] = _WakeIndex()
        self._keys: dict[str, tuple[KeyHolder, int]] = {}
        self._workers: dict[WorkerId, StoredWorker] = {}
        self._worker_wakes: _WakeIndex[WorkerId] = _WakeIndex()
        self._feed = ChangeFeed()

    @property
    def store_id(self) -> str:
        return self._store_id

    async def close(self) -> None:
        return

    async def now_ms(self) -> int:
        return self.clock.now_ms()

    async def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    async def read_version(self, uid: VersionId) -> VersionRead:
        return VersionRead(self.clock.now_ms(), self._versions.get(uid))

    async def read_version_and_workers(
        self, uid: VersionId, worker_ids: Collection[WorkerId]
    ) -> tuple[VersionRead, WorkersRead]:
        read = await self.read_version(uid)
        wanted = publishers(read.stored.entry) if read.stored else set[WorkerId]()
        return read, await self.read_workers(wanted.union(worker_ids))

    async def commit_version(
        self,
        uid: VersionId,
        entry: VersionEntry | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        before = self._versions.get(uid)
        if (before.revision if before else None) != expected_revision:
            return Rejected.CONFLICT
        if self._is_late(valid_until_ms):
            return Rejected.LATE
        self._revision += 1
        self._version_wakes.set(uid, wake_at_ms)
        if entry is not None:
            self._versions[uid] = StoredVersion(entry, self._revision, wake_at_ms)
            self._list(uid, entry)
        elif before is not None:
            self._erase(uid, before)
        known = entry or (before.entry if before else None)
        if known is not None:
            self._feed.publish(Change(uid, known.record.spec.model_name))
        return Committed(self._revision)

    async def rearm(self, uid: VersionId, *, expected_revision: int, wake_at_ms: int | None) -> None:
        stored = self._versions.get(uid)
        if stored is not None and stored.revision == expected_revision:
            self._versions[uid] = StoredVersion(stored.entry, stored.revision, wake_at_ms)
            self._version_wakes.set(uid, wake_at_ms)

    async def list_versions(
        self, model_name: ModelName | None, *, after: Place | None, limit: int
    ) -> list[StoredVersion]:
        found: list[StoredVersion] = []
        for name in [model_name] if model_name is not None else sorted(self._models):
            model = self._models.get(name)
            if model is None or (after is not None and name < after.model_name):
                continue
            start = 0
            if after is not None and name == after.model_name:
                start = bisect_right(model.by_sequence, after.sequence, key=lambda item: item[0])
            for _, uid in model.by_sequence[start : start + limit - len(found)]:
                found.append(self._versions[uid])
            if len(found) >= limit:
                break
        return found

    async def active_versions(self, model_name: ModelName) -> list[VersionId]:
        model = self._models.get(model_name)
        return sorted(model.active, key=model.active.__getitem__) if model else []

    async def due_versions(self, now_ms: int, limit: int) -> list[VersionId]:
        return self._version_wakes.due(now_ms, limit)

    async def read_key(self, idempotency_key: str) -> KeyHolder | None:
        held = self._keys.get(idempotency_key)
        return held[0] if held else None

    async def claim_key(self, idempotency_key: str, holder: KeyHolder) -> KeyHolder:
        held = self._keys.get(idempotency_key)
        winner = held[0] if held else holder
        self._keys[idempotency_key] = (winner, self.clock.now_ms())
        return winner

    async def free_key(self, idempotency_key: str, uid: VersionId) -> None:
        held = self._keys.get(idempotency_key)
        if held is not None and held[0].uid == uid:
            del self._keys[idempotency_key]

    async def purge_keys(self, claimed_before_ms: int) -> int:
        orphans = [
            key
            for key, (holder, claimed_at_ms) in self._keys.items()
            if claimed_at_ms < claimed_before_ms and holder.uid not in self._versions
        ]
        for key in orphans:
            del self._keys[key]
        return len(orphans)

    async def read_workers(self, worker_ids: Collection[WorkerId]) -> WorkersRead:
        found = {one: self._workers[one] for one in worker_ids if one in self._workers}
        return WorkersRead(self.clock.now_ms(), found)

    async def commit_worker(
        self,
        worker_id: WorkerId,
        record: WorkerRecord | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        before = self._workers.get(worker_id)
        if (before.revision if before else None) != expected_revision:
            return Rejected.CONFLICT
        if self._is_late(valid_until_ms):
            return Rejected.LATE
        self._revision += 1
        if record is None:
            self._workers.pop(worker_id, None)
            self._worker_wakes.set(worker_id, None)
        else:
            self._workers[worker_id] = StoredWorker(record, self._revision)
            self._worker_wakes.set(worker_id, wake_at_ms)
        return Committed(self._revision)

    async def list_workers(self, model_name: ModelName | None) -> WorkersRead:
        found = {
            worker_id: stored
            for worker_id, stored in self._workers.items()
            if model_name is None or stored.record.model_name == model_name
        }
        return WorkersRead(self.clock.now_ms(), found)

    async def due_workers(self, now_ms: int, limit: int) -> list[WorkerId]:
        return self._worker_wakes.due(now_ms, limit)

    async def next_wake_ms(self) -> int | None:
        wakes = (self._version_wakes.earliest(), self._worker_wakes.earliest())
        return min((wake for wake in wakes if wake is not None), default=None)

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change | Resync]]:
        return self._feed.subscribe()

    def _is_late(self, valid_until_ms: int | None) -> bool:
        return valid_until_ms is not None and self.clock.now_ms() >= valid_until_ms

    def _list(self, uid: VersionId, entry: VersionEntry) -> None:
        name, sequence = _place(entry)
        model = self._models.setdefault(name, _Model())
        at = bisect_right(model.by_sequence, sequence, key=lambda item: item[0])
        if not at or model.by_sequence[at - 1] != (sequence, uid):
            insort(model.by_sequence, (sequence, uid))
        if entry.record.state is VersionState.RETIRED:
            model.active.pop(uid, None)
        else:
            model.active[uid] = sequence

    def _erase(self, uid: VersionId, stored: StoredVersion) -> None:
        name, sequence = _place(stored.entry)
        model = self._models[name]
        at = bisect_right(model.by_sequence, sequence, key=lambda item: item[0]) - 1
        del model.by_sequence[at]
        model.active.pop(uid, None)
        if not model.by_sequence:
            del self._models[name]
        del self._versions[uid]
        key = stored.entry.record.spec.idempotency_key
        if key in self._keys and self._keys[key][0].uid == uid:
            del self._keys[key]


def _place(entry: VersionEntry) -> tuple[ModelName, int]:
    return entry.record.spec.model_name, entry.record.sequence
