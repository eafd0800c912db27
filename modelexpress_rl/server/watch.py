"""Watching: each change is read once and handed to every watcher, who keeps only the newest.

A watcher that is slow therefore holds up nobody and holds one status per version; what it misses are
states in between, never the newest. A status that says nothing new is not sent again, apart from the
heartbeats. `follow_version` and `follow_model` are the streams of our service.
"""

from __future__ import annotations

import asyncio
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
from modelexpress_rl.server.stores.port import Place, Resync, Stopping, StoreUnavailable
from statemachines.ids import ModelName, VersionId
from statemachines.kernel import Refused
from statemachines.version import VersionState

_LOG = logging.getLogger(__name__)

RETRY_S = 0.5
PAGE = 100
LATELY_S = 1.0
_QUIET = (v1.VERSION_STATE_STAGING, v1.VERSION_STATE_READY)

K = TypeVar("K", VersionId, ModelName)


class Told:
    """A status as every watcher of it gets it: compared and put into bytes once for all of them.

    It was read between `began_s` and `ended_s`, by the loop's clock.
    """

    __slots__ = ("_encoded", "began_s", "content", "ended_s", "status")

    def __init__(self, status: v1.VersionStatus, began_s: float) -> None:
        self.status = status
        self.content = _content(status)
        self.began_s = began_s
        self.ended_s = anyio.current_time()
        self._encoded: bytes | None = None

    def encoded(self) -> bytes:
        """The WatchVersionResponse that says it."""
        if self._encoded is None:
            self._encoded = v1.WatchVersionResponse(status=self.status).SerializeToString()
        return self._encoded

    def adds_to(self, last: Told) -> bool:
        """Whether a watcher learns something from it that `last` has not told."""
        return self.content != last.content and self.is_newer_than(last)

    def is_newer_than(self, last: Told) -> bool:
        """Whether it was true later; a store that lost its last commits goes back to lower revisions."""
        return self.status.revision >= last.status.revision or self.began_s >= last.ended_s


class _Watcher:
    """The newest status (None: gone) of each version that changed since its reader last looked."""

    __slots__ = ("arrived", "changed", "resync")

    def __init__(self) -> None:
        self.changed: dict[VersionId, Told | None] = {}
        self.resync = False
        self.arrived = asyncio.Event()

    def offer(self, uid: VersionId, status: Told | None) -> None:
        self.changed[uid] = status
        self.arrived.set()

    def take(self) -> dict[VersionId, Told | None]:
        self.arrived = asyncio.Event()
        taken, self.changed = self.changed, {}
        return taken

    async def within(self, span_ms: int) -> bool:
        """Whether something arrived within the span; one timer of the loop, as there may be thousands."""
        timer = asyncio.get_running_loop().call_later(span_ms / 1000, self.arrived.set)
        try:
            await self.arrived.wait()
        finally:
            timer.cancel()
        return bool(self.changed) or self.resync


class _Watchers(Generic[K]):
    """The watchers by what they watch, in the order in which they came."""

    def __init__(self) -> None:
        self._of: dict[K, dict[_Watcher, None]] = {}

    def of(self, key: K) -> tuple[_Watcher, ...]:
        return tuple(self._of.get(key, ()))

    def keys(self) -> list[K]:
        return list(self._of)

    def all(self) -> list[_Watcher]:
        return [watcher for watchers in self._of.values() for watcher in watchers]

    @contextmanager
    def watching(self, key: K) -> Iterator[_Watcher]:
        watcher = _Watcher()
        self._of.setdefault(key, {})[watcher] = None
        try:
            yield watcher
        finally:
            del self._of[key][watcher]
            if not self._of[key]:
                del self._of[key]


class WatchHub:
    """All watchers of one server, fed by the store's changes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._versions: _Watchers[VersionId] = _Watchers()
        self._models: _Watchers[ModelName] = _Watchers()
        self._closed = False
        self._recent: dict[VersionId, tuple[float, Told | None]] = {}

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

    async def status(self, uid: VersionId) -> Told | None:
        """What is true of a version now; None where it is unknown."""
        began_s = anyio.current_time()
        try:
            return Told(wire.status_out(await self._registry.view(uid)), began_s)
        except Refused:
            return None

    async def _lately(self, uid: VersionId) -> Told | None:
        """What was true of a version at most a second ago: heartbeats of many watchers read it once."""
        now_s = anyio.current_time()
        known = self._recent.get(uid)
        if known is not None and now_s - known[0] < LATELY_S:
            return known[1]
        for old in [key for key, (read_s, _) in self._recent.items() if now_s - read_s >= LATELY_S]:
            del self._recent[old]
        status = await self.status(uid)
        self._recent[uid] = (now_s, status)
        return status

    async def follow_version(
        self, uid: VersionId, *, from_revision: int | None, wait_for_creation: bool, heartbeat_ms: int
    ) -> AsyncIterator[Told | None]:
        """The status now, then each change, until RETIRED or FORGOTTEN; None: a heartbeat before creation.

        Raises:
            Refused: NOT_FOUND, unless it is to wait for the creation.
            StoreUnavailable: the store is away, or the server stops.
        """
        with self._versions.watching(uid) as watcher:
            last = await self.status(uid)
            if last is None and not wait_for_creation:
                raise unknown(uid)
            if last is not None and (_is_last(last) or last.status.revision != from_revision):
                yield last
            while last is None or not _is_last(last):
                silent = not await self._arrived(watcher, heartbeat_ms)
                taken = watcher.take()
                if silent:
                    taken = {uid: await self._lately(uid)}
                status = taken.get(uid)
                if status is None and last is not None and uid in taken:
                    status = _forgotten(last)
                if silent and status is not None and last is not None and not status.is_newer_than(last):
                    status = last
                if silent or (status is not None and (last is None or status.adds_to(last))):
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
            last: dict[VersionId, Told] = {}
            async for present in self._present(model_name):
                last[VersionId(present.status.version_id)] = present
                yield v1.WatchModelResponse(status=present.status)
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
                            yield v1.WatchModelResponse(status=_forgotten(last.pop(uid)).status)
                    elif known is None or status.adds_to(known):
                        last[uid] = status
                        yield v1.WatchModelResponse(status=status.status)

    async def _arrived(self, watcher: _Watcher, heartbeat_ms: int) -> bool:
        """Whether a change arrived before the stream had been silent for too long."""
        arrived = await watcher.within(heartbeat_ms)
        if self._closed:
            raise Stopping("the server is stopping: watch again, at another or once it is back")
        return arrived

    async def _present(self, model_name: ModelName) -> AsyncIterator[Told]:
        after = None
        while True:
            began_s = anyio.current_time()
            page = await self._registry.list_versions(model_name, after=after, limit=PAGE)
            for found in page:
                if found.record.state is not VersionState.FORGOTTEN:
                    yield Told(wire.status_out(found), began_s)
            if len(page) < PAGE:
                return
            after = Place(model_name, page[-1].record.sequence)

    async def _all_present(self, model_name: ModelName) -> dict[VersionId, Told | None]:
        return {VersionId(one.status.version_id): one async for one in self._present(model_name)}


def _is_last(told: Told) -> bool:
    return told.status.state in (v1.VERSION_STATE_RETIRED, v1.VERSION_STATE_FORGOTTEN)


def _forgotten(last: Told) -> Told:
    gone = v1.VersionStatus()
    gone.CopyFrom(last.status)
    gone.state = v1.VERSION_STATE_FORGOTTEN
    gone.reason = "the store no longer has it"
    return Told(gone, last.ended_s)


def _content(status: v1.VersionStatus) -> bytes:
    content = v1.VersionStatus()
    content.CopyFrom(status)
    content.ClearField("now_unix_ms")
    content.ClearField("revision")
    if content.state in _QUIET:  # each renewal moves it, and nobody waits for it before the release
        content.ClearField("last_lease_deadline_unix_ms")
    return content.SerializeToString(deterministic=True)
