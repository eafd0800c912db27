"""The operators' side of a server: readiness, metrics, and the port where both are read."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from modelexpress_rl.errors import ModelExpressError, UsageError
from modelexpress_rl.server.census import Censuses
from modelexpress_rl.server.observer import NOBODY, Observer
from modelexpress_rl.server.ops_http import Answer, serving_http
from modelexpress_rl.server.readiness import Readiness
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.release import server_version
from modelexpress_rl.server.watch import WatchHub

if TYPE_CHECKING:
    from modelexpress_rl.server.metrics import Metrics


def observer_for(metrics_port: int | None) -> Observer:
    """Who counts, where somebody may read it.

    Raises:
        UsageError: prometheus_client is not installed.
    """
    if metrics_port is None:
        return NOBODY
    try:
        from modelexpress_rl.server.metrics import Metrics
    except ImportError as error:
        raise UsageError(
            "--metrics-port needs prometheus_client: pip install 'modelexpress-rl[ops]'"
        ) from error
    return Metrics()


@asynccontextmanager
async def serving_ops(
    listener: socket.socket | None,
    observer: Observer,
    registry: Registry,
    hub: WatchHub,
    readiness: Readiness,
) -> AsyncIterator[int | None]:
    """Serve `/metrics`, `/healthz`, `/readyz` while the context lasts; nothing where there is no socket."""
    if listener is None:
        yield None
        return
    from modelexpress_rl.server.metrics import CONTENT_TYPE, Metrics

    assert isinstance(observer, Metrics)
    _introduce(observer, registry, hub)
    censuses = Censuses(registry)

    async def metrics() -> Answer:
        try:
            census = await censuses.now()
        except ModelExpressError:
            census = None  # the store is away: the metrics that say so are what is wanted now
        return Answer(200, observer.exposition(census), CONTENT_TYPE)

    async def alive() -> Answer:
        return Answer(200, b"ok\n")

    async def ready() -> Answer:
        why_not = readiness.why_not
        return Answer(503, f"{why_not}\n".encode()) if why_not else Answer(200, b"ok\n")

    routes = {"/metrics": metrics, "/healthz": alive, "/readyz": ready}
    async with serving_http(listener, routes) as bound:
        yield bound


def _introduce(metrics: Metrics, registry: Registry, hub: WatchHub) -> None:
    metrics.about(server_version(), registry.store.kind, lambda: hub.watchers, lambda: registry.lanes.busy)
