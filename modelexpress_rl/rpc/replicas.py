"""Several servers on one store, used as one: each call goes to one of them, and on to the next on failure.

Every RPC of the control plane may be applied twice, so a call that broke is repeated elsewhere; the
error that is raised in the end knows whether an attempt may have been applied. A client begins at a
random server and stays there while it answers, so that many clients spread; those of a server that dies
spread over the others.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import anyio
from google.protobuf.message import Message

from modelexpress_rl.errors import TryAgainError
from modelexpress_rl.rpc.channel import Client, Metadata
from modelexpress_rl.rpc.errors import Aborted, RpcError

if TYPE_CHECKING:
    from modelexpress_rl.rpc.methods import ServerStream, Unary

Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

CONNECT_S = 3.0
LEAST_ATTEMPT_S = 1.0
SHUNNED_S = 2.0


class Replicas:
    """The clients of the servers, and which of them to use next."""

    def __init__(self, clients: Sequence[Client], *, rng: random.Random | None = None) -> None:
        self._clients = list(clients)
        self._rng = rng or random.Random()
        self._failed_at_s: dict[Client, float] = {}
        self._current = self._rng.choice(self._clients)

    @property
    def current(self) -> Client:
        """Whom the next call goes to."""
        return self._current

    async def call(
        self, method: Unary[Q, A], request: Q, timeout_s: float, metadata: Metadata | None = None
    ) -> A:
        """One unary call: at most one attempt at each server, within `timeout_s` in all.

        An attempt may take its share of the time that is left, so that a server that hangs leaves
        some for the others.
        """
        deadline_s = anyio.current_time() + timeout_s
        any_unknown = False
        for left in range(len(self._clients), 0, -1):
            client = self._current
            left_s = max(deadline_s - anyio.current_time(), 0.001)
            attempt_s = min(left_s, max(left_s / left, LEAST_ATTEMPT_S))
            try:
                await client.connect(min(attempt_s, CONNECT_S))
                attempt_s = min(attempt_s, max(deadline_s - anyio.current_time(), 0.001))
                return await client.call(method, request, attempt_s, metadata)
            except RpcError as error:
                any_unknown = error.outcome_unknown = any_unknown or error.outcome_unknown
                if not _is_its_fault(error):
                    raise
                self._leave(client)
                if left == 1 or anyio.current_time() >= deadline_s:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextlib.asynccontextmanager
    async def stream(
        self, method: ServerStream[Q, A], request: Q, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[A], None]:
        """One server-streaming call at one server; after its failure the next call goes elsewhere."""
        client = await self._reachable(silence_s)
        try:
            async with client.stream(method, request, silence_s) as messages:
                yield messages
        except RpcError as error:
            if _is_its_fault(error):
                self._leave(client)
            raise

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()

    async def _reachable(self, within_s: float) -> Client:
        deadline_s = anyio.current_time() + within_s
        for left in range(len(self._clients), 0, -1):
            client = self._current
            left_s = max(deadline_s - anyio.current_time(), 0.001)
            try:
                await client.connect(min(left_s / left, CONNECT_S))
                return client
            except RpcError:
                self._leave(client)
                if left == 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _leave(self, client: Client) -> None:
        """Use another one: at random out of those that did not fail lately, or the one that failed first."""
        now_s = anyio.current_time()
        self._failed_at_s[client] = now_s
        if client is not self._current:
            return
        others = [one for one in self._clients if one is not client] or [client]
        well = [one for one in others if now_s - self._failed_at_s.get(one, -SHUNNED_S) >= SHUNNED_S]
        if well:
            self._current = self._rng.choice(well)
        else:
            self._current = min(others, key=lambda one: self._failed_at_s[one])


def _is_its_fault(error: RpcError) -> bool:
    """Whether another server may do better: it can't be reached, hangs, stops, or lacks its store."""
    return isinstance(error, TryAgainError) and not isinstance(error, Aborted)
