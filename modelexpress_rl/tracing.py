"""OpenTelemetry spans, where the process uses OpenTelemetry; nothing at all where it does not.

Tracing is on in a process that has set a tracer provider (its own code did, or it was started by
`opentelemetry-instrument`); what is done with the spans is that provider's business. Nothing is imported
here otherwise, so that a process without it pays one look into a dictionary. That the API is imported
says nothing: other libraries do so wherever it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NAME = "modelexpress_rl"
MAX_LINKS = 32


def active() -> bool:
    """Whether this process uses OpenTelemetry."""
    return _trace() is not None


@contextmanager
def span(
    name: str,
    *,
    kind: str = "INTERNAL",
    attributes: Mapping[str, str | int | float | bool] | None = None,
    carrier: Mapping[str, str] | None = None,
    links: Sequence[Any] | None = None,
) -> Iterator[Any]:
    """A span around the block; an exception that leaves it is recorded and marks it as failed.

    `carrier` holds the headers that a caller in another process sent: the span is then its child. With
    `links` (of `here`) it is a root that several spans led to, at most 32 of them. Yields the span, or
    None where nothing is traced.
    """
    trace = _trace()
    if trace is None:
        yield None
        return
    options: dict[str, Any] = {"kind": trace.SpanKind[kind], "attributes": dict(attributes or {})}
    if carrier is not None:
        options["context"] = _propagator().extract(carrier)
    if links is not None:
        from opentelemetry.context import Context

        options["context"] = Context()
        options["links"] = [trace.Link(one) for one in links[:MAX_LINKS] if one is not None]
    with trace.get_tracer(NAME).start_as_current_span(name, **options) as opened:
        yield opened


def here() -> Any:
    """The context of the span that is open here, for `links` of another; None where there is none."""
    trace = _trace()
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    return context if context.is_valid else None


def headers() -> dict[str, str]:
    """What carries the open span to a server."""
    carrier: dict[str, str] = {}
    if _trace() is not None:
        _propagator().inject(carrier)
    return carrier


def trace_id() -> str:
    """The id of the open trace in hex, or an empty string."""
    context = here()
    return "" if context is None else f"{context.trace_id:032x}"


def _trace() -> ModuleType | None:
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace


def _propagator() -> Any:
    """The headers of W3C Trace Context; another propagator would need another agreement."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
