"""What time does by itself: lapses, drains, retirement, forgetting; whoever of several servers does it.

The loop sleeps until the store's earliest wake, has each due version settle (a commit like any other,
so that several servers may try), and purges workers that are past their retention, and claims of
idempotency keys that were never followed by a version (their server died, or lost the store, in between).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio

from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.server.clock import Clock
from modelexpress_rl.server.observer import NOBODY, Observer
from modelexpress_rl.server.registry import Registry
from statemachines.ids import VersionId, WorkerId

_LOG = logging.getLogger(__name__)

BATCH = 256
AT_ONCE = 16
# Another server may have committed an earlier wake than the one that this one sleeps for.
LONGEST_SLEEP_MS = 1_000
RETRY_MS = 1_000
# Looking for claims is looking at every key; it is done a few times in a claim's life, and seldom.
CLAIMS_AT_LEAST_EVERY_MS = 600_000
_FAR_MS = 1 << 62


class Expiry:
    """The loop; `run_once` is one round of it."""

    def __init__(self, registry: Registry, clock: Clock, observer: Observer = NOBODY) -> None:
        self._registry = registry
        self._store = registry.store
        self._clock = clock
        self._observer = observer
        self._wakes_at_ms = 0
        self._earlier = anyio.Event()
        self._claims_at_ms = 0
        registry.on_armed(self._armed)

    async def run(self) -> None:
        """Run for ever; a store that is away is tried again."""
        while True:
            try:
                pause_ms = await self.run_once()
            except ModelExpressError as error:
                _LOG.warning("expiry: %s; trying again in %d ms", error, RETRY_MS)
                pause_ms = RETRY_MS
            except Exception:  # noqa: BLE001 - time goes on, whatever is wrong with one record
                _LOG.exception("expiry: trying again in %d ms", RETRY_MS)
                pause_ms = RETRY_MS
            await self._pause(pause_ms)

    async def run_once(self) -> int:
        """Do all that is due now; answers for how many ms nothing more will be.

        Raises:
            StoreUnavailable: the store could not be reached.
        """
        now_ms = await self._store.now_ms()
        failed = False
        await self._tell_lag(now_ms)
        while due := await self._store.due_versions(now_ms, BATCH):
            failed = not await self._each(due, self._settle)
            if failed or len(due) < BATCH:
                break
        while gone := await self._store.due_workers(now_ms, BATCH):
            failed = not await self._each(gone, self._forget) or failed
            if failed or len(gone) < BATCH:
                break
        if now_ms >= self._claims_at_ms:
            claim_ttl_ms = self._registry.settings.claim_ttl_ms
            await self._store.purge_keys(now_ms - claim_ttl_ms)
            self._claims_at_ms = now_ms + min(claim_ttl_ms // 2, CLAIMS_AT_LEAST_EVERY_MS)
        self._earlier = anyio.Event()
        self._wakes_at_ms = _FAR_MS  # until it is known, any commit may be earlier
        if failed:
            return RETRY_MS
        wake_ms = await self._store.next_wake_ms()
        now_ms = await self._store.now_ms()
        pause_ms = LONGEST_SLEEP_MS if wake_ms is None else min(max(wake_ms - now_ms, 0), LONGEST_SLEEP_MS)
        self._wakes_at_ms = now_ms + pause_ms
        return pause_ms

    async def _tell_lag(self, now_ms: int) -> None:
        wake_ms = await self._store.next_wake_ms()
        self._observer.expiry_lagged(0.0 if wake_ms is None else max(now_ms - wake_ms, 0) / 1000)

    def _armed(self, wake_at_ms: int | None) -> None:
        if wake_at_ms is not None and wake_at_ms < self._wakes_at_ms:
            self._earlier.set()

    async def _pause(self, pause_ms: int) -> None:
        """Sleep, unless a commit brings the next wake forward."""
        earlier = self._earlier
        async with anyio.create_task_group() as tasks:

            async def wait_for_earlier() -> None:
                await earlier.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait_for_earlier)
            await self._clock.sleep(pause_ms)
            tasks.cancel_scope.cancel()

    async def _settle(self, uid: str) -> None:
        await self._registry.settle(VersionId(uid))

    async def _forget(self, worker_id: str) -> None:
        await self._registry.workers.forget(WorkerId(worker_id))

    async def _each(self, subjects: Sequence[str], work: Callable[[str], Awaitable[None]]) -> bool:
        """Do `work` for each, some at a time; one that fails doesn't keep the others from it."""
        all_done = True
        limiter = anyio.CapacityLimiter(AT_ONCE)

        async def one(subject: str) -> None:
            nonlocal all_done
            async with limiter:
                try:
                    await work(subject)
                except ModelExpressError as error:
                    all_done = False
                    _LOG.warning("expiry of %r: %s", subject, error)

        async with anyio.create_task_group() as tasks:
            for subject in subjects:
                tasks.start_soon(one, subject)
        return all_done
