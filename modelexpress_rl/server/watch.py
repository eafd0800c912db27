"""Watching: each change is read once and handed to every watcher, who keeps only the newest.

A watcher that is slow therefore holds up nobody and holds one status per version; what it misses are
states in between, never the newest. A status that says nothing new is not sent again, apart from the
heartbeats. `follow_version` and `follow_model` are the streams of our service.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskStatus

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.server import wire
from modelexpress_rl.server.fold import unknown
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.stores.port import Place, Resync, StoreUnavailable
from statemachines.ids import ModelName, VersionId
from statemachines.kernel import Refused
from statemachines.version import VersionState

_LOG = logging.getLogger(__name__)

RETRY_S = 0.5
PAGE = 100
_QUIET = (v1.VERSION_STATE_STAGING, v1.VERSION_STATE_READY)

K = TypeVar("K", VersionId, ModelName)


class _Watcher:
    """The newest status (None: gone) of each version that changed since its reader last looked."""

    __slots__ = ("arrived", "changed", "resync")

    def __init__(self) -> None:
        self.changed: dict[VersionId, v1.VersionStatus | None] = {}
        self.resync = False
        self.arrived = anyio.Event()

    def offer(self, uid: VersionId, status: v1.VersionStatus | None) -> None:
        self.changed[uid] = status
        self.arrived.set()

    def take(self) -> dict[VersionId, v1.VersionStatus | None]:
        self.arrived = anyio.Event()
        taken, self.changed = self.changed, {}
        return taken


class _Watchers(Generic[K]):
    """The watchers by what they watch."""

    def __init__(self) -> None:
        self._of: dict[K, set[_Watcher]] = {}

    def of(self, key: K) -> frozenset[_Watcher]:
        return frozenset(self._of.get(key, ()))

    def keys(self) -> list[K]:
        return list(self._of)

    def all(self) -> list[_Watcher]:
        return [watcher for watchers in self._of.values() for watcher in watchers]

    @contextmanager
    def watching(self, key: K) -> Iterator[_Watcher]:
        watcher = _Watcher()
        self._of.setdefault(key, set()).add(watcher)
        try:
            yield watcher
        finally:
            self._of[key].discard(watcher)
            if not self._of[key]:
                del self._of[key]


class WatchHub:
    """All watchers of one server, fed by the store's changes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._versions: _Watchers[VersionId] = _Watchers()
        self._models: _Watchers[ModelName] = _Watchers()
        self._closed = False

    @property
    def watchers(self) -> int:
        """How many streams are open."""
        return len(self._versions.all()) + len(self._models.all())

    def close(self) -> None:
        """End every stream, saying that the server stops."""
        self._closed = True
        for watcher in (*self._versions.all(), *self._models.all()):
            watcher.arrived.set()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hand on every change; never ends by itself."""
        async with self._registry.store.changes() as changes:
            task_status.started()
            async for change in changes:
                if isinstance(change, Resync):
                    for uid in self._versions.keys():  # noqa: SIM118 - a list of our own
                        await self._hand_on(uid, None)
                    for watcher in self._models.all():
                        watcher.resync = True
                        watcher.arrived.set()
                elif self._versions.of(change.uid) or self._models.of(change.model_name):
                    await self._hand_on(change.uid, change.model_name)

    async def _hand_on(self, uid: VersionId, model_name: ModelName | None) -> None:
        while True:
            try:
                status = await self.status(uid)
                break
            except StoreUnavailable as error:
                _LOG.warning("watch: %s; trying again", error)
                await anyio.sleep(RETRY_S)
            except ModelExpressError as error:
                _LOG.error("watch: %s", error)
                return
        for watcher in self._versions.of(uid):
            watcher.offer(uid, status)
        if model_name is not None:
            for watcher in self._models.of(model_name):
                watcher.offer(uid, status)

    async def status(self, uid: VersionId) -> v1.VersionStatus | None:
        """What is true of a version now; None where it is unknown."""
        try:
            return wire.status_out(await self._registry.view(uid))
        except Refused:
            return None

    async def follow_version(
        self, uid: VersionId, *, from_revision: int | None, wait_for_creation: bool, heartbeat_ms: int
    ) -> AsyncIterator[v1.VersionStatus | None]:
        """The status now, then each change, until RETIRED or FORGOTTEN; None: a heartbeat before creation.

        Raises:
            Refused: NOT_FOUND, unless it is to wait for the creation.
            StoreUnavailable: the store is away, or the server stops.
        """
        with self._versions.watching(uid) as watcher:
            last = await self.status(uid)
            if last is None and not wait_for_creation:
                raise unknown(uid)
            if last is not None and (_is_last(last) or last.revision != from_revision):
                yield last
            while last is None or not _is_last(last):
                silent = not await self._arrived(watcher, heartbeat_ms)
                taken = {uid: await self.status(uid)} if silent else watcher.take()
                status = taken.get(uid)
                if status is None and last is not None and uid in taken:
                    status = _forgotten(last)
                if silent or (status is not None and (last is None or _says_more(status, last))):
                    yield status
                    last = status

    async def follow_model(
        self, model_name: ModelName, *, heartbeat_ms: int
    ) -> AsyncIterator[v1.WatchModelResponse]:
        """Every version that is there, the mark that these were all, then each change; without end.

        Raises:
            StoreUnavailable: the store is away, or the server stops.
        """
        with self._models.watching(model_name) as watcher:
            last: dict[VersionId, v1.VersionStatus] = {}
            async for present in self._present(model_name):
                last[VersionId(present.version_id)] = present
                yield v1.WatchModelResponse(status=present)
            yield v1.WatchModelResponse(snapshot_complete=True)
            while True:
                if not await self._arrived(watcher, heartbeat_ms):
                    yield v1.WatchModelResponse()
                changed = watcher.take()
                if watcher.resync:
                    watcher.resync = False
                    changed |= dict.fromkeys(last) | await self._all_present(model_name)
                for uid, status in changed.items():
                    known = last.get(uid)
                    if status is None:
                        if known is not None:
                            yield v1.WatchModelResponse(status=_forgotten(last.pop(uid)))
                    elif known is None or _says_more(status, known):
                        last[uid] = status
                        yield v1.WatchModelResponse(status=status)

    async def _arrived(self, watcher: _Watcher, heartbeat_ms: int) -> bool:
        """Whether a change arrived before the stream had been silent for too long."""
        with anyio.move_on_after(heartbeat_ms / 1000):
            await watcher.arrived.wait()
        if self._closed:
            raise StoreUnavailable("the server is stopping: watch again, at another or once it is back")
        return watcher.arrived.is_set()

    async def _present(self, model_name: ModelName) -> AsyncIterator[v1.VersionStatus]:
        after = None
        while True:
            page = await self._registry.list_versions(model_name, after=after, limit=PAGE)
            for found in page:
                if found.record.state is not VersionState.FORGOTTEN:
                    yield wire.status_out(found)
            if len(page) < PAGE:
                return
            after = Place(model_name, page[-1].record.sequence)

    async def _all_present(self, model_name: ModelName) -> dict[VersionId, v1.VersionStatus | None]:
        return {VersionId(status.version_id): status async for status in self._present(model_name)}


def _is_last(status: v1.VersionStatus) -> bool:
    return status.state in (v1.VERSION_STATE_RETIRED, v1.VERSION_STATE_FORGOTTEN)


def _forgotten(last: v1.VersionStatus) -> v1.VersionStatus:
    gone = v1.VersionStatus()
    gone.CopyFrom(last)
    gone.state = v1.VERSION_STATE_FORGOTTEN
    gone.reason = "the store no longer has it"
    return gone


def _says_more(status: v1.VersionStatus, last: v1.VersionStatus) -> bool:
    """Whether a watcher learns something from `status` that `last` has not told it."""
    return status.revision >= last.revision and _content(status) != _content(last)


def _content(status: v1.VersionStatus) -> v1.VersionStatus:
    content = v1.VersionStatus()
    content.CopyFrom(status)
    content.ClearField("now_unix_ms")
    content.ClearField("revision")
    if content.state in _QUIET:  # each renewal moves it, and nobody waits for it before the release
        content.ClearField("last_lease_deadline_unix_ms")
    return content
