"""The store on Redis; what lies where is in `keys.py`.

Every key has a lifetime. What ends by itself (a RETIRED version, a registration) goes an hour after its
time, also where no server is left to erase it; everything else is kept for 30 days after the last server
looked at it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import ClassVar

import anyio

from modelexpress_rl.server.stores.port import Change, Resync
from modelexpress_rl.server.stores.redis import scripts
from modelexpress_rl.server.stores.redis.changes import subscribed
from modelexpress_rl.server.stores.redis.space import FIRST, best_effort
from modelexpress_rl.server.stores.redis.versions import Versions


class RedisStore(Versions):
    """See `Store`. Nothing is connected before the first call.

    Raises:
        UsageError: the address can't be understood.
    """

    kind: ClassVar[str] = "redis"

    @property
    def store_id(self) -> str:
        """As `Store` says; empty before the first answer."""
        return self._store_id

    async def close(self) -> None:
        with anyio.move_on_after(1.0), best_effort("the sweeper's resignation"):
            if self._store_id and self._sweeps:
                await self._run(FIRST, scripts.RESIGN, [self._buckets.all[FIRST].sweeper], self._server)
        self._store_id = ""
        await self.link.close()

    async def next_wake_ms(self) -> int | None:
        versions = await self._wakes(lambda bucket: bucket.versions_due)
        workers = await self._wakes(lambda bucket: bucket.workers_due)
        return min(chain(versions, workers), default=None)

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change | Resync]]:
        return subscribed(self.link, self._buckets)
