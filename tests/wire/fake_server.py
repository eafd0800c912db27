"""A small control plane on grpc.aio, the other stack: enough of it to test clients against.

In-process: `async with FakeControlPlane() as fake`. As a process that can be killed:
`python -m tests.wire.fake_server PORT` (0: any), which prints its port.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import grpc.aio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import modelexpress_rl_pb2_grpc as v1_grpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl._pb import refit_pb2_grpc as refit_grpc
from modelexpress_rl.rpc import GRPC_SERVER_OPTIONS

STAGING, READY, RELEASING = 1, 2, 3
REAL = {
    STAGING: v1.VERSION_STATE_STAGING,
    READY: v1.VERSION_STATE_READY,
    RELEASING: v1.VERSION_STATE_RELEASING,
}


class Store:
    """Versions in memory, and a condition that is notified at each change."""

    def __init__(self) -> None:
        self.versions: dict[str, refit.WeightVersion] = {}
        self.revisions: dict[str, int] = {}
        self.calls: list[str] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.failures: list[grpc.StatusCode] = []
        self.watchers = 0
        self.changes = 0
        self._changed = asyncio.Condition()

    async def put(self, version: refit.WeightVersion) -> None:
        self.versions[version.uid] = version
        self.revisions[version.uid] = self.revisions.get(version.uid, 0) + 1
        await self.notify()

    async def set_state(self, uid: str, state: int) -> None:
        changed = refit.WeightVersion()
        changed.CopyFrom(self.versions[uid])
        changed.state = state  # type: ignore[assignment]
        await self.put(changed)

    async def forget(self, uid: str) -> None:
        del self.versions[uid]
        await self.notify()

    async def notify(self) -> None:
        async with self._changed:
            self.changes += 1
            self._changed.notify_all()

    async def wait_for_change(self, after: int, timeout_s: float) -> bool:
        """Waits until there were more than `after` changes; False where that took too long."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self.changes > after)
            except TimeoutError:
                return False
        return True

    def status(self, uid: str) -> v1.VersionStatus:
        version = self.versions[uid]
        slots = version.expected_source_slots
        covered = 0 if version.state == STAGING else len(slots)
        return v1.VersionStatus(
            version_id=uid,
            model_name=version.model_name,
            sequence=list(self.versions).index(uid) + 1,
            revision=self.revisions[uid],
            state=REAL[version.state],
            expected_slots=len(slots),
            covered_slots=covered,
            missing_slots=slots[covered:],
            created_at_unix_ms=version.created_at_unix_ms,
            now_unix_ms=int(time.time() * 1000),
        )


class RefitService(refit_grpc.RefitServiceServicer):
    def __init__(self, store: Store) -> None:
        self.store = store

    async def CreateWeightVersion(self, request: Any, context: Any) -> refit.CreateWeightVersionResponse:  # noqa: N802
        await self._begin("CreateWeightVersion", context)
        for version in self.store.versions.values():
            if version.idempotency_key == request.idempotency_key:
                return refit.CreateWeightVersionResponse(version=version)
        version = refit.WeightVersion(
            uid=request.uid or f"uid-{len(self.store.versions)}",
            model_name=request.model_name,
            idempotency_key=request.idempotency_key,
            payload_format=request.payload_format,
            expected_source_slots=request.expected_source_slots,
            state=request.state,
            created_at_unix_ms=int(time.time() * 1000),
        )
        if request.HasField("base_version_id"):
            version.base_version_id = request.base_version_id
        if request.HasField("object_storage"):
            version.object_storage.CopyFrom(request.object_storage)
        await self.store.put(version)
        return refit.CreateWeightVersionResponse(version=version)

    async def GetWeightVersion(self, request: Any, context: Any) -> refit.GetWeightVersionResponse:  # noqa: N802
        await self._begin("GetWeightVersion", context)
        return refit.GetWeightVersionResponse(version=await self._known(request.uid, context))

    async def UpdateWeightVersionState(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._begin("UpdateWeightVersionState", context)
        await self._known(request.uid, context)
        await self.store.set_state(request.uid, request.state)
        return refit.UpdateWeightVersionStateResponse(version=self.store.versions[request.uid])

    async def DeleteWeightVersion(self, request: Any, context: Any) -> refit.DeleteWeightVersionResponse:  # noqa: N802
        await self._begin("DeleteWeightVersion", context)
        await self._known(request.uid, context)
        await self.store.set_state(request.uid, RELEASING)
        return refit.DeleteWeightVersionResponse(version=self.store.versions[request.uid])

    async def ListWeightVersionShards(self, request: Any, context: Any) -> Any:  # noqa: N802
        version = await self._known(request.version_id, context)
        slots = () if version.state == STAGING else version.expected_source_slots
        shards = [refit.WeightVersionShard(version_id=version.uid, source_slot_id=slot) for slot in slots]
        return refit.ListWeightVersionShardsResponse(shards=shards)

    async def RegisterWorker(self, request: Any, context: Any) -> refit.RegisterWorkerResponse:  # noqa: N802
        """Never answers: a stand-in for a server that hangs."""
        await self._begin("RegisterWorker", context)
        await asyncio.Event().wait()
        raise AssertionError

    async def _begin(self, name: str, context: Any) -> None:
        self.store.calls.append(name)
        self.store.metadata.append(dict(context.invocation_metadata()))
        if self.store.failures:
            await context.abort(self.store.failures.pop(0), "as the test wants")

    async def _known(self, uid: str, context: Any) -> refit.WeightVersion:
        if uid not in self.store.versions:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"version {uid!r} is not known")
        return self.store.versions[uid]


class ControlService(v1_grpc.RefitControlServiceServicer):
    def __init__(self, store: Store) -> None:
        self.store = store

    async def WatchVersion(self, request: Any, context: Any) -> AsyncIterator[v1.WatchVersionResponse]:  # noqa: N802
        self.store.watchers += 1
        seen = request.from_revision if request.HasField("from_revision") else 0
        heartbeat_s = (request.heartbeat_ms or 15000) / 1000
        known = False
        while True:
            changes = self.store.changes
            if request.version_id not in self.store.versions:
                if known:
                    status = v1.VersionStatus(
                        version_id=request.version_id, state=v1.VERSION_STATE_FORGOTTEN, revision=seen + 1
                    )
                    yield v1.WatchVersionResponse(status=status)
                    return
                if not request.wait_for_creation:
                    await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.version_id!r} is not known")
                yield v1.WatchVersionResponse()
            else:
                known = True
                status = self.store.status(request.version_id)
                if status.revision > seen:
                    seen = status.revision
                    yield v1.WatchVersionResponse(status=status)
                    continue
            changed = await self.store.wait_for_change(changes, heartbeat_s)
            if known and not changed:
                yield v1.WatchVersionResponse(status=self.store.status(request.version_id))

    async def WatchModel(self, request: Any, context: Any) -> AsyncIterator[v1.WatchModelResponse]:  # noqa: N802
        seen: dict[str, int] = {}
        complete = False
        while True:
            changes = self.store.changes
            for uid, version in list(self.store.versions.items()):
                if version.model_name == request.model_name and self.store.revisions[uid] > seen.get(uid, 0):
                    seen[uid] = self.store.revisions[uid]
                    yield v1.WatchModelResponse(status=self.store.status(uid))
            yield v1.WatchModelResponse(snapshot_complete=not complete)
            complete = True
            await self.store.wait_for_change(changes, (request.heartbeat_ms or 15000) / 1000)

    async def ListVersions(self, request: Any, context: Any) -> v1.ListVersionsResponse:  # noqa: N802
        listed = [
            v1.ListedVersion(version=version, status=self.store.status(uid))
            for uid, version in self.store.versions.items()
            if not request.model_name or version.model_name == request.model_name
        ]
        listed = [each for each in listed if not request.states or each.status.state in request.states]
        start, size = int(request.page_token or 0), min(request.page_size or 2, 2)
        more = str(start + size) if start + size < len(listed) else ""
        return v1.ListVersionsResponse(versions=listed[start : start + size], next_page_token=more)


class FakeControlPlane:
    """The server; `modern=False` leaves our own service out, as a 0.7 server does."""

    def __init__(self, *, modern: bool = True, port: int = 0, store: Store | None = None) -> None:
        self.store = store or Store()
        self.port = port
        self._modern = modern

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=GRPC_SERVER_OPTIONS)
        refit_grpc.add_RefitServiceServicer_to_server(RefitService(self.store), self._server)
        if self._modern:
            v1_grpc.add_RefitControlServiceServicer_to_server(ControlService(self.store), self._server)
        self.port = self._server.add_insecure_port(self.url)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(grace=0)


async def main(port: int) -> None:
    async with FakeControlPlane(port=port) as fake:
        print(fake.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
