"""How a handler's failure becomes a status of the wire."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

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

    A fault of ours is INTERNAL without its details; they are in the log.
    """

    @functools.wraps(handler)
    async def answered(self: Any, request: Request, context: Context) -> Response:
        try:
            return await handler(self, request, context)
        except Exception as error:
            await _abort(error, handler.__name__, context)
            raise

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


async def _abort(error: Exception, rpc: str, context: Context) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, QuotaExceeded):
        _LOG.warning("%s: %s", rpc, error)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
    if isinstance(error, Refused):
        await context.abort(CODES[error.reason], error.message)
    if isinstance(error, TryAgainError):
        _LOG.log(logging.DEBUG if isinstance(error, Stopping) else logging.WARNING, "%s: %s", rpc, error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    _LOG.error("%s failed", rpc, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{rpc} failed inside the server; its log says why")
