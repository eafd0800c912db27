"""Quotas: what one model or one version may take up, so that no caller fills the store.

Counting costs a look at the store. It is done now and then, and in between a server counts on by what
it adds itself; near the quota it looks again each time. So several servers may overshoot a quota by what
they add within that time, and none refuses while there is room.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import Store
from statemachines.ids import ModelName
from statemachines.kernel import Reason, Refused

RECOUNT_AFTER_S = 10.0
_KNOWN_MODELS = 1024


class QuotaExceeded(Refused):
    """There is no room for another one; the message names the quota and the option that sets it."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PRECONDITION, message)


def require_room_for_shards(version: str, wanted: int, most: int) -> None:
    """Refuse more slots or publications than a version may have.

    Raises:
        QuotaExceeded: `wanted` is over `most`.
    """
    if wanted > most:
        raise QuotaExceeded(
            f"version {version} would have {wanted} slots or publications, and this server's quota is {most} "
            "for each version (--max-shards-per-version)"
        )


@dataclass(slots=True)
class _Count:
    number: int
    counted_at_s: float


class ModelQuota:
    """How many of something each model may have."""

    def __init__(
        self,
        most: int,
        count: Callable[[ModelName], Awaitable[int]],
        refusal: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._count = count
        self._refusal = refusal
        self._clock = clock
        self._known: dict[ModelName, _Count] = {}
        self._counting: dict[ModelName, anyio.Event] = {}

    async def require_room(self, model_name: ModelName) -> None:
        """Take the room for one more.

        Raises:
            QuotaExceeded: there is none.
        """
        known = self._known.get(model_name)
        now_s = self._clock()
        is_old = known is not None and now_s - known.counted_at_s >= RECOUNT_AFTER_S
        if known is None or known.number >= self._most or (is_old and model_name not in self._counting):
            known = await self._recounted(model_name)
        if known.number >= self._most:
            raise QuotaExceeded(
                self._refusal.format(model_name=repr(model_name), number=known.number, most=self._most)
            )
        known.number += 1

    async def _recounted(self, model_name: ModelName) -> _Count:
        """Look once for all who want to know: a thousand workers register at the same moment."""
        asked_at_s = self._clock()
        while (under_way := self._counting.get(model_name)) is not None:
            await under_way.wait()
            known = self._known.get(model_name)
            if known is not None and known.counted_at_s >= asked_at_s:
                return known
        done = self._counting[model_name] = anyio.Event()
        try:
            return await self._look(model_name)
        finally:
            del self._counting[model_name]
            done.set()

    async def _look(self, model_name: ModelName) -> _Count:
        counted = _Count(await self._count(model_name), self._clock())
        self._known.pop(model_name, None)
        while len(self._known) >= _KNOWN_MODELS:
            del self._known[next(iter(self._known))]
        self._known[model_name] = counted
        return counted


def version_quota(store: Store, settings: Settings) -> ModelQuota:
    """Versions of a model that are not RETIRED."""

    async def count(model_name: ModelName) -> int:
        return len(await store.active_versions(model_name))

    return ModelQuota(
        settings.max_versions_per_model,
        count,
        "model {model_name} has {number} versions that are not retired, and this server's quota is {most} "
        "for each model (--max-versions-per-model): release old ones, or let --keep-last do it",
    )


def worker_quota(store: Store, settings: Settings) -> ModelQuota:
    """Workers of a model that are live, or expired and still remembered."""

    async def count(model_name: ModelName) -> int:
        return len((await store.list_workers(model_name)).workers)

    return ModelQuota(
        settings.max_workers_per_model,
        count,
        "model {model_name} has {number} workers, those included that expired within the retention, and this "
        "server's quota is {most} for each model (--max-workers-per-model)",
    )
