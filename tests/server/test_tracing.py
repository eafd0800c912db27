"""Spans from a client's call through the server to its store, and nothing where nobody traces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from modelexpress_rl import tracing
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.server.app import serving
from modelexpress_rl.server.stores.memory import MemoryStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def exported() -> Iterator[list[object]]:
    """The spans that end, of this test alone."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    spans: list[object] = []

    class Keep(SpanExporter):
        def export(self, ended: object) -> SpanExportResult:
            spans.extend(ended)  # type: ignore[call-overload]
            return SpanExportResult.SUCCESS

    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Keep()))
    before = api._TRACER_PROVIDER
    api._TRACER_PROVIDER = provider
    try:
        yield spans
    finally:
        api._TRACER_PROVIDER = before
        provider.shutdown()


async def test_one_trace_from_client_to_store(exported: list[object]) -> None:
    async with serving(MemoryStore()) as running, ControlPlane.dial(running.address) as plane:
        worker = refit.WorkerRegistration(worker_id="t", role=refit.WORKER_ROLE_TRAINER, model_name="m")
        await plane.register_worker(refit.RegisterWorkerRequest(worker=worker, ttl_seconds=60))
        await plane.create_weight_version(
            refit.CreateWeightVersionRequest(
                model_name="m",
                idempotency_key="k",
                payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
                expected_source_slots=["s"],
                state=refit.WEIGHT_VERSION_STATE_STAGING,
                uid="v",
            )
        )
        exported.clear()
        shard = refit.WeightVersionShard(
            version_id="v",
            source_slot_id="s",
            worker_id="t",
            tensor_count=1,
            total_bytes=1,
            manifest_digest="d",
            manifest_endpoint="h:1",
        )
        await plane.create_weight_version_shard(refit.CreateWeightVersionShardRequest(shard=shard))
    spans = {span.name: span for span in exported}
    client = spans["CreateWeightVersionShard"]
    server = spans["RefitService/CreateWeightVersionShard"]
    group = spans["commit group"]
    stored = spans["store commit_version"]
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id
    assert dict(server.attributes)["mx.version_id"] == "v"
    assert dict(server.attributes)["mx.worker_id"] == "t"
    # A group serves many callers: it is a trace of its own, linked to theirs.
    assert group.parent is None
    assert [link.context.span_id for link in group.links] == [server.context.span_id]
    assert dict(group.attributes) == {"mx.version_id": "v", "mx.group_size": 1}
    assert stored.parent.span_id == group.context.span_id


def test_a_process_that_does_not_trace_imports_nothing() -> None:
    code = (
        "import sys, modelexpress_rl.cli.serve, modelexpress_rl.rpc, modelexpress_rl.tracing as t; "
        "assert not t.active() and t.here() is None and t.headers() == {}; "
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus'))]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_that_it_is_imported_means_nothing() -> None:
    """redis-py imports it wherever it is installed."""
    pytest.importorskip("opentelemetry.trace")
    assert not tracing.active()


def test_without_it_a_span_is_nothing() -> None:
    with tracing.span("x") as span:
        assert span is None
    assert tracing.trace_id() == ""
