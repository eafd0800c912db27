"""The driver of the worker machine: read, decide, commit under compare-and-set, again on conflict."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import anyio

from modelexpress_rl.server.quotas import worker_quota
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import Committed, Store, StoredWorker, StoreUnavailable
from statemachines import worker
from statemachines.ids import ModelName, VersionId, WorkerId
from statemachines.kernel import Reason, Refused
from statemachines.worker import Leave, Register, Report, WorkerLost, WorkerRecord, WorkerRole


@dataclass(frozen=True, slots=True)
class _Change:
    """The record to store (None: to erase), and the effects of that."""

    record: WorkerRecord | None
    effects: tuple[WorkerLost, ...] = ()


_Decide: TypeAlias = Callable[[StoredWorker | None, int], Awaitable[_Change]]


class Workers:
    """Registers, renews and forgets workers; `lost` is told of each life that ended early."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        lost: Callable[[ModelName, WorkerLost], None],
        armed: Callable[[int | None], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._lost = lost
        self._armed = armed
        self._quota = worker_quota(store, settings)

    async def register(
        self, worker_id: WorkerId, role: WorkerRole, model_name: ModelName, ttl_ms: int
    ) -> WorkerRecord:
        """Register, or renew where role and model are the same and the life is not over.

        Raises:
            Refused: the id is live with another role or model, or the model has its quota of workers.
        """

        async def change(stored: StoredWorker | None, now_ms: int) -> _Change:
            if stored is not None and worker.live(stored.record, now_ms):
                event = Register(role, model_name, ttl_ms, stored.record.life)
            else:
                event = Register(role, model_name, ttl_ms, await self._store.next_sequence())
            if stored is None:
                await self._quota.require_room(model_name)
                return _Change(worker.begin(worker_id, event, now_ms))
            decision = worker.decide(stored.record, event, now_ms)
            return _Change(decision.record, decision.effects)

        record = await self._commit(worker_id, change)
        assert record is not None
        return record

    async def leave(self, worker_id: WorkerId) -> bool:
        """End a registration now; False where there was none that is live."""
        left = False

        async def change(stored: StoredWorker | None, now_ms: int) -> _Change:
            nonlocal left
            left = stored is not None and worker.live(stored.record, now_ms)
            if stored is None:
                return _Change(None)
            decision = worker.decide(stored.record, Leave(), now_ms)
            return _Change(decision.record, decision.effects)

        await self._commit(worker_id, change)
        return left

    async def report(self, worker_id: WorkerId, serving: VersionId | None, uncertain: bool) -> WorkerRecord:
        """Note which version a generator serves.

        Raises:
            Refused: the worker is not registered, has expired, or is no generator.
        """

        async def change(stored: StoredWorker | None, now_ms: int) -> _Change:
            if stored is None or not worker.live(stored.record, now_ms):
                raise Refused(
                    Reason.PRECONDITION,
                    f"worker {worker_id} is not registered, or its registration expired",
                )
            decision = worker.decide(stored.record, Report(serving, uncertain), now_ms)
            return _Change(decision.record, decision.effects)

        record = await self._commit(worker_id, change)
        assert record is not None
        return record

    async def forget(self, worker_id: WorkerId) -> None:
        """Erase a registration whose retention is over; nothing where it isn't."""

        async def change(stored: StoredWorker | None, now_ms: int) -> _Change:
            if stored is None or now_ms >= self._wake_at_ms(stored.record):
                return _Change(None)
            return _Change(stored.record)

        await self._commit(worker_id, change)

    def _wake_at_ms(self, record: WorkerRecord) -> int:
        return record.deadline_ms + self._settings.retention_ms

    async def _commit(self, worker_id: WorkerId, decide: _Decide) -> WorkerRecord | None:
        """Commit what `decide` makes of the registration; answers the record that is stored then.

        A renewal rests on the registration being live: the store refuses it once that has lapsed.
        """
        timeout_s = self._settings.command_timeout_s
        try:
            with anyio.fail_after(timeout_s):
                return await self._until_committed(worker_id, decide)
        except TimeoutError as error:
            raise StoreUnavailable(f"the store did not complete the change within {timeout_s:g} s") from error

    async def _until_committed(self, worker_id: WorkerId, decide: _Decide) -> WorkerRecord | None:
        attempt = 0
        while True:
            read = await self._store.read_workers([worker_id])
            stored = read.workers.get(worker_id)
            before = stored.record if stored else None
            change = await decide(stored, read.now_ms)
            if change.record == before:
                return before
            lives = before is not None and worker.live(before, read.now_ms)
            wake_at_ms = self._wake_at_ms(change.record) if change.record else None
            result = await self._store.commit_worker(
                worker_id,
                change.record,
                expected_revision=stored.revision if stored else None,
                valid_until_ms=before.deadline_ms if before and lives else None,
                wake_at_ms=wake_at_ms,
            )
            if isinstance(result, Committed):
                self._armed(wake_at_ms)
                for effect in change.effects:
                    assert before is not None
                    self._lost(before.model_name, effect)
                return change.record
            attempt += 1
            await anyio.sleep(random.random() * min(0.002 * attempt, 0.05))
