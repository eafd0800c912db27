"""One grpclib channel and the way each call goes over it.

grpclib, because it starts no threads, survives a fork, and may be used in many event loops of one
process. Three of its habits are contained here: it ends calls by cancelling the caller's task (so each
call runs in a task of its own), it trusts a connection for as long as TCP does (so one on which
a call heard nothing until its deadline is dropped), and it has no limit for an incoming message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from ssl import SSLContext, SSLError
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

import anyio
import grpc
import grpclib.client
from google.protobuf.message import Message
from grpclib.config import Configuration
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.exceptions import H2Error

from modelexpress_rl import tracing
from modelexpress_rl.errors import StateError
from modelexpress_rl.rpc import errors, tls
from modelexpress_rl.rpc.address import Address
from modelexpress_rl.rpc.auth import Credentials, NoCredentials

if TYPE_CHECKING:
    from modelexpress_rl.rpc.methods import ServerStream, Unary

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)
T = TypeVar("T")

Metadata: TypeAlias = Mapping[str, str | bytes]
"""Headers of one call; a name that ends in `-bin` has bytes."""

MAX_MESSAGE_BYTES = 512 * 2**20
"""The largest message that a client accepts; a manifest of a huge model has some tens of MiB."""

GRPC_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""The same limit for a grpc.aio server, whose own default is 4 MiB."""

_WINDOW_BYTES = 16 * 2**20
_CLEANUP_S = 1.0
# Silence is noticed after 10 s and three unanswered probes; unacknowledged data after 20 s.
_TCP_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


class Client:
    """What the clients share: a channel that is dialled on first use, and dialled anew when it died.

    It belongs to the event loop in which it is first used. Every call has a deadline. `aclose` ends
    the calls in flight with `Unavailable`.
    """

    def __init__(
        self,
        address: Address,
        *,
        rpc_timeout_s: float = 30.0,
        credentials: Credentials | None = None,
        ssl_context: SSLContext | None = None,
        server_name: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self.rpc_timeout_s = rpc_timeout_s
        self._credentials = credentials or NoCredentials()
        self._ssl = ssl_context or (tls.client_context() if address.secure else None)
        self._server_name = server_name or self._expected_name()
        self._max_message_bytes = max_message_bytes
        self._channel: grpclib.client.Channel | None = None
        self._heard = 0
        self._closed = False

    async def aclose(self) -> None:
        """Closes the connection; idempotent. The client can't be used afterwards."""
        self._closed = True
        self._drop(self._channel)
        # The transport closes its socket in the loop's next rounds; a loop that ends now would leak it.
        with anyio.CancelScope(shield=True):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def connect(self, timeout_s: float) -> None:
        """Makes sure that there is a connection; returns at once where there is one.

        Raises:
            RpcError: there is none after `timeout_s`; nothing was sent.
        """
        channel = self._dial()
        try:
            async with asyncio.timeout(timeout_s):
                await _in_own_task(channel.__connect__())
        except Exception as error:
            self._drop(channel)
            raise self._translated(error, "connecting", timeout_s, sent=False) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def call(
        self, method: Unary[Q, A], request: Q, timeout_s: float | None, metadata: Metadata | None = None
    ) -> A:
        """One unary call; see `Unary`. A token that is refused is read again, in case it was rotated."""
        timeout_s = self.rpc_timeout_s if timeout_s is None else timeout_s
        if not tracing.active():
            return await self._authenticated(method, request, timeout_s, metadata)
        attributes = {"rpc.system": "grpc", "rpc.method": method.name, "server.address": str(self.address)}
        with tracing.span(method.name, kind="CLIENT", attributes=attributes):
            headers = {**(metadata or {}), **tracing.headers()}
            return await self._authenticated(method, request, timeout_s, headers)

    async def _authenticated(
        self, method: Unary[Q, A], request: Q, timeout_s: float, metadata: Metadata | None
    ) -> A:
        sent = {**(metadata or {}), **self._credentials.metadata()}
        try:
            return await _in_own_task(self._call(method, request, timeout_s, sent))
        except errors.Unauthenticated:
            if not self._credentials.refused():
                raise
        sent |= self._credentials.metadata()
        return await _in_own_task(self._call(method, request, timeout_s, sent))

    async def _call(self, method: Unary[Q, A], request: Q, timeout_s: float, metadata: Metadata) -> A:
        channel, heard_before = self._dial(), self._heard
        sent = False
        call = channel.request(
            method.path,
            Cardinality.UNARY_UNARY,
            method.request_type,
            method.answer_type,
            timeout=timeout_s,
            metadata=metadata,
        )
        try:
            async with call as stream:
                await stream.send_request()
                sent = True
                await stream.send_message(request, end=True)
                self._limit_incoming(stream)
                answer = await stream.recv_message()
                self._note_headers(stream.initial_metadata or {})
        except Exception as error:
            cause = self._cause(channel, call, error)
            self._judge(channel, error, silent=self._heard == heard_before)
            raise self._translated(cause, method.name, timeout_s, sent=sent) from error
        self._heard += 1
        if answer is None:
            raise self._translated(_EmptyAnswer(), method.name, timeout_s, sent=True)
        return answer

    @contextlib.asynccontextmanager
    async def stream(
        self, method: ServerStream[Q, A], request: Q, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[A], None]:
        """One server-streaming call; see `ServerStream`."""
        metadata = self._credentials.metadata()
        queue: asyncio.Queue[A | errors.RpcError | None] = asyncio.Queue(maxsize=16)
        pump = asyncio.ensure_future(self._pump(self._dial(), method, request, silence_s, metadata, queue))
        try:
            yield _Messages(queue)
        finally:
            await _ended(pump)

    async def _pump(
        self,
        channel: grpclib.client.Channel,
        method: ServerStream[Q, A],
        request: Q,
        silence_s: float,
        metadata: Metadata,
        queue: asyncio.Queue[A | errors.RpcError | None],
    ) -> None:
        heard_before, sent = self._heard, False
        call = channel.request(
            method.path,
            Cardinality.UNARY_STREAM,
            method.request_type,
            method.answer_type,
            metadata=metadata,
        )
        try:
            async with call as stream:
                async with asyncio.timeout(silence_s):
                    await stream.send_request()
                    sent = True
                    await stream.send_message(request, end=True)
                self._limit_incoming(stream)
                while True:
                    async with asyncio.timeout(silence_s):
                        message = await stream.recv_message()
                    if message is None:
                        break
                    self._heard += 1
                    await queue.put(message)
                    heard_before = self._heard
        except Exception as error:  # noqa: BLE001 (it goes to the iterator, translated)
            cause = self._cause(channel, call, error)
            self._judge(channel, error, silent=self._heard == heard_before)
            if _is_unauthenticated(cause) and self._credentials.refused():
                metadata = self._credentials.metadata()
                return await self._pump(self._dial(), method, request, silence_s, metadata, queue)
            await queue.put(self._translated(cause, method.name, silence_s, sent=sent))
        else:
            await queue.put(None)

    def _dial(self) -> grpclib.client.Channel:
        if self._closed:
            raise StateError(f"the client of {self.address} is closed")
        if self._channel is None:
            self._channel = _Channel(
                self.address.host,
                self.address.port,
                ssl=self._ssl,
                config=Configuration(
                    http2_connection_window_size=_WINDOW_BYTES,
                    http2_stream_window_size=_WINDOW_BYTES,
                    ssl_target_name_override=self._server_name,
                ),
            )
        return self._channel

    def _expected_name(self) -> str | None:
        """The name that the peer's certificate must hold; None: the host that is dialled."""
        return None

    def _note_headers(self, headers: Mapping[str, str | bytes]) -> None:
        """What came with an answer; most clients don't care."""

    def _cause(
        self, channel: grpclib.client.Channel, call: grpclib.client.Stream[Any, Any], error: Exception
    ) -> Exception:
        """What really went wrong, where grpclib tells something else."""
        lost_by = getattr(channel._protocol, "lost_by", None)
        if isinstance(error, StreamTerminatedError) and isinstance(lost_by, SSLError):
            return lost_by
        return _status_of(call, error)

    def _judge(self, channel: grpclib.client.Channel, error: Exception, *, silent: bool) -> None:
        """Drops the channel where it broke, or said nothing to any call until this one's deadline."""
        if isinstance(error, GRPCError) or _ended_alone(error):
            self._heard += 1
        elif silent or not isinstance(error, (TimeoutError, _TooLarge)):
            self._drop(channel)

    def _drop(self, channel: grpclib.client.Channel | None) -> None:
        if channel is None:
            return
        if channel is self._channel:
            self._channel = None
        protocol = channel._protocol
        transport = getattr(getattr(protocol, "connection", None), "_transport", None)
        channel.close()
        if transport is not None:
            # close() alone waits for unsent bytes, which a dead peer never takes.
            transport.abort()

    def _limit_incoming(self, stream: grpclib.client.Stream[Any, Any]) -> None:
        raw, limit = stream._stream, self._max_message_bytes
        receive = raw.recv_data

        async def limited(size: int) -> bytes:
            if size > limit:
                raise _TooLarge(f"a message of {size} bytes came, at most {limit} are accepted")
            return await receive(size)

        raw.recv_data = limited  # type: ignore[method-assign]

    def _translated(self, error: Exception, method: str, timeout_s: float, *, sent: bool) -> errors.RpcError:
        address = str(self.address)
        if isinstance(error, GRPCError):
            return errors.answered(error.status.value, error.message, method=method, address=address)
        if isinstance(error, TimeoutError):
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            details = f"{'no answer' if sent else 'no connection'} within {timeout_s:g} s"
        elif isinstance(error, _TooLarge):
            code, details = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        elif isinstance(error, (OSError, StreamTerminatedError, H2Error, AttributeError)):
            # AttributeError: grpclib deletes parts of a connection that it closes under a call.
            if words := tls.explained(error, self._server_name or self.address.host):
                return errors.TlsError(
                    grpc.StatusCode.UNAVAILABLE, words, method=method, address=address, outcome_unknown=False
                )
            code, details = grpc.StatusCode.UNAVAILABLE, str(error) or type(error).__name__
            if isinstance(error, StreamTerminatedError) and not self._heard:
                details += _doubt(self._ssl)
        else:
            code, details = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
        return errors.rpc_error(code, details, method=method, address=address, outcome_unknown=sent)


class _Channel(grpclib.client.Channel):
    """A channel that is its process's own.

    A forked child shares the socket and the epoll instance with its parent. grpclib closes what is
    destroyed open; in a child that ends, that would take the connection off its parent's event loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pid = os.getpid()
        super().__init__(*args, **kwargs)

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            super().__del__()

    def _protocol_factory(self) -> H2Protocol:
        made = super()._protocol_factory()
        return _Connection(made.handler, made.config, made.h2_config)


class _Connection(H2Protocol):
    """A connection that remembers by what it was lost: a TLS 1.3 server refuses after the handshake."""

    lost_by: BaseException | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _keep_alive(transport.get_extra_info("socket"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost_by = exc
        super().connection_lost(exc)


def _keep_alive(connection: socket.socket | None) -> None:
    """Have the kernel end a connection whose peer's host is gone: HTTP/2 pings would offend some servers."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_KEEPALIVE.items():
        if hasattr(socket, name):  # they are named so on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _doubt(ssl_context: SSLContext | None) -> str:
    """What may be meant by a connection that ends before anything was ever heard."""
    if ssl_context is None:
        return " (where the server speaks TLS, the address must begin with https://)"
    return f" (does the server demand a client certificate, {tls.CERT_VARIABLE}?)"


class _TooLarge(Exception):
    """An incoming message is over the limit."""


class _EmptyAnswer(Exception):
    """The server said OK and sent no message."""


def _status_of(call: grpclib.client.Stream[Any, Any], error: Exception) -> Exception:
    """The status that the server sent, where grpclib's client did not look for it.

    grpclib's own server answers an unknown method without a content type, and its client complains of
    that before it reads the status.
    """
    headers = dict(getattr(getattr(call, "_stream", None), "headers", None) or ())
    number = headers.get("grpc-status", "")
    if not isinstance(error, GRPCError) or "content-type" in headers or not number.isdigit():
        return error
    try:
        return GRPCError(Status(int(number)), headers.get("grpc-message"))
    except ValueError:
        return error


def _is_unauthenticated(error: Exception) -> bool:
    return isinstance(error, GRPCError) and error.status is Status.UNAUTHENTICATED


def _ended_alone(error: Exception) -> bool:
    """The peer reset this call only; the connection still carries the others."""
    return isinstance(error, StreamTerminatedError) and str(error).startswith("Stream reset by remote party")


class _Messages(Generic[A]):
    """Takes messages from a pump's queue until the end or the error that it left there."""

    def __init__(self, queue: asyncio.Queue[A | errors.RpcError | None]) -> None:
        self._queue = queue

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> A:
        item = await self._queue.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, errors.RpcError):
            raise item
        return item


async def _in_own_task(call: Coroutine[Any, Any, T]) -> T:
    """Awaits `call` in a task of its own.

    grpclib cancels the task in which a call broke and never takes that back; in the caller's task this
    would leave a count that hides a timeout around the call, and swallow a cancellation that came at
    the same moment.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            await _ended(task)
        elif not task.cancelled():
            task.exception()  # a caller that was cancelled just now does not look at it
    return task.result()


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancels `task` and waits until it ended, shielded and bounded."""
    task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait([task], timeout=_CLEANUP_S)
    if task.done() and not task.cancelled():
        task.exception()
