"""`modelexpress_rl.v1.RefitControlService`: watching, listing, draining, and leases with their sources."""

# ruff: noqa: N802 - the methods have the names of the wire

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator
from typing import Any, cast

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import modelexpress_rl_pb2_grpc
from modelexpress_rl.server import commands, wire
from modelexpress_rl.server.answers import stream, unary
from modelexpress_rl.server.fold import Outcome
from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.release import server_version
from modelexpress_rl.server.settings import MAX_SPAN_MS
from modelexpress_rl.server.stores.port import Place
from modelexpress_rl.server.views import View
from modelexpress_rl.server.watch import WatchHub
from statemachines.ids import ModelName, WorkerId, lease_id_of
from statemachines.version import VersionState, live_leases
from statemachines.worker import live

CAPABILITIES = (
    "watch",
    "list",
    "drain-deadline",
    "live-publications",
    "retract",
    "unregister",
    "serving-reports",
    "evict",
    "check-lease",
)
PAGE_DEFAULT = 100
PAGE_MOST = 1000
HEARTBEAT_LEAST_MS = 100
MAX_TOKEN = 32 * 1024  # a model's name of the greatest length, escaped and encoded


class RefitControlService(modelexpress_rl_pb2_grpc.RefitControlServiceServicer):
    """Each method: check the request, have the registry decide, say it in the wire's messages."""

    def __init__(self, registry: Registry, hub: WatchHub) -> None:
        self._registry = registry
        self._settings = registry.settings
        self._hub = hub

    @unary
    async def GetServerInfo(self, request: v1.GetServerInfoRequest, context: Any) -> v1.GetServerInfoResponse:
        store = self._registry.store
        now_ms = await store.now_ms()  # first: it notices that the store is another one
        return v1.GetServerInfoResponse(
            server_version=server_version(),
            store_kind=store.kind,
            store_id=store.store_id,
            max_lease_ttl_seconds=self._settings.max_lease_ttl_ms // 1000,
            default_drain_deadline_ms=self._settings.drain_deadline_ms,
            retention_ms=self._settings.retention_ms,
            capabilities=CAPABILITIES,
            now_unix_ms=now_ms,
        )

    @stream
    async def WatchVersion(
        self, request: v1.WatchVersionRequest, context: Any
    ) -> AsyncIterator[v1.WatchVersionResponse]:
        statuses = self._hub.follow_version(
            wire.version_id_in(request.version_id),
            from_revision=request.from_revision if request.HasField("from_revision") else None,
            wait_for_creation=request.wait_for_creation,
            heartbeat_ms=self._heartbeat_ms(request.heartbeat_ms),
        )
        async for told in statuses:
            # The interceptor's serializer knows it: its bytes are made once for all watchers.
            yield cast(v1.WatchVersionResponse, told or v1.WatchVersionResponse())

    @stream
    async def WatchModel(
        self, request: v1.WatchModelRequest, context: Any
    ) -> AsyncIterator[v1.WatchModelResponse]:
        model_name = ModelName(wire.text("model_name", request.model_name))
        heartbeat_ms = self._heartbeat_ms(request.heartbeat_ms)
        async for response in self._hub.follow_model(model_name, heartbeat_ms=heartbeat_ms):
            yield response

    @unary
    async def ListVersions(self, request: v1.ListVersionsRequest, context: Any) -> v1.ListVersionsResponse:
        limit = min(request.page_size or PAGE_DEFAULT, PAGE_MOST)
        wanted = set(request.states)
        if unknown := wanted - {int(value) for value in v1.VersionState.values()[1:]}:
            raise wire.invalid(f"states has {min(unknown)}, which is none")
        page = await self._registry.list_versions(
            _model_in(request.model_name),
            after=_place_in(request.page_token),
            limit=limit,
        )
        response = v1.ListVersionsResponse()
        for found in page:
            state = wire.real_state_out(found.record.state)
            if found.record.state is not VersionState.FORGOTTEN and (not wanted or state in wanted):
                response.versions.add(version=wire.version_out(found.record), status=wire.status_out(found))
        if len(page) == limit:
            response.next_page_token = _place_out(page[-1])
        return response

    @unary
    async def ListWorkers(self, request: v1.ListWorkersRequest, context: Any) -> v1.ListWorkersResponse:
        role = wire.role_in(request.role) if request.role else None
        now_ms, workers = await self._registry.registrations(_model_in(request.model_name))
        return v1.ListWorkersResponse(
            workers=[
                wire.worker_status_out(worker, now_ms)
                for worker in workers
                if (role is None or worker.role is role) and (request.include_expired or live(worker, now_ms))
            ],
            now_unix_ms=now_ms,
        )

    @unary
    async def ReleaseVersion(
        self, request: v1.ReleaseVersionRequest, context: Any
    ) -> v1.ReleaseVersionResponse:
        uid = wire.version_id_in(request.version_id)
        drain_ms = self._settings.drain_deadline_ms
        if request.HasField("drain_deadline_ms"):
            drain_ms = request.drain_deadline_ms
        if drain_ms > MAX_SPAN_MS:
            raise wire.invalid(f"drain_deadline_ms must be at most {MAX_SPAN_MS} (30 days), not {drain_ms}")
        await self._registry.command(uid, commands.release(drain_ms, self._settings.retention_ms))
        return v1.ReleaseVersionResponse(status=wire.status_out(await self._registry.view(uid)))

    @unary
    async def EvictVersion(self, request: v1.EvictVersionRequest, context: Any) -> v1.EvictVersionResponse:
        uid = wire.version_id_in(request.version_id)
        await self._registry.command(uid, commands.evict(self._settings.retention_ms))
        return v1.EvictVersionResponse(status=wire.status_out(await self._registry.view(uid)))

    @unary
    async def RetractShard(self, request: v1.RetractShardRequest, context: Any) -> v1.RetractShardResponse:
        uid = wire.version_id_in(request.version_id)
        slot_id, worker_id = wire.slot_id_in(request.source_slot_id), wire.worker_id_in(request.worker_id)
        outcome = await self._registry.command(uid, commands.retract(slot_id, worker_id))
        leases = live_leases(outcome.after, outcome.moment.now_ms)
        found = await self._registry.view(uid)
        return v1.RetractShardResponse(
            retracted=(slot_id, worker_id) in outcome.before.publications,
            readers_gone_by_unix_ms=max((held.deadline_ms for held in leases), default=0),
            now_unix_ms=found.moment.now_ms,
            status=wire.status_out(found),
        )

    @unary
    async def UnregisterWorker(
        self, request: v1.UnregisterWorkerRequest, context: Any
    ) -> v1.UnregisterWorkerResponse:
        left = await self._registry.workers.leave(wire.worker_id_in(request.worker_id))
        return v1.UnregisterWorkerResponse(unregistered=left)

    @unary
    async def AcquireVersionLease(
        self, request: v1.AcquireVersionLeaseRequest, context: Any
    ) -> v1.VersionLeaseResponse:
        uid, worker_id = wire.version_id_in(request.version_id), wire.worker_id_in(request.worker_id)
        command = commands.lease_for(worker_id, self._lease_ttl_ms(request.ttl_ms))
        return _lease_answer(await self._registry.command(uid, command), worker_id)

    @unary
    async def RenewVersionLease(
        self, request: v1.RenewVersionLeaseRequest, context: Any
    ) -> v1.VersionLeaseResponse:
        uid, worker_id = wire.version_id_in(request.version_id), wire.worker_id_in(request.worker_id)
        lease_id, granted_ms = wire.grant_in(request.lease_id)
        command = commands.renew(lease_id, worker_id, self._lease_ttl_ms(request.ttl_ms), granted_ms)
        return _lease_answer(await self._registry.command(uid, command), worker_id)

    @unary
    async def CheckLease(self, request: v1.CheckLeaseRequest, context: Any) -> v1.CheckLeaseResponse:
        uid, worker_id = wire.version_id_in(request.version_id), wire.worker_id_in(request.worker_id)
        lease_id, granted_ms = wire.grant_in(request.lease_id)
        found = await self._registry.view(uid)
        live_now = live_leases(found.record, found.moment.now_ms)
        return v1.CheckLeaseResponse(
            held=any(
                (held.lease_id, held.worker_id) == (lease_id, worker_id)
                and granted_ms in (None, held.granted_ms)
                for held in live_now
            ),
            live_leases=[wire.grant_out(uid, held) for held in live_now],
            now_unix_ms=found.moment.now_ms,
        )

    @unary
    async def ReportServing(self, request: v1.ReportServingRequest, context: Any) -> v1.ReportServingResponse:
        worker_id = wire.worker_id_in(request.worker_id)
        serving = None
        if request.HasField("version_id"):
            serving = wire.version_id_in(request.version_id)
        record = await self._registry.workers.report(worker_id, serving, request.uncertain)
        now_ms = await self._registry.store.now_ms()
        return v1.ReportServingResponse(worker=wire.worker_status_out(record, now_ms))

    def _lease_ttl_ms(self, ttl_ms: int) -> int:
        """Here the answer says what was granted, so that a longer wish is only shortened."""
        return min(wire.ttl_ms("ttl_ms", ttl_ms, None), self._settings.max_lease_ttl_ms)

    def _heartbeat_ms(self, asked_ms: int) -> int:
        if not asked_ms:
            return self._settings.watch_heartbeat_ms
        return min(max(asked_ms, HEARTBEAT_LEAST_MS), MAX_SPAN_MS)


def _lease_answer(outcome: Outcome, worker_id: WorkerId) -> v1.VersionLeaseResponse:
    """All of it as it was when the lease was granted, read together."""
    record = outcome.after
    held = record.leases[lease_id_of(record.uid, worker_id)]
    return v1.VersionLeaseResponse(
        lease=wire.grant_out(record.uid, held),
        live_publications=wire.shards_out(record, outcome.moment),
        now_unix_ms=outcome.moment.now_ms,
        state=wire.real_state_out(record.state),
        drain_deadline_unix_ms=wire.drain_deadline_out(record),
    )


def _model_in(model_name: str) -> ModelName | None:
    """None: of every model."""
    return ModelName(wire.text("model_name", model_name)) if model_name else None


def _place_out(found: View) -> str:
    place = json.dumps([found.record.spec.model_name, found.record.sequence])
    return base64.urlsafe_b64encode(place.encode()).decode()


def _place_in(token: str) -> Place | None:
    if not token:
        return None
    wire.text("page_token", token, MAX_TOKEN)
    try:
        model_name, sequence = json.loads(base64.urlsafe_b64decode(token.encode()))
        str.encode(model_name)
        if type(sequence) is not int or not 0 <= sequence < 1 << 63:
            raise ValueError("no sequence")
        return Place(ModelName(model_name), sequence)
    except (ValueError, TypeError, RecursionError, binascii.Error) as error:
        raise wire.invalid(f"page_token {token[:80]!r} is not one that this service gave") from error
