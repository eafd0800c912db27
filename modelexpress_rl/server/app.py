"""The server: a port, its services, and an orderly end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from modelexpress_rl import tracing
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import modelexpress_rl_pb2_grpc, refit_pb2_grpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import UsageError
from modelexpress_rl.server.clock import Clock, SystemClock
from modelexpress_rl.server.expiry import Expiry
from modelexpress_rl.server.observed_rpcs import ObservedRpcs
from modelexpress_rl.server.observed_store import observed
from modelexpress_rl.server.observer import NOBODY
from modelexpress_rl.server.ops import observer_for, serving_ops
from modelexpress_rl.server.ops_http import listen
from modelexpress_rl.server.readiness import Readiness
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.security import PLAIN, ServerSecurity
from modelexpress_rl.server.service import RefitService
from modelexpress_rl.server.service_v1 import RefitControlService
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import Store
from modelexpress_rl.server.watch import WatchHub

_LOG = logging.getLogger(__name__)

REFIT = refit.DESCRIPTOR.services_by_name["RefitService"].full_name
CONTROL = v1.DESCRIPTOR.services_by_name["RefitControlService"].full_name
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_PENDING = 100_000
STOP_GRACE_S = 5.0

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # gRPC cancels calls at random once 1,000 wait to be taken: fewer than the ranks that publish at once.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
    # Nor after 30 s of waiting: each call has its caller's deadline.
    ("grpc.server_max_unrequested_time_in_server", 600),
    # A peer that is gone without a goodbye is noticed within 30 s; clients may ping every 5 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    host: str
    port: int
    registry: Registry
    expiry: Expiry
    hub: WatchHub
    readiness: Readiness
    metrics_port: int | None = None

    @property
    def address(self) -> str:
        """What a client dials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@asynccontextmanager
async def serving(
    store: Store,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    settings: Settings | None = None,
    clock: Clock | None = None,
    metrics_port: int | None = None,
    share_port: bool = False,
    security: ServerSecurity = PLAIN,
) -> AsyncIterator[Running]:
    """Serve `store` while the context lasts; port 0 lets the kernel choose.

    At the end no new call is accepted, watchers are told, calls in progress have 5 s. The store is the
    caller's to close. With `metrics_port` (0: the kernel's choice) the host also answers `/metrics`,
    `/healthz` and `/readyz` there. `share_port` is for the processes of one supervisor, which has made
    sure that nobody else has the port. `security` says what callers have to prove.

    Raises:
        UsageError: a port can't be bound, or the metrics' library is missing.
    """
    observer = observer_for(metrics_port)
    watched = observer is not NOBODY or tracing.active()
    # Otherwise two servers could share a port, and each would get some of the requests.
    options = (*OPTIONS, ("grpc.so_reuseport", int(share_port)))
    interceptors = [ObservedRpcs(observer), *security.interceptors(observer)]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    # Ports are bound outside of the task groups, which would wrap the error.
    bound = _bind(server, host, port, security)
    metrics_socket = None if metrics_port is None else listen(host, metrics_port)
    if watched:
        store = observed(store, observer)
    async with (
        Registry.running(store, settings, observer) as registry,
        anyio.create_task_group() as tasks,
    ):
        hub = WatchHub(registry)
        expiry = Expiry(registry, clock or SystemClock(), observer)
        await tasks.start(hub.run)
        tasks.start_soon(expiry.run)
        health = await _add_services(server, registry, hub)
        readiness = Readiness(store, health, ("", REFIT, CONTROL), observer)
        await readiness.begin()
        tasks.start_soon(readiness.run)
        await server.start()
        try:
            ops = serving_ops(metrics_socket, observer, registry, hub, readiness)
            async with ops as ops_port:
                yield Running(host, bound, registry, expiry, hub, readiness, ops_port)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(STOP_GRACE_S + 2):
                readiness.stop()
                await health.enter_graceful_shutdown()
                hub.close()
                await server.stop(STOP_GRACE_S)
            tasks.cancel_scope.cancel()


async def _add_services(
    server: grpc.aio.Server, registry: Registry, hub: WatchHub
) -> health_aio.HealthServicer:
    refit_pb2_grpc.add_RefitServiceServicer_to_server(RefitService(registry), server)
    modelexpress_rl_pb2_grpc.add_RefitControlServiceServicer_to_server(
        RefitControlService(registry, hub), server
    )
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((REFIT, CONTROL, health_name, reflection.SERVICE_NAME), server)
    return health


def _bind(server: grpc.aio.Server, host: str, port: int, security: ServerSecurity) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return security.add_port(server, address)
    except RuntimeError as error:
        raise UsageError(
            f"can't listen on {address}: the port is taken, or the address is not one of this host's"
        ) from error
