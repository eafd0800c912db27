"""A grpclib server inside a worker process: it starts no threads and survives a fork.

Two habits of grpclib are mended: a call whose peer vanished while the socket's buffer was full stays
for ever, waiting to write; and closing waits for such a call without a bound.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING, Self

import anyio
from grpclib import GRPCError, Status
from grpclib.events import RecvRequest, listen
from grpclib.protocol import H2Protocol
from grpclib.server import Server

from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc.auth import AUTHORIZATION, AcceptedTokens

if TYPE_CHECKING:
    from ssl import SSLContext

    from grpclib._typing import IServable

WORKER_ID_HEADER = "mx-worker-id-bin"
LEASE_ID_HEADER = "mx-lease-id-bin"
"""How a reader says under which lease it asks; bytes, because both are any characters."""


class EndpointServer:
    """Serves grpclib services (`*_grpc.py`'s Base classes) on one port.

    `host` is the interface to listen on, None for all. `port` 0 lets the kernel choose. Two servers
    never share a port. With `tokens` a call without one of them is UNAUTHENTICATED, unread.
    """

    def __init__(
        self,
        services: Collection[IServable],
        *,
        host: str | None = None,
        port: int = 0,
        ssl_context: SSLContext | None = None,
        tokens: AcceptedTokens | None = None,
    ) -> None:
        self._services = services
        self._ssl = ssl_context
        self._tokens = tokens
        self._host = host
        self._wanted_port = port
        self._server: _Server | None = None
        self.port = 0
        """The port that it listens on, once started."""

    async def start(self) -> None:
        """Binds and begins to serve.

        Raises:
            UsageError: the port or the host can't be bound; the message names both.
        """
        listener = _listen(self._host, self._wanted_port)
        # asyncio sets it only where the socket names its protocol, which one that was accepted here does
        # not; without it an answer waits up to 40 ms for a delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = _Server(self._services)
        if self._tokens is not None:
            listen(self._server, RecvRequest, self._require_token)
        await self._server.start(sock=listener, ssl=self._ssl)
        self.port = listener.getsockname()[1]

    async def aclose(self, *, grace_s: float = 1.0) -> None:
        """Stops listening, ends the calls in flight and closes their connections; idempotent.

        It waits at most `grace_s` for the handlers to end.
        """
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        server.abort_connections()
        with anyio.CancelScope(shield=True), anyio.move_on_after(grace_s):
            await server.wait_closed()
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _require_token(self, event: RecvRequest) -> None:
        assert self._tokens is not None
        sent = event.metadata.get(AUTHORIZATION)
        if refusal := self._tokens.accept(None if sent is None else str(sent)):
            raise GRPCError(Status.UNAUTHENTICATED, refusal)


class _Server(Server):
    def __init__(self, services: Collection[IServable]) -> None:
        super().__init__(services)
        self._connections: set[_Protocol] = set()

    def _protocol_factory(self) -> H2Protocol:
        made = super()._protocol_factory()
        return _Protocol(made, self._connections)

    def abort_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.abort()


class _Protocol(H2Protocol):
    """A connection that is known to its server, and that wakes its writers when it is lost."""

    def __init__(self, made: H2Protocol, connections: set[_Protocol]) -> None:
        super().__init__(made.handler, made.config, made.h2_config)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._raw = transport
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connections.discard(self)
        self.connection.write_ready.set()

    def abort(self) -> None:
        if isinstance(self._raw, asyncio.Transport):
            self._raw.abort()


def _listen(host: str | None, port: int) -> socket.socket:
    try:
        if host is None and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
        return socket.create_server((host or "", port), family=family)
    except OSError as error:
        where = f"{host or '*'}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"{where} is taken by another process; choose another port, or 0") from error
        raise UsageError(f"can't listen on {where}: {error}") from error
