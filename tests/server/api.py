"""A server under test on a virtual clock, and a caller that speaks to it over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import modelexpress_rl_pb2_grpc, refit_pb2_grpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.port import Store
from tests.store.virtual_clock import VirtualClock

MODEL = "org/model"
TRAINER, GENERATOR = refit.WORKER_ROLE_TRAINER, refit.WORKER_ROLE_GENERATOR
STAGING, READY, RELEASING = (
    refit.WEIGHT_VERSION_STATE_STAGING,
    refit.WEIGHT_VERSION_STATE_READY,
    refit.WEIGHT_VERSION_STATE_RELEASING,
)
FULL, DELTA, CHECKPOINT = (
    refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
    refit.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA,
    refit.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT,
)
LARGE_MESSAGES = [("grpc.max_receive_message_length", 64 * 1024 * 1024)]
S3 = refit.ObjectStorageSource(uri="s3://bucket/v/index.json", storage_type=refit.OBJECT_STORAGE_TYPE_S3)


class Api:
    """The RPCs with the arguments that tests care about."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.refit = refit_pb2_grpc.RefitServiceStub(channel)
        self.control = modelexpress_rl_pb2_grpc.RefitControlServiceStub(channel)

    async def register(
        self, worker_id: str, role: int = TRAINER, *, model: str = MODEL, ttl_s: int = 60
    ) -> refit.WorkerRegistration:
        worker = refit.WorkerRegistration(worker_id=worker_id, role=role, model_name=model)
        request = refit.RegisterWorkerRequest(worker=worker, ttl_seconds=ttl_s)
        return (await self.refit.RegisterWorker(request)).worker

    async def create(
        self,
        uid: str | None = "v",
        *,
        key: str | None = None,
        model: str = MODEL,
        slots: Sequence[str] = ("s0", "s1"),
        fmt: int = FULL,
        base: str | None = None,
        storage: refit.ObjectStorageSource | None = None,
        state: int = STAGING,
    ) -> refit.WeightVersion:
        request = refit.CreateWeightVersionRequest(
            model_name=model,
            idempotency_key=f"key of {uid}" if key is None else key,
            payload_format=fmt,
            base_version_id=base,
            expected_source_slots=[] if storage is not None else slots,
            object_storage=storage,
            state=state,
            uid=uid,
        )
        return (await self.refit.CreateWeightVersion(request)).version

    async def get(self, uid: str = "v") -> refit.WeightVersion:
        return (await self.refit.GetWeightVersion(refit.GetWeightVersionRequest(uid=uid))).version

    async def update(self, uid: str, state: int) -> refit.WeightVersion:
        request = refit.UpdateWeightVersionStateRequest(uid=uid, state=state)
        return (await self.refit.UpdateWeightVersionState(request)).version

    async def delete(self, uid: str = "v") -> refit.WeightVersion:
        return (await self.refit.DeleteWeightVersion(refit.DeleteWeightVersionRequest(uid=uid))).version

    async def publish(
        self, slot: str, worker_id: str, *, uid: str = "v", digest: str = "d" * 64, total_bytes: int = 8
    ) -> refit.CreateWeightVersionShardResponse:
        shard = shard_of(slot, worker_id, uid=uid, digest=digest, total_bytes=total_bytes)
        return await self.refit.CreateWeightVersionShard(refit.CreateWeightVersionShardRequest(shard=shard))

    async def shards(self, uid: str = "v") -> list[tuple[str, str]]:
        request = refit.ListWeightVersionShardsRequest(version_id=uid)
        listed = (await self.refit.ListWeightVersionShards(request)).shards
        return [(shard.source_slot_id, shard.worker_id) for shard in listed]

    async def withdraw(self, slot: str, worker_id: str, *, uid: str = "v") -> bool:
        request = refit.DeleteWeightVersionShardRequest(
            version_id=uid, source_slot_id=slot, worker_id=worker_id
        )
        return (await self.refit.DeleteWeightVersionShard(request)).deleted

    async def lease(self, worker_id: str, *, uid: str = "v", ttl_s: int = 30) -> refit.VersionLease:
        request = refit.RegisterVersionLeaseRequest(version_id=uid, worker_id=worker_id, ttl_seconds=ttl_s)
        return (await self.refit.RegisterVersionLease(request)).lease

    async def give_back(self, lease_id: str, worker_id: str, *, uid: str = "v") -> bool:
        request = refit.DeleteVersionLeaseRequest(version_id=uid, lease_id=lease_id, worker_id=worker_id)
        return (await self.refit.DeleteVersionLease(request)).deleted

    async def status(self, uid: str = "v") -> v1.VersionStatus:
        """The real state, as a watch first shows it."""
        call = self.control.WatchVersion(v1.WatchVersionRequest(version_id=uid))
        try:
            return (await anext(aiter(call))).status
        finally:
            call.cancel()

    async def make_ready(self, uid: str = "v", *, ttl_s: int = 60) -> None:
        """A version with two slots, published by t0 and t1."""
        await self.register("t0", ttl_s=ttl_s)
        await self.register("t1", ttl_s=ttl_s)
        await self.create(uid)
        await self.publish("s0", "t0", uid=uid)
        await self.publish("s1", "t1", uid=uid)


def shard_of(
    slot: str, worker_id: str, *, uid: str = "v", digest: str = "d" * 64, total_bytes: int = 8
) -> refit.WeightVersionShard:
    return refit.WeightVersionShard(
        version_id=uid,
        source_slot_id=slot,
        worker_id=worker_id,
        tensor_count=1,
        total_bytes=total_bytes,
        manifest_digest=digest,
        manifest_endpoint="127.0.0.1:6555",
    )


class Server:
    """A running server, its clock, and a caller."""

    def __init__(self, running: Running, clock: VirtualClock, api: Api, channel: grpc.aio.Channel) -> None:
        self.running = running
        self.clock = clock
        self.api = api
        self.channel = channel

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, and what is due be done."""
        self.clock.advance(round(seconds * 1000))
        await self.running.expiry.run_once()


@asynccontextmanager
async def server_on(
    store: Store, clock: VirtualClock, settings: Settings | None = None
) -> AsyncIterator[Server]:
    async with (
        serving(store, settings=settings, clock=clock) as running,
        grpc.aio.insecure_channel(running.address, options=LARGE_MESSAGES) as channel,
    ):
        yield Server(running, clock, Api(channel), channel)


async def refused(call: Awaitable[Any], code: grpc.StatusCode, *words: str) -> None:
    """The call is answered with `code`, in words that contain all of `words`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert (caught.value.code(), caught.value.details()) == (code, caught.value.details())
    for word in words:
        assert word in (caught.value.details() or "")


async def eventually(condition: Any, *, within_s: float = 10.0) -> Any:
    """The first true answer of `condition`, asked again and again, within a bound."""
    with anyio.fail_after(within_s):
        while not (answer := await condition()):  # noqa: ASYNC110 - what it asks has no event
            await anyio.sleep(0.005)
        return answer
