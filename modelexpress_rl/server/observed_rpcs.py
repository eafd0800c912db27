"""An interceptor that tells of every RPC: to the observer, to the trace that the caller began, to the log.

It is the outermost one, so that what another interceptor refuses is counted too. It is on the way of every
call, so it does little: ids are looked for only when something is logged or traced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any

import grpc
import grpc.aio

from modelexpress_rl import logs, tracing
from modelexpress_rl.server.observer import Observer

_LOG = logging.getLogger(__name__)

SLOW_S = 1.0
# Where one call is slow a thousand are: their lines would be one more load.
WARN_EVERY_S = 1.0
_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
_PROBES = ("grpc.health.", "grpc.reflection.")


class ObservedRpcs(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        self._warned_at_s = -WARN_EVERY_S
        self._not_warned = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of the method, with us around it; None where there is no such method."""
        handler = await continuation(handler_call_details)
        path: str = handler_call_details.method
        known = self._wrapped.get(path)
        if known is not None and known[0] is handler:
            return known[1]
        if handler is None:
            return None
        wrapped = self._wrap(path, handler)
        self._wrapped[path] = (handler, wrapped)
        return wrapped

    def _wrap(self, path: str, handler: Any) -> Any:
        method = path.rpartition(".")[2]  # Service/Method
        quiet = path.removeprefix("/").startswith(_PROBES)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary, quiet),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream, quiet),
                handler.request_deserializer,
                _shared(handler.response_serializer),
            )
        return handler

    def _unary(self, method: str, behaviour: Any, quiet: bool) -> Any:
        observer = self._observer

        async def unary(request: Any, context: Any) -> Any:
            began_s, code = perf_counter(), "OK"
            observer.rpc_began(method)
            token = logs.about_lazily(lambda: {"rpc": method, **ids_of(request)})
            try:
                if quiet or not tracing.active():
                    return await behaviour(request, context)
                with _span(method, request, context):
                    return await behaviour(request, context)
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                took_s = perf_counter() - began_s
                observer.rpc_ended(method, code, took_s, stream=False)
                if not quiet:
                    self._log(method, code, took_s, slow=took_s >= SLOW_S)
                logs.no_longer_about(token)

        return unary

    def _stream(self, method: str, behaviour: Callable[[Any, Any], AsyncIterator[Any]], quiet: bool) -> Any:
        observer = self._observer

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            began_s, code = perf_counter(), "OK"
            observer.rpc_began(method)
            # Each call has a task of its own, so what is set here ends with it.
            logs.about_lazily(lambda: {"rpc": method, **ids_of(request)})
            try:
                async for response in behaviour(request, context):
                    yield response
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                took_s = perf_counter() - began_s
                observer.rpc_ended(method, code, took_s, stream=True)
                if not quiet:
                    self._log(method, code, took_s, slow=False)

        return stream

    def _log(self, method: str, code: str, took_s: float, *, slow: bool) -> None:
        level, more = logging.DEBUG, ""
        if slow:
            now_s = perf_counter()
            if now_s - self._warned_at_s < WARN_EVERY_S:
                self._not_warned += 1
            else:
                level, more = logging.WARNING, f" (and {self._not_warned} more)" if self._not_warned else ""
                self._warned_at_s, self._not_warned = now_s, 0
        if _LOG.isEnabledFor(level):
            extra = {"code": code, "duration_ms": round(took_s * 1000, 3)}
            _LOG.log(level, "%s: %s after %.1f ms%s", method, code, took_s * 1000, more, extra=extra)


def _shared(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """What is already in bytes, because a thousand watchers get it, is sent as it is."""

    def serialized(response: Any) -> bytes:
        encoded: Callable[[], bytes] | None = getattr(response, "encoded", None)
        return serialize(response) if encoded is None else encoded()

    return serialized


def _span(method: str, request: Any, context: Any) -> Any:
    carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    ids = {f"mx.{name}": value for name, value in ids_of(request).items()}
    attributes = {"rpc.system": "grpc", "rpc.method": method, **ids}
    return tracing.span(method, kind="SERVER", attributes=attributes, carrier=carrier)


def _code_of(error: BaseException, context: Any) -> str:
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "CANCELLED"
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code, "UNKNOWN") if code else "UNKNOWN"


def ids_of(request: Any) -> dict[str, str]:
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
            ids |= ids_of(getattr(request, name))
    return {name: value for name, value in ids.items() if value}
