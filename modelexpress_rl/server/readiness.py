"""Whether this server can do its work, which is whether its store answers; told to gRPC's health service.

The services, and "" (the whole), are SERVING while the store answers. `liveness` is SERVING as long as
the process answers at all: restarting the server doesn't mend a store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.server.observer import Observer
from modelexpress_rl.server.stores.port import Store

_LOG = logging.getLogger(__name__)

LIVENESS = "liveness"
EVERY_S = 2.0
TIMEOUT_S = 2.0
NOT_YET = "nobody has looked at the store yet"


class Readiness:
    """Looks at the store now and then; `why_not` is blank while all is well."""

    def __init__(
        self, store: Store, health: health_aio.HealthServicer, services: Sequence[str], observer: Observer
    ) -> None:
        self._store = store
        self._health = health
        self._services = tuple(services)
        self._observer = observer
        self.why_not = NOT_YET
        self.stopping = False

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await anyio.sleep(EVERY_S)

    async def look(self) -> None:
        """Ask the store for something small, and tell what came of it."""
        try:
            with anyio.fail_after(TIMEOUT_S):
                await self._store.next_wake_ms()
            why_not = ""
        except ModelExpressError as error:
            why_not = str(error)
        except TimeoutError:
            why_not = f"the store did not answer within {TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001 - a fault of the store's adapter is no reason to stop looking
            _LOG.exception("looking at the store")
            why_not = f"looking at the store failed: {type(error).__name__}"
        if self.stopping:
            return
        self._observer.store_reachable(not why_not)
        if bool(why_not) != bool(self.why_not) or self.why_not == NOT_YET:
            if why_not:
                _LOG.error("not ready: %s", why_not)
            else:
                _LOG.info("ready")
            await self._tell(ready=not why_not)
        self.why_not = why_not

    async def begin(self) -> None:
        """Look for the first time; a store that is away is no reason not to start."""
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._tell(ready=False)
        await self.look()

    def stop(self) -> None:
        """Not ready from now on, whatever the store says."""
        self.stopping = True
        self.why_not = "the server is stopping"

    async def _tell(self, *, ready: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if ready else answer.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)
