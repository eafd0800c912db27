"""What operators see of a server: metrics, readiness, logs and spans; and that it stops gracefully."""

from __future__ import annotations

import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.to_thread
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelexpress_rl import logs
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.errors import UsageError
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.observed_rpcs import ids_of
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import StoreUnavailable
from tests.server.api import GENERATOR, Api, eventually, refused, shard_of
from tests.server.process import serve

pytestmark = pytest.mark.anyio

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


class Ops:
    """A server with a metrics port."""

    def __init__(self, running: Running, channel: grpc.aio.Channel) -> None:
        self.running = running
        self.channel = channel
        self.api = Api(channel)

    async def get(self, path: str) -> tuple[int, str]:
        return await http_get(self.running.metrics_port or 0, path)

    async def metrics(self) -> dict[str, float]:
        status, text = await self.get("/metrics")
        assert status == 200
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def http_get(port: int, path: str, *, raw: bytes | None = None) -> tuple[int, str]:
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(raw or f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            received = b""
            try:
                while True:
                    received += await stream.receive()
            except anyio.EndOfStream:
                pass
    head, _, body = received.decode().partition("\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


@pytest.fixture
async def ops() -> AsyncIterator[Ops]:
    async with (
        serving(MemoryStore(), metrics_port=0) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield Ops(running, channel)


class TestMetrics:
    async def test_rpcs_by_method_and_code(self, ops: Ops) -> None:
        await ops.api.create()
        await refused(ops.api.get("none"), grpc.StatusCode.NOT_FOUND)
        await refused(ops.api.register(""), grpc.StatusCode.INVALID_ARGUMENT)
        metrics = await ops.metrics()
        assert metrics['mx_rl_rpcs_total{code="OK",method="RefitService/CreateWeightVersion"}'] == 1
        assert metrics['mx_rl_rpcs_total{code="NOT_FOUND",method="RefitService/GetWeightVersion"}'] == 1
        assert metrics['mx_rl_rpcs_total{code="INVALID_ARGUMENT",method="RefitService/RegisterWorker"}'] == 1
        assert metrics['mx_rl_rpc_seconds_count{method="RefitService/CreateWeightVersion"}'] == 1
        assert metrics['mx_rl_rpcs_in_flight{method="RefitService/CreateWeightVersion"}'] == 0

    async def test_versions_coverage_leases_and_workers(self, ops: Ops) -> None:
        await ops.api.make_ready("ready")
        await ops.api.create("staging", slots=("a", "b", "c"))
        await ops.api.publish("a", "t0", uid="staging")
        await ops.api.create("gone")
        await ops.api.delete("gone")
        await ops.api.register("g", GENERATOR)
        await ops.api.lease("g", uid="ready")
        report = v1.ReportServingRequest(worker_id="g", version_id="ready")
        await ops.api.control.ReportServing(report)
        metrics = await ops.metrics()
        of_model = {name: value for name, value in metrics.items() if 'model="org/model"' in name}
        states = {"READY": 1, "STAGING": 1, "RETIRED": 1, "DEGRADED": 0, "RELEASING": 0}
        for state, count in states.items():
            assert of_model[f'mx_rl_versions{{model="org/model",state="{state}"}}'] == count
        assert of_model['mx_rl_slots_expected{model="org/model"}'] == 5
        assert of_model['mx_rl_slots_covered{model="org/model"}'] == 3
        assert of_model['mx_rl_leases{model="org/model"}'] == 1
        assert of_model['mx_rl_workers{life="LIVE",model="org/model",role="TRAINER"}'] == 2
        assert of_model['mx_rl_generators_on_newest{model="org/model"}'] == 1
        assert of_model['mx_rl_generators_uncertain{model="org/model"}'] == 0

    async def test_commits_and_groups(self, ops: Ops) -> None:
        await ops.api.register("t0")
        await ops.api.create(slots=[f"s{n}" for n in range(40)])
        async with anyio.create_task_group() as tasks:
            for n in range(40):
                tasks.start_soon(ops.api.publish, f"s{n}", "t0")
        metrics = await ops.metrics()
        assert metrics["mx_rl_commit_group_size_sum"] == 40
        assert 1 <= metrics["mx_rl_commits_total"] == metrics["mx_rl_commit_group_size_count"] < 40
        assert metrics["mx_rl_commit_conflicts_total"] == 0
        assert metrics['mx_rl_store_seconds_count{operation="commit_version"}'] >= 2

    async def test_watchers_and_streams(self, ops: Ops) -> None:
        await ops.api.create()
        call = ops.api.control.WatchVersion(v1.WatchVersionRequest(version_id="v"))
        await anext(aiter(call))
        metrics = await ops.metrics()
        assert metrics["mx_rl_watchers"] == 1
        assert metrics['mx_rl_rpcs_in_flight{method="RefitControlService/WatchVersion"}'] == 1
        call.cancel()

        async def ended() -> bool:
            name = 'mx_rl_rpcs_total{code="CANCELLED",method="RefitControlService/WatchVersion"}'
            now = await ops.metrics()
            return now["mx_rl_watchers"] == 0 and now.get(name) == 1

        await eventually(ended)

    async def test_a_store_that_is_away(self, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
        async def away(*arguments: Any, **named: Any) -> Any:
            raise StoreUnavailable("the store failed: disk is full")

        store = ops.running.registry.store
        for name in ("next_wake_ms", "list_versions", "list_workers"):
            monkeypatch.setattr(store, name, away)
        await ops.running.readiness.look()
        metrics = await ops.metrics()
        assert metrics["mx_rl_store_reachable"] == 0
        assert not any(name.startswith("mx_rl_versions") for name in metrics)

    async def test_expiry_lag(self, ops: Ops) -> None:
        async def told() -> bool:
            return (await ops.metrics())["mx_rl_expiry_lag_seconds"] < 1

        await eventually(told)

    async def test_a_census_is_not_taken_at_every_scrape(
        self, ops: Ops, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await ops.metrics()

        async def again(*arguments: Any, **named: Any) -> Any:
            raise AssertionError("taken again")

        monkeypatch.setattr(ops.running.registry, "list_versions", again)
        await ops.metrics()


class TestHttp:
    async def test_what_is_not_there(self, ops: Ops) -> None:
        assert (await ops.get("/nothing"))[0] == 404
        assert (await ops.get("/metrics?name=x"))[0] == 200
        port = ops.running.metrics_port or 0
        assert (await http_get(port, "", raw=b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405
        assert (await http_get(port, "", raw=b"hello\r\n\r\n"))[0] == 400
        assert (await http_get(port, "", raw=b"GET /" + b"x" * 20_000))[0] == 400
        assert (await http_get(port, "", raw=b"\r\n\r\n"))[0] == 0
        assert (await ops.get("/healthz")) == (200, "ok\n")

    async def test_a_port_that_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"--metrics-port: .*{port}: the port is taken"):
                async with serving(MemoryStore(), metrics_port=port):
                    pass


class TestReadiness:
    async def test_it_follows_the_store(self, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
        services = ("", "model_express.refit.RefitService", "modelexpress_rl.v1.RefitControlService")
        assert (await ops.get("/readyz")) == (200, "ok\n")
        assert {await ops.health(service) for service in services} == {SERVING}

        async def away() -> None:
            raise StoreUnavailable("the store failed: disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(ops.running.registry.store, "next_wake_ms", away)
            await ops.running.readiness.look()
            assert (await ops.get("/readyz")) == (503, "the store failed: disk is full\n")
            assert (await ops.get("/healthz")) == (200, "ok\n")
            assert {await ops.health(service) for service in services} == {NOT_SERVING}
            assert await ops.health("liveness") == SERVING
        await ops.running.readiness.look()
        assert (await ops.get("/readyz")) == (200, "ok\n")
        assert {await ops.health(service) for service in services} == {SERVING}

    async def test_it_starts_without_its_store_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def away() -> None:
            raise StoreUnavailable("nobody listens there")

        store = MemoryStore()
        monkeypatch.setattr(store, "next_wake_ms", away)
        async with (
            serving(store, metrics_port=0) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            ops = Ops(running, channel)
            assert await ops.get("/readyz") == (503, "nobody listens there\n")
            assert await ops.health("") == NOT_SERVING


class TestLogs:
    @pytest.fixture
    def log(self) -> Iterator[io.StringIO]:
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        stream = io.StringIO()
        logs.configure("json", "info", stream)
        yield stream
        root.handlers[:] = handlers
        root.setLevel(level)

    async def test_each_state_of_a_version_with_its_id(self, ops: Ops, log: io.StringIO) -> None:
        await ops.api.make_ready()
        await ops.api.delete()
        lines = [json.loads(line) for line in log.getvalue().splitlines()]
        seen = [(line["version_id"], line["state"]) for line in lines if "state" in line]
        assert seen == [("v", "STAGING"), ("v", "READY"), ("v", "RELEASING")]
        assert {line["model_name"] for line in lines if "state" in line} == {"org/model"}

    async def test_what_goes_wrong_names_version_and_worker(
        self, ops: Ops, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def broken(uid: str, command: Any) -> Any:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(ops.running.registry, "command", broken)
        await refused(ops.api.publish("s0", "t7", uid="v9"), grpc.StatusCode.INTERNAL)
        (line,) = [json.loads(line) for line in log.getvalue().splitlines() if '"ERROR"' in line]
        assert (line["version_id"], line["worker_id"]) == ("v9", "t7")
        assert line["rpc"] == "RefitService/CreateWeightVersionShard"
        assert "RuntimeError: secret detail" in line["exception"]

    async def test_nothing_secret(self) -> None:
        """Not even at DEBUG, and not from the libraries."""
        async with serve("--log-level", "debug", "--log-format", "json") as running:
            async with grpc.aio.insecure_channel(running.address) as channel:
                request = v1.GetServerInfoRequest()
                call = Api(channel).control.GetServerInfo
                await call(request, metadata=(("authorization", "Bearer hunter2"),))
            assert await running.end() == 0
            written = (await running.process.stderr.read()).decode()
        assert "RefitControlService/GetServerInfo" in written
        assert "hunter2" not in written

    def test_text(self, log: io.StringIO) -> None:
        logs.configure("text", "info", log)
        with logs.about(version_id="v7"):
            logging.getLogger("x").info("hello", extra={"worker_id": "t1", "other": "no"})
        assert log.getvalue().endswith("INFO x: hello [version_id=v7 worker_id=t1]\n")

    def test_an_id_forges_no_line(self, log: io.StringIO) -> None:
        logs.configure("text", "info", log)
        with logs.about(version_id="v\nERROR x: \x1b[31mforged"):
            logging.getLogger("x").info("version %s: new", "v\rERROR x: forged")
        (line,) = log.getvalue().splitlines()
        assert line.isprintable()

    def test_ids(self) -> None:
        request = v1.RetractShardRequest(version_id="v", worker_id="w")
        assert ids_of(request) == {"version_id": "v", "worker_id": "w"}
        assert ids_of(shard_of("s", "t")) == {"version_id": "v", "worker_id": "t"}
        assert ids_of(v1.GetServerInfoRequest()) == {}


class TestStopping:
    async def test_calls_in_progress_are_answered_and_watchers_told(self) -> None:
        under_way, answered = anyio.Event(), anyio.Event()

        async def call_slowly(api: Api, running: Running) -> None:
            read = running.registry.view

            async def slowly(uid: Any) -> Any:
                under_way.set()
                await anyio.sleep(0.3)
                return await read(uid)

            running.registry.view = slowly  # type: ignore[method-assign]
            assert (await api.get()).uid == "v"
            answered.set()

        async with anyio.create_task_group() as tasks:
            async with serving(MemoryStore(), metrics_port=0) as running:
                channel = grpc.aio.insecure_channel(running.address)
                api = Api(channel)
                await api.create()
                watch = aiter(api.control.WatchVersion(v1.WatchVersionRequest(version_id="v")))
                await anext(watch)
                tasks.start_soon(call_slowly, api, running)
                await under_way.wait()
            with anyio.fail_after(10):
                await answered.wait()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(watch)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "stopping" in (caught.value.details() or "")
            await channel.close()
