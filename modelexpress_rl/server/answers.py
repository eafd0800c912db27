"""How a handler's failure becomes a status of the wire."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
import grpc
import grpc.aio

from modelexpress_rl.errors import TryAgainError
from modelexpress_rl.server.quotas import QuotaExceeded
from modelexpress_rl.server.stores.port import Stopping
from statemachines.kernel import Reason, Refused

_LOG = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Any, Any]

CODES = {
    Reason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Reason.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
}


def unary(
    handler: Callable[[Any, Request, Any], Awaitable[Response]],
) -> Callable[[Any, Request, Any], Awaitable[Response]]:
    """A unary handler whose failures are answered in the words of whoever refused.

    A fault of ours is INTERNAL without its details; they are in the log. The handler runs under its
    caller's deadline, so that a store that is in trouble can say so before the caller gives up.
    """

    @functools.wraps(handler)
    async def answered(self: Any, request: Request, context: Context) -> Response:
        try:
            with anyio.move_on_after(context.time_remaining()):
                return await handler(self, request, context)
        except Exception as error:
            await _abort(error, handler.__name__, context)
            raise
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"{handler.__name__}: no answer in time")
        raise AssertionError("unreachable: abort raises")

    return answered


def stream(
    handler: Callable[[Any, Request, Any], AsyncIterator[Response]],
) -> Callable[[Any, Request, Any], AsyncIterator[Response]]:
    """As `unary`, for a handler that yields its answers."""

    @functools.wraps(handler)
    async def answered(self: Any, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            async for response in handler(self, request, context):
                yield response
        except Exception as error:
            await _abort(error, handler.__name__, context)
            raise

    return answered


class Sparingly:
    """Logs a line of a kind at most once in `every_s`, and with the next one how many were left out.

    While a store is away every worker of a fleet asks again and again, and each of them is refused.
    """

    def __init__(self, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now = now
        self._next_s: dict[object, float] = {}
        self._left_out: dict[object, int] = {}

    def warning(self, message: str, kind: object) -> None:
        """Log `message`, unless one of its `kind` was logged just now."""
        if self._now() < self._next_s.get(kind, float("-inf")):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        left_out = self._left_out.pop(kind, 0)
        self._next_s[kind] = self._now() + self._every_s
        _LOG.warning("%s%s", message, f" (and {left_out} like it before)" if left_out else "")


_outages = Sparingly(every_s=10.0)


async def _abort(error: Exception, rpc: str, context: Context) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, QuotaExceeded):
        _LOG.warning("%s: %s", rpc, error)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
    if isinstance(error, Refused):
        await context.abort(CODES[error.reason], error.message)
    if isinstance(error, TryAgainError):
        if not isinstance(error, Stopping):
            _outages.warning(f"{rpc}: {error}", kind=type(error))
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    _LOG.error("%s failed", rpc, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{rpc} failed inside the server; its log says why")
