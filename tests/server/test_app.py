"""The server beside its services: health, reflection, the other stack, and what a failure reveals."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.monitor import ReadinessMonitor
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.server.app import serving
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import StoreUnavailable
from modelexpress_rl.version import VersionState, WeightPayloadFormat, WeightVersionState
from tests.server.api import READY, Api, Server, refused, shard_of
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio


class TestBesideTheServices:
    @pytest.mark.parametrize(
        "service", ["", "model_express.refit.RefitService", "modelexpress_rl.v1.RefitControlService"]
    )
    async def test_health(self, server: Server, service: str) -> None:
        stub = health_pb2_grpc.HealthStub(server.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def test_reflection(self, server: Server) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
        call.cancel()
        assert {"model_express.refit.RefitService", "modelexpress_rl.v1.RefitControlService"} <= {
            service.name for service in answer.list_services_response.service
        }

    async def test_a_large_message(self, api: Api) -> None:
        slots = [f"{n:05}{'x' * 900}" for n in range(16_000)]  # 14 MB; the default bound is 4 MiB
        assert len((await api.create(slots=slots)).expected_source_slots) == 16_000

    async def test_slots_without_end_are_refused(self, api: Api) -> None:
        slots = [f"s{n}" for n in range(65_537)]
        await refused(api.create(slots=slots), grpc.StatusCode.INVALID_ARGUMENT, "65537")

    async def test_any_free_port_of_any_address(self) -> None:
        clock = VirtualClock()
        async with serving(MemoryStore(clock), clock=clock, host="::1") as running:
            assert running.address.startswith("[::1]:")
            async with grpc.aio.insecure_channel(running.address) as channel:
                await Api(channel).create()


class TestTheOtherStack:
    async def test_every_step_of_a_version(self, server: Server) -> None:
        async with ControlPlane.dial(server.running.address) as plane:
            for worker, role in (("t", refit.WORKER_ROLE_TRAINER), ("g", refit.WORKER_ROLE_GENERATOR)):
                registration = refit.WorkerRegistration(worker_id=worker, role=role, model_name="m")
                await plane.register_worker(refit.RegisterWorkerRequest(worker=registration, ttl_seconds=60))
            await plane.create_weight_version(
                refit.CreateWeightVersionRequest(
                    model_name="m",
                    idempotency_key="k",
                    payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
                    expected_source_slots=["s0"],
                    state=refit.WEIGHT_VERSION_STATE_STAGING,
                    uid="v",
                )
            )
            shard = shard_of("s0", "t")
            answer = await plane.create_weight_version_shard(
                refit.CreateWeightVersionShardRequest(shard=shard)
            )
            assert answer.version.state == READY
            lease = await plane.acquire_version_lease(
                v1.AcquireVersionLeaseRequest(version_id="v", worker_id="g", ttl_ms=5_000)
            )
            assert list(lease.live_publications) == [shard]

    async def test_the_control_client_and_the_monitor(self, server: Server) -> None:
        address = server.running.address
        async with (
            AsyncModelExpressControlClient.connect(address) as control,
            ReadinessMonitor.connect(address) as monitor,
        ):
            version = await control.create_weight_version(
                model_name="org/model",
                idempotency_key="k",
                payload_format=WeightPayloadFormat.FULL_TENSOR,
                expected_source_slots=["s0"],
                uid="v",
            )
            assert version.state is WeightVersionState.STAGING
            await server.api.register("t")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(monitor.wait_until_ready, "v", 10)
                await server.api.publish("s0", "t")
            status = await control.wait_for_state("v", WeightVersionState.READY, 5)
            assert status.state is VersionState.READY
            await control.delete_weight_version("v")
            listed = await control.list_weight_versions("org/model")
            assert [one.version_id for one in listed] == ["v"]


class TestFailures:
    async def test_a_fault_of_ours_reveals_nothing(
        self, server: Server, api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def broken(uid: str) -> Any:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(server.running.registry, "view", broken)
        with caplog.at_level(logging.ERROR):
            await refused(api.get(), grpc.StatusCode.INTERNAL, "GetWeightVersion failed inside the server")
        assert "secret detail" in caplog.text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.get()
        assert "secret" not in (caught.value.details() or "")

    async def test_a_store_that_is_away(
        self, server: Server, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def away(*arguments: Any, **named: Any) -> Any:
            raise StoreUnavailable("the store sqlite:x failed: disk is full")

        store = server.running.registry.store
        for name in ("read_version", "read_workers", "read_key", "list_versions", "list_workers", "now_ms"):
            monkeypatch.setattr(store, name, away)
        unavailable = grpc.StatusCode.UNAVAILABLE
        for call in (
            api.get(),
            api.create(),
            api.register("w"),
            api.publish("s", "w"),
            api.lease("w"),
            api.delete(),
            api.shards(),
            api.status(),
            api.control.ListVersions(v1.ListVersionsRequest()),
            api.control.ListWorkers(v1.ListWorkersRequest()),
        ):
            await refused(call, unavailable, "disk is full")

    async def test_a_caller_that_gives_up_leaves_the_server_well(self, server: Server, api: Api) -> None:
        await api.create()
        request = refit.GetWeightVersionRequest(uid="v")
        for _ in range(20):
            call = api.refit.GetWeightVersion(request)
            call.cancel()
        assert (await api.get()).uid == "v"
