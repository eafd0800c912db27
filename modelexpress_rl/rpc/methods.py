"""RPCs as attributes: declared once on a client's class, awaited or opened on its instances."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Generic, TypeVar, overload

from google.protobuf.message import Message

from modelexpress_rl.rpc.channel import Client, Metadata

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


class Unary(Generic[Q, A]):
    """A unary RPC, declared once as a class attribute of a client and called on its instances."""

    def __init__(self, service: str, name: str, request_type: type[Q], answer_type: type[A]) -> None:
        self.path = f"/{service}/{name}"
        self.name = name
        self.request_type = request_type
        self.answer_type = answer_type

    @overload
    def __get__(self, client: None, owner: type[Client]) -> Unary[Q, A]: ...
    @overload
    def __get__(self, client: Client, owner: type[Client]) -> BoundUnary[Q, A]: ...
    def __get__(self, client: Client | None, owner: type[Client]) -> Unary[Q, A] | BoundUnary[Q, A]:
        return self if client is None else BoundUnary(client, self)


class BoundUnary(Generic[Q, A]):
    """A unary RPC of one client."""

    __slots__ = ("_client", "_method")

    def __init__(self, client: Client, method: Unary[Q, A]) -> None:
        self._client = client
        self._method = method

    async def __call__(
        self, request: Q, *, timeout_s: float | None = None, metadata: Metadata | None = None
    ) -> A:
        """Sends `request` and returns the answer; the client's `rpc_timeout_s` bounds it by default.

        `metadata` are headers of this call alone.

        Raises:
            RpcError: every failure, as the subclass of its status.
            UsageError: the token file can't be read.
        """
        if metadata is None:
            return await self._client.call(self._method, request, timeout_s)
        return await self._client.call(self._method, request, timeout_s, metadata)


class ServerStream(Generic[Q, A]):
    """A server-streaming RPC, declared once as a class attribute of a client."""

    def __init__(self, service: str, name: str, request_type: type[Q], answer_type: type[A]) -> None:
        self.path = f"/{service}/{name}"
        self.name = name
        self.request_type = request_type
        self.answer_type = answer_type

    @overload
    def __get__(self, client: None, owner: type[Client]) -> ServerStream[Q, A]: ...
    @overload
    def __get__(self, client: Client, owner: type[Client]) -> BoundStream[Q, A]: ...
    def __get__(self, client: Client | None, owner: type[Client]) -> ServerStream[Q, A] | BoundStream[Q, A]:
        return self if client is None else BoundStream(client, self)


class BoundStream(Generic[Q, A]):
    """A server-streaming RPC of one client."""

    __slots__ = ("_client", "_method")

    def __init__(self, client: Client, method: ServerStream[Q, A]) -> None:
        self._client = client
        self._method = method

    def __call__(
        self, request: Q, *, silence_s: float | None = None
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[A]]:
        """Opens the stream: `async with ...(request) as messages: async for message in messages`.

        Leaving the block ends the stream. At most 16 messages wait to be taken; then the server is
        slowed down. A stream that says nothing for `silence_s` (default: the client's
        `rpc_timeout_s`), its first message included, is DeadlineExceeded and its connection dropped.

        Raises:
            RpcError: from the iterator, as the subclass of the status.
        """
        silence_s = self._client.rpc_timeout_s if silence_s is None else silence_s
        return self._client.stream(self._method, request, silence_s)
