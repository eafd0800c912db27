"""A grpclib server inside a worker process: it starts no threads and survives a fork.

Habits of grpclib are mended: a call whose peer vanished while the socket's buffer was full stays for ever,
waiting to write, and so does one whose request never comes; closing waits for such a call without a bound;
a request may be of any size; and one that can't be read is logged as a fault of ours.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Self

import anyio
from google.protobuf.message import DecodeError
from grpclib import GRPCError, Status
from grpclib.encoding.proto import ProtoCodec
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
ACCEPT_MANIFEST_HEADER = "mx-accept-manifest"
"""Encodings of manifests that a reader takes beside version 1, separated by commas."""

MAX_REQUEST_BYTES = 4 * 2**20
"""Requests are names and a few bits for each row of a manifest."""
REQUEST_TIMEOUT_S = 30.0


class EndpointServer:
    """Serves grpclib services (`*_grpc.py`'s Base classes) on one port.

    `host` is the interface to listen on, None for all. `port` 0 lets the kernel choose. Two servers
    never share a port. With `tokens` a call without one of them is UNAUTHENTICATED, unread. A request of
    more than `MAX_REQUEST_BYTES` is RESOURCE_EXHAUSTED, unread as well, one that is no message
    INVALID_ARGUMENT, and one that does not come within 30 s DEADLINE_EXCEEDED.
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
        super().__init__(services, codec=_Codec())
        self._connections: set[_Protocol] = set()

    def _protocol_factory(self) -> H2Protocol:
        made = super()._protocol_factory()
        accept = made.handler.accept

        def accept_limited(stream: Any, headers: Any, release: Any) -> None:
            _limit_incoming(stream)
            accept(stream, headers, release)

        made.handler.accept = accept_limited  # type: ignore[method-assign, assignment]
        return _Protocol(made, self._connections)

    def abort_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.abort()


class _Codec(ProtoCodec):
    def decode(self, data: bytes, message_type: Any) -> Any:
        try:
            return super().decode(data, message_type)
        except DecodeError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"the request can't be read: {error}") from error


def _limit_incoming(stream: Any) -> None:
    receive = stream.recv_data

    async def limited(size: int) -> bytes:
        if size > MAX_REQUEST_BYTES:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"a request of {size} bytes came, at most {MAX_REQUEST_BYTES} are accepted",
            )
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                data: bytes = await receive(size)
        except TimeoutError as error:
            raise GRPCError(
                Status.DEADLINE_EXCEEDED, f"the request did not come within {REQUEST_TIMEOUT_S:g} s"
            ) from error
        return data

    stream.recv_data = limited


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
