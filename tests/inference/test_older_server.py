"""Against a control plane without our own service: leases and readiness by what 0.7 speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import grpc.aio
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl._pb import refit_pb2_grpc
from modelexpress_rl.errors import DeadlineExceeded, VersionGone
from modelexpress_rl.rpc import GRPC_SERVER_OPTIONS, ControlPlane, parse_address
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.service import RefitService
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.transport.inprocess import Hub
from tests.inference.publisher import create_version, whole
from tests.inference.world import Model, World, as_bytes, opened, weights

pytestmark = pytest.mark.anyio


@pytest.fixture
async def older(hub: Hub) -> AsyncIterator[World]:
    store = MemoryStore()
    async with Registry.running(store) as registry:
        server = grpc.aio.server(options=GRPC_SERVER_OPTIONS)
        refit_pb2_grpc.add_RefitServiceServicer_to_server(RefitService(registry), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        address = f"127.0.0.1:{port}"
        try:
            async with (
                ControlPlane(parse_address(address), rpc_timeout_s=5.0) as control,
                opened(address, control, hub) as world,
            ):
                yield world
        finally:
            await server.stop(grace=0)
    await store.close()


async def test_a_version_is_refitted_and_its_lease_returned(older: World) -> None:
    trainer, model = await older.trainer(), Model()
    client = await older.generator(model)
    for step in (1, 2):
        await create_version(older.control, f"v{step}", ["s0"])
        await trainer.publish(f"v{step}", "s0", whole(weights(step)))
        await client.apply_weight(await client.stage_weight(f"v{step}"))
        assert model.bytes() == as_bytes(weights(step))
    await client.close()
    # Nobody holds a lease: the shard of a released version can be withdrawn.
    await older.control.delete_weight_version(refit.DeleteWeightVersionRequest(uid="v2"))
    await older.control.delete_weight_version_shard(
        refit.DeleteWeightVersionShardRequest(version_id="v2", source_slot_id="s0", worker_id="t0")
    )


async def test_a_lease_is_renewed_during_a_long_pull(older: World) -> None:
    trainer, model = await older.trainer(), Model()
    client = await older.generator(model, lease_ttl_seconds=1)
    await create_version(older.control, "v1", ["s0"])
    await trainer.publish("v1", "s0", whole(weights(1)))
    older.hub.delay("agent-t0", 1.5)
    await client.apply_weight(await client.stage_weight("v1"))
    assert model.bytes() == as_bytes(weights(1))


async def test_staging_before_ready_polls(older: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model = await older.trainer(), Model()
    client = await older.generator(model)
    await create_version(older.control, "v1", ["s0"])
    async with anyio.create_task_group() as group:

        async def refit_v1() -> None:
            await client.apply_weight(await client.stage_weight("v1"))

        group.start_soon(refit_v1)
        await anyio.wait_all_tasks_blocked()
        await trainer.publish("v1", "s0", whole(weights(1)))
    assert model.bytes() == as_bytes(weights(1))


async def test_what_never_comes_is_bounded(older: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "0.3")
    client = await older.generator(Model())
    await create_version(older.control, "v1", ["s0"])
    with pytest.raises(DeadlineExceeded, match="v1"):
        await client.stage_weight("v1")
    await older.control.delete_weight_version(refit.DeleteWeightVersionRequest(uid="v1"))
    with pytest.raises(VersionGone, match="v1"):
        await client.stage_weight("v1")
