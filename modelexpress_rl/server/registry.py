"""The registry: drives the version, worker and lease machines over a store.

Every command becomes an event of a machine, decided against what is true at its moment and committed
under compare-and-set (`lanes.py`, `fold.py`); effects are performed after the commit. Reads settle in
memory and never write (`views.py`). The registry itself keeps nothing that a restart would miss.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.server import commands, creation
from modelexpress_rl.server.fold import Command, Fold, Outcome
from modelexpress_rl.server.lanes import Lanes
from modelexpress_rl.server.observer import NOBODY, Observer
from modelexpress_rl.server.policy import superseded
from modelexpress_rl.server.quotas import require_room_for_shards, version_quota
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import Place, Store, StoreUnavailable, VersionEntry
from modelexpress_rl.server.views import View, view, views
from modelexpress_rl.server.workers import Workers
from statemachines.ids import ModelName, VersionId
from statemachines.kernel import Refused
from statemachines.spec import VersionSpec
from statemachines.version import VersionState
from statemachines.version_records import ModelReady
from statemachines.worker import WorkerLost, WorkerRecord

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Registry:
    """Commands and reads of versions, and `workers`; use `Registry.running`."""

    def __init__(
        self, store: Store, settings: Settings, tasks: TaskGroup, observer: Observer = NOBODY
    ) -> None:
        self.store = store
        self.settings = settings
        self._tasks = tasks
        self._listeners: list[Callable[[int | None], None]] = []
        self.lanes = Lanes(
            store,
            tasks,
            timeout_s=settings.command_timeout_s,
            perform=self._perform,
            armed=self._armed,
            observer=observer,
        )
        self._versions = version_quota(store, settings)
        self.workers = Workers(store, settings, lost=self._worker_lost, armed=self._armed)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, store: Store, settings: Settings | None = None, observer: Observer = NOBODY
    ) -> AsyncIterator[Registry]:
        """A registry whose tasks live as long as the context."""
        async with anyio.create_task_group() as tasks:
            try:
                yield cls(store, settings or Settings(), tasks, observer)
            finally:
                tasks.cancel_scope.cancel()

    async def create(self, uid: VersionId | None, spec: VersionSpec) -> View:
        """Create a version, or answer the record of an equal request; see `creation.create`."""
        creating = creation.create(
            self.store, uid, spec, self.settle, self._require_room, self.settings.claim_ttl_ms
        )
        found, is_new = await self._bounded(creating)
        if is_new:
            _tell(found.entry, "new")
        if is_new and found.record.state is VersionState.READY:
            self._after_ready(ModelReady(spec.model_name, found.record.uid))
        return found

    async def command(self, uid: VersionId, command: Command) -> Outcome:
        """Decide and commit a command of `commands`.

        Raises:
            Refused: the version is unknown, or the machine refuses.
            StoreUnavailable: it could not be committed in time; it may still be.
        """
        return await self.lanes.submit(uid, command)

    async def settle(self, uid: VersionId) -> None:
        """Commit what is due on a version; nothing where it is unknown."""
        try:
            await self.command(uid, commands.SETTLE)
        except Refused as refusal:
            _LOG.debug("nothing to settle: %s", refusal.message)

    async def view(self, uid: VersionId) -> View:
        """What is true of a version now; see `views.view`."""
        return await self._bounded(view(self.store, uid))

    async def list_versions(
        self, model_name: ModelName | None, *, after: Place | None = None, limit: int = 100
    ) -> list[View]:
        """What is true of the versions after a place, by (model, sequence); FORGOTTEN ones included."""

        async def read() -> list[View]:
            now_ms = await self.store.now_ms()
            stored = await self.store.list_versions(model_name, after=after, limit=limit)
            return await views(self.store, stored, now_ms)

        return await self._bounded(read())

    async def registrations(self, model_name: ModelName | None) -> tuple[int, list[WorkerRecord]]:
        """Every worker that is still remembered, by id, and the store's clock."""
        read = await self._bounded(self.store.list_workers(model_name))
        return read.now_ms, [read.workers[worker_id].record for worker_id in sorted(read.workers)]

    async def _require_room(self, spec: VersionSpec) -> None:
        require_room_for_shards(
            "the new version", len(spec.expected_slots), self.settings.max_shards_per_version
        )
        await self._versions.require_room(spec.model_name)

    def on_armed(self, listener: Callable[[int | None], None]) -> None:
        """Call `listener` with each wake that this server commits."""
        self._listeners.append(listener)

    def _armed(self, wake_at_ms: int | None) -> None:
        for listener in self._listeners:
            listener(wake_at_ms)

    async def _bounded(self, reading: Awaitable[T]) -> T:
        try:
            with anyio.fail_after(self.settings.command_timeout_s):
                return await reading
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the store did not answer within {self.settings.command_timeout_s:g} s"
            ) from error

    # Effects. A commit never waits for them: each is a task of its own, and is repeated by a later
    # event of the same kind where the server dies before it is done.

    def _perform(self, folded: Fold) -> None:
        if folded.entry.record.state is not folded.came_from:
            _tell(folded.entry, folded.came_from.value)
        for effect in folded.effects:
            if isinstance(effect, ModelReady):
                self._after_ready(effect)

    def _after_ready(self, effect: ModelReady) -> None:
        if self.settings.keep_last_of(effect.model_name):
            self._tasks.start_soon(self._quietly, self._keep_last, effect.model_name, effect.uid)

    def _worker_lost(self, model_name: ModelName, effect: WorkerLost) -> None:
        self._tasks.start_soon(self._quietly, self._recheck, model_name, effect.worker_id)

    async def _keep_last(self, model_name: ModelName, newer: str) -> None:
        keep_last = self.settings.keep_last_of(model_name)
        active = [
            found
            for uid in await self.store.active_versions(model_name)
            if (found := await self._seen(uid)) is not None
        ]
        for uid in superseded([found.record for found in active], keep_last):
            command = commands.supersede(newer, self.settings.drain_deadline_ms, self.settings.retention_ms)
            await self.command(uid, command)

    async def _recheck(self, model_name: ModelName, worker_id: str) -> None:
        """Have the versions that a lost worker published look at their coverage; RETIRED ones can't."""
        for uid in await self.store.active_versions(model_name):
            read = await self.store.read_version(uid)
            if read.stored is not None and any(
                shard.worker_id == worker_id for shard in read.stored.entry.record.publications.values()
            ):
                await self.settle(uid)

    async def _seen(self, uid: VersionId) -> View | None:
        try:
            return await self.view(uid)
        except Refused:
            return None

    async def _quietly(self, effect: Callable[[ModelName, str], Awaitable[None]], *about: str) -> None:
        try:
            await effect(ModelName(about[0]), about[1])
        except (ModelExpressError, Refused) as error:
            _LOG.warning("after the commit that concerned %s: %s", " ".join(about), error)
        except Exception:  # noqa: BLE001 - an effect must not end the server
            _LOG.exception("after the commit that concerned %s", " ".join(about))


def _tell(entry: VersionEntry, came_from: str) -> None:
    """A line in the log for each state that a version enters."""
    record = entry.record
    ids = {"version_id": record.uid, "model_name": record.spec.model_name, "state": record.state.value}
    reason = f" ({entry.reason})" if entry.reason else ""
    _LOG.info("version %s: %s -> %s%s", record.uid, came_from, record.state.value, reason, extra=ids)
