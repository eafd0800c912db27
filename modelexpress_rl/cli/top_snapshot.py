"""What `mx-rl top` looks at, and what changed between two looks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import anyio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.rpc.convert import version_state_to_pb, version_status_from_pb, worker_status_from_pb
from modelexpress_rl.version import VersionState, VersionStatus, WorkerStatus


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The control plane as it was at one look; versions newest first."""

    address: str
    server_version: str
    store_kind: str
    now_unix_ms: int
    versions: tuple[VersionStatus, ...]
    workers: tuple[WorkerStatus, ...]
    took_ms: float


@dataclass(frozen=True, slots=True)
class Rates:
    """By second, between two looks; None where there is only one."""

    changes: float
    ready: float
    slots: float

    @classmethod
    def between(cls, last: Snapshot | None, present: Snapshot) -> Rates | None:
        """What happened from one to the other."""
        if last is None or present.now_unix_ms <= last.now_unix_ms:
            return None
        took_s = (present.now_unix_ms - last.now_unix_ms) / 1000
        before = {status.version_id: status for status in last.versions}
        changes = ready = slots = 0
        for status in present.versions:
            known = before.get(status.version_id)
            changes += known is None or known.revision != status.revision
            slots += max(status.covered_slots - (known.covered_slots if known else 0), 0)
            was_ready = known is not None and bool(known.ready_at_unix_ms)
            ready += bool(status.ready_at_unix_ms) and not was_ready
        return cls(changes / took_s, ready / took_s, slots / took_s)


async def snapshot(plane: ControlPlane, model: str | None, states: Collection[VersionState]) -> Snapshot:
    """Look once.

    Raises:
        RpcError: the control plane can't be reached, or is of 0.7.
    """
    began_s = anyio.current_time()
    info = await plane.get_server_info(v1.GetServerInfoRequest())
    versions = await _versions(plane, model, states)
    workers = await plane.list_workers(v1.ListWorkersRequest(model_name=model or ""))
    return Snapshot(
        str(plane.address),
        info.server_version,
        info.store_kind,
        info.now_unix_ms,
        tuple(reversed(versions)),
        tuple(worker_status_from_pb(worker) for worker in workers.workers),
        (anyio.current_time() - began_s) * 1000,
    )


async def _versions(
    plane: ControlPlane, model: str | None, states: Collection[VersionState]
) -> list[VersionStatus]:
    request = v1.ListVersionsRequest(
        model_name=model or "", states=[version_state_to_pb(state) for state in states]
    )
    found: list[VersionStatus] = []
    while True:
        page = await plane.list_versions(request)
        found += [version_status_from_pb(one.status) for one in page.versions]
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token
