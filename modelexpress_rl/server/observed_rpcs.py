"""An interceptor that tells of every RPC: to the observer, to the trace that the caller began, to the log.

It is the outermost one, so that what another interceptor refuses is counted too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from modelexpress_rl import logs, tracing
from modelexpress_rl.server.observer import Observer

_LOG = logging.getLogger(__name__)

SLOW_S = 1.0
_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
_PROBES = ("grpc.health.", "grpc.reflection.")


class ObservedRpcs(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of the method, with us around it; None where there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        path: str = handler_call_details.method
        known = self._wrapped.get(path)
        if known is None or known[0] is not handler:
            known = self._wrapped[path] = (handler, self._wrap(path, handler))
        return known[1]

    def _wrap(self, path: str, handler: Any) -> Any:
        method = path.rpartition(".")[2]  # Service/Method
        quiet = path.removeprefix("/").startswith(_PROBES)
        if handler.unary_unary is not None:
            behaviour = handler.unary_unary

            async def unary(request: Any, context: Any) -> Any:
                with self._observed(method, request, context, stream=False, quiet=quiet):
                    return await behaviour(request, context)

            return grpc.unary_unary_rpc_method_handler(
                unary, handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None:
            streamed: Callable[[Any, Any], AsyncIterator[Any]] = handler.unary_stream

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                with self._observed(method, request, context, stream=True, quiet=quiet):
                    async for response in streamed(request, context):
                        yield response

            return grpc.unary_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        return handler

    @contextmanager
    def _observed(
        self, method: str, request: Any, context: Any, *, stream: bool, quiet: bool
    ) -> Iterator[None]:
        ids = _ids(request)
        call = _Call(method)
        self._observer.rpc_began(method)
        try:
            # A stream is suspended in the contexts of others: neither fields nor a span may stay set there.
            if stream or quiet:
                yield
            else:
                with logs.about(rpc=method, **ids), _span(method, ids, context):
                    yield
        except BaseException as error:
            call.code = _code_of(error, context)
            raise
        finally:
            took_s = time.perf_counter() - call.began_s
            self._observer.rpc_ended(method, call.code, took_s, stream=stream)
            if not quiet:
                _log(method, call.code, took_s, ids, slow=not stream and took_s >= SLOW_S)


@dataclass(slots=True)
class _Call:
    method: str
    code: str = "OK"
    began_s: float = 0.0

    def __post_init__(self) -> None:
        self.began_s = time.perf_counter()


def _span(method: str, ids: dict[str, str], context: Any) -> Any:
    if not tracing.active():
        return tracing.span(method)
    carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    attributes = {"rpc.system": "grpc", "rpc.method": method, **{f"mx.{key}": ids[key] for key in ids}}
    return tracing.span(method, kind="SERVER", attributes=attributes, carrier=carrier)


def _log(method: str, code: str, took_s: float, ids: dict[str, str], *, slow: bool) -> None:
    level = logging.WARNING if slow else logging.DEBUG
    if _LOG.isEnabledFor(level):
        extra = {"rpc": method, "code": code, "duration_ms": round(took_s * 1000, 3), **ids}
        _LOG.log(level, "%s: %s after %.1f ms", method, code, took_s * 1000, extra=extra)


def _code_of(error: BaseException, context: Any) -> str:
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "CANCELLED"
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code, "UNKNOWN") if code else "UNKNOWN"


def _ids(request: Any) -> dict[str, str]:
    """The version and the worker that a request names, wherever it has them."""
    names = request.DESCRIPTOR.fields_by_name
    ids: dict[str, str] = {}
    if "version_id" in names:
        ids["version_id"] = request.version_id
    elif "uid" in names:
        ids["version_id"] = request.uid
    if "worker_id" in names:
        ids["worker_id"] = request.worker_id
    for name in ("shard", "worker"):
        if name in names and names[name].message_type is not None:
            ids |= _ids(getattr(request, name))
    return ids
