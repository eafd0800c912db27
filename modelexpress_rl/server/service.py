"""`model_express.refit.RefitService`, as the clients of 0.7 expect it."""

# ruff: noqa: N802 - the methods have the names of the wire

from __future__ import annotations

from typing import Any

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl._pb import refit_pb2_grpc
from modelexpress_rl.server import commands, wire
from modelexpress_rl.server.answers import unary
from modelexpress_rl.server.registry import Registry
from statemachines.ids import ModelName, lease_id_of
from statemachines.kernel import Reason, Refused


class RefitService(refit_pb2_grpc.RefitServiceServicer):
    """Each method: check the request, have the registry decide, say it in the wire's messages."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._settings = registry.settings

    @unary
    async def RegisterWorker(
        self, request: refit.RegisterWorkerRequest, context: Any
    ) -> refit.RegisterWorkerResponse:
        worker_id = wire.worker_id_in(request.worker.worker_id, "worker.worker_id")
        role = wire.role_in(request.worker.role)
        model_name = ModelName(wire.text("worker.model_name", request.worker.model_name))
        ttl_ms = wire.ttl_ms(
            "ttl_seconds", request.ttl_seconds * 1000, self._settings.max_registration_ttl_ms
        )
        record = await self._registry.workers.register(worker_id, role, model_name, ttl_ms)
        return refit.RegisterWorkerResponse(worker=wire.registration_out(record))

    @unary
    async def CreateWeightVersion(
        self, request: refit.CreateWeightVersionRequest, context: Any
    ) -> refit.CreateWeightVersionResponse:
        uid, spec = wire.spec_in(request)
        created = await self._registry.create(uid, spec)
        return refit.CreateWeightVersionResponse(version=wire.version_out(created.record))

    @unary
    async def GetWeightVersion(
        self, request: refit.GetWeightVersionRequest, context: Any
    ) -> refit.GetWeightVersionResponse:
        found = await self._registry.view(wire.version_id_in(request.uid, "uid"))
        return refit.GetWeightVersionResponse(version=wire.version_out(found.record))

    @unary
    async def UpdateWeightVersionState(
        self, request: refit.UpdateWeightVersionStateRequest, context: Any
    ) -> refit.UpdateWeightVersionStateResponse:
        uid = wire.version_id_in(request.uid, "uid")
        wanted = wire.state_in(request.state)
        command = commands.set_state(wanted, self._settings.drain_deadline_ms, self._settings.retention_ms)
        outcome = await self._registry.command(uid, command)
        return refit.UpdateWeightVersionStateResponse(version=wire.version_out(outcome.after))

    @unary
    async def DeleteWeightVersion(
        self, request: refit.DeleteWeightVersionRequest, context: Any
    ) -> refit.DeleteWeightVersionResponse:
        uid = wire.version_id_in(request.uid, "uid")
        command = commands.release(self._settings.drain_deadline_ms, self._settings.retention_ms)
        outcome = await self._registry.command(uid, command)
        return refit.DeleteWeightVersionResponse(version=wire.version_out(outcome.after))

    @unary
    async def CreateWeightVersionShard(
        self, request: refit.CreateWeightVersionShardRequest, context: Any
    ) -> refit.CreateWeightVersionShardResponse:
        uid, shard = wire.shard_in(request.shard)
        command = commands.publish(shard, self._settings.max_shards_per_version)
        outcome = await self._registry.command(uid, command)
        return refit.CreateWeightVersionShardResponse(
            shard=wire.shard_out(uid, shard),
            version=wire.version_out(outcome.after, brief=wire.wants_brief(context.invocation_metadata())),
        )

    @unary
    async def ListWeightVersionShards(
        self, request: refit.ListWeightVersionShardsRequest, context: Any
    ) -> refit.ListWeightVersionShardsResponse:
        found = await self._registry.view(wire.version_id_in(request.version_id))
        return refit.ListWeightVersionShardsResponse(shards=wire.shards_out(found.record, found.moment))

    @unary
    async def DeleteWeightVersionShard(
        self, request: refit.DeleteWeightVersionShardRequest, context: Any
    ) -> refit.DeleteWeightVersionShardResponse:
        uid = wire.version_id_in(request.version_id)
        slot_id, worker_id = wire.slot_id_in(request.source_slot_id), wire.worker_id_in(request.worker_id)
        await self._registry.command(uid, commands.withdraw(slot_id, worker_id))
        return refit.DeleteWeightVersionShardResponse(deleted=True)

    @unary
    async def RegisterVersionLease(
        self, request: refit.RegisterVersionLeaseRequest, context: Any
    ) -> refit.RegisterVersionLeaseResponse:
        uid, worker_id = wire.version_id_in(request.version_id), wire.worker_id_in(request.worker_id)
        ttl_ms = wire.ttl_ms("ttl_seconds", request.ttl_seconds * 1000, self._settings.max_lease_ttl_ms)
        outcome = await self._registry.command(uid, commands.lease_for(worker_id, ttl_ms))
        held = outcome.after.leases[lease_id_of(uid, worker_id)]
        return refit.RegisterVersionLeaseResponse(lease=wire.lease_out(uid, held))

    @unary
    async def DeleteVersionLease(
        self, request: refit.DeleteVersionLeaseRequest, context: Any
    ) -> refit.DeleteVersionLeaseResponse:
        uid, (lease_id, granted_ms) = wire.version_id_in(request.version_id), wire.grant_in(request.lease_id)
        worker_id = wire.worker_id_in(request.worker_id)
        try:
            outcome = await self._registry.command(uid, commands.give_back(lease_id, worker_id, granted_ms))
        except Refused as refusal:
            if refusal.reason is not Reason.NOT_FOUND:
                raise
            return refit.DeleteVersionLeaseResponse(deleted=False)  # it went with its version
        ended = lease_id in outcome.before.leases and lease_id not in outcome.after.leases
        return refit.DeleteVersionLeaseResponse(deleted=ended)
