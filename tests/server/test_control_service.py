"""Our own service: leases with their sources, bounded drains, retraction, listing, serving reports."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.memory import MemoryStore
from statemachines.ids import VersionId, WorkerId, lease_id_of
from tests.server.api import (
    CHECKPOINT,
    GENERATOR,
    READY,
    RELEASING,
    S3,
    TRAINER,
    Api,
    Server,
    eventually,
    refused,
    server_on,
)
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN = grpc.StatusCode.NOT_FOUND
FAILED = grpc.StatusCode.FAILED_PRECONDITION


async def acquire(
    api: Api, worker: str = "g", *, uid: str = "v", ttl_ms: int = 30_000
) -> v1.VersionLeaseResponse:
    request = v1.AcquireVersionLeaseRequest(version_id=uid, worker_id=worker, ttl_ms=ttl_ms)
    return await api.control.AcquireVersionLease(request)


async def renew(
    api: Api, lease_id: str, worker: str = "g", *, ttl_ms: int = 30_000
) -> v1.VersionLeaseResponse:
    request = v1.RenewVersionLeaseRequest(version_id="v", worker_id=worker, lease_id=lease_id, ttl_ms=ttl_ms)
    return await api.control.RenewVersionLease(request)


async def release(api: Api, uid: str = "v", drain_ms: int | None = None) -> v1.VersionStatus:
    request = v1.ReleaseVersionRequest(version_id=uid, drain_deadline_ms=drain_ms)
    return (await api.control.ReleaseVersion(request)).status


async def retract(api: Api, slot: str, worker: str, uid: str = "v") -> v1.RetractShardResponse:
    request = v1.RetractShardRequest(version_id=uid, source_slot_id=slot, worker_id=worker)
    return await api.control.RetractShard(request)


def sources(answer: v1.VersionLeaseResponse) -> list[tuple[str, str]]:
    return [(shard.source_slot_id, shard.worker_id) for shard in answer.live_publications]


async def test_server_info(server: Server, api: Api) -> None:
    info = await api.control.GetServerInfo(v1.GetServerInfoRequest())
    assert (info.store_kind, info.max_lease_ttl_seconds) == ("memory", 300)
    assert (info.default_drain_deadline_ms, info.retention_ms) == (300_000, 3_600_000)
    assert info.now_unix_ms == server.clock.now_ms()
    assert info.store_id
    assert {"watch", "drain-deadline", "live-publications"} <= set(info.capabilities)


class TestLeases:
    async def test_an_answer_says_which_sources_are_live(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("replica", ttl_s=10)
        await api.publish("s0", "replica")
        await api.register("g", GENERATOR)
        answer = await acquire(api)
        assert sources(answer) == [("s0", "replica"), ("s0", "t0"), ("s1", "t1")]
        assert answer.live_publications[0].manifest_endpoint == "127.0.0.1:6555"
        assert (answer.state, answer.drain_deadline_unix_ms) == (v1.VERSION_STATE_READY, 0)
        assert answer.now_unix_ms == server.clock.now_ms()
        assert answer.lease.expires_at_unix_ms == server.clock.now_ms() + 30_000
        server.clock.advance(10_000)
        assert sources(await renew(api, answer.lease.lease_id)) == [("s0", "t0"), ("s1", "t1")]

    async def test_a_longer_wish_is_shortened_and_said(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        answer = await acquire(api, ttl_ms=10**9)
        assert answer.lease.expires_at_unix_ms == server.clock.now_ms() + 300_000

    async def test_a_lapsed_lease_is_never_revived(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = (await acquire(api, ttl_ms=1_000)).lease
        server.clock.advance(1_000)
        await refused(renew(api, lease.lease_id), FAILED, "no live lease")
        assert (await acquire(api)).lease.lease_id != lease.lease_id

    async def test_a_late_return_ends_no_later_lease(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = (await acquire(api)).lease
        assert (await acquire(api)).lease.lease_id == lease.lease_id
        assert await api.give_back(lease.lease_id, "g")
        server.clock.advance(1)
        later = (await acquire(api)).lease
        assert not await api.give_back(lease.lease_id, "g")
        assert (await api.status()).live_leases == 1
        await refused(renew(api, lease.lease_id), FAILED, "not held by worker g")
        await renew(api, later.lease_id)
        assert await api.give_back(lease_id_of(VersionId("v"), WorkerId("g")), "g")  # as 0.7 says it

    async def test_a_renewal_needs_the_own_lease(self, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        await api.register("h", GENERATOR)
        lease = (await acquire(api)).lease
        await refused(renew(api, lease.lease_id, "h"), FAILED, "not held by worker h")
        await refused(renew(api, "00000000"), FAILED)

    async def test_no_renewal_past_the_drain_deadline(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = (await acquire(api, ttl_ms=60_000)).lease
        status = await release(api, drain_ms=5_000)
        assert status.drain_deadline_unix_ms == server.clock.now_ms() + 5_000
        server.clock.advance(4_999)
        answer = await renew(api, lease.lease_id, ttl_ms=60_000)
        assert answer.state == v1.VERSION_STATE_RELEASING
        assert answer.drain_deadline_unix_ms == status.drain_deadline_unix_ms
        server.clock.advance(1)
        await refused(renew(api, lease.lease_id), FAILED, "drain deadline passed")
        await refused(api.lease("g"), FAILED, "drain deadline passed")  # nor over the 0.7 service

    async def test_no_renewal_on_a_degraded_version(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        await api.register("g", GENERATOR)
        lease = (await acquire(api)).lease
        server.clock.advance(10_000)
        await refused(renew(api, lease.lease_id), FAILED, "DEGRADED")

    @pytest.mark.parametrize("changed", [{"version_id": ""}, {"worker_id": " "}, {"ttl_ms": 0}])
    async def test_input(self, api: Api, changed: dict[str, Any]) -> None:
        fields = {"version_id": "v", "worker_id": "g", "ttl_ms": 5} | changed
        (name,) = changed
        await refused(api.control.AcquireVersionLease(v1.AcquireVersionLeaseRequest(**fields)), INVALID, name)
        fields["lease_id"] = "l"
        await refused(api.control.RenewVersionLease(v1.RenewVersionLeaseRequest(**fields)), INVALID, name)


class TestReleaseVersion:
    async def test_the_deadline_only_comes_forward(self, server: Server, api: Api) -> None:
        await api.make_ready()
        now = server.clock.now_ms()
        assert (await release(api)).drain_deadline_unix_ms == now + 300_000
        assert (await release(api, drain_ms=5_000)).drain_deadline_unix_ms == now + 5_000
        assert (await release(api, drain_ms=9_000)).drain_deadline_unix_ms == now + 5_000
        assert (await release(api)).drain_deadline_unix_ms == now + 5_000

    async def test_nothing_to_drain_is_retired_at_once(self, api: Api) -> None:
        await api.create()
        status = await release(api)
        assert (status.state, status.reason) == (
            v1.VERSION_STATE_RETIRED,
            "released by request; nobody reads and nobody publishes it",
        )
        assert (await api.get()).state == RELEASING
        assert (await release(api)).state == v1.VERSION_STATE_RETIRED

    async def test_input(self, api: Api) -> None:
        await refused(release(api), UNKNOWN)
        await refused(release(api, " "), INVALID, "version_id")
        await refused(release(api, drain_ms=2**63), INVALID, "drain_deadline_ms")


class TestRetractShard:
    async def test_it_stops_counting_at_once(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = (await acquire(api)).lease
        answer = await retract(api, "s0", "t0")
        assert answer.retracted
        assert answer.readers_gone_by_unix_ms == lease.expires_at_unix_ms
        assert answer.status.state == v1.VERSION_STATE_DEGRADED
        assert answer.status.missing_slots == ["s0"]
        assert "retracted" in answer.status.reason
        again = await retract(api, "s0", "t0")
        assert not again.retracted
        assert again.readers_gone_by_unix_ms == lease.expires_at_unix_ms

    async def test_without_readers_the_buffer_is_free_at_once(self, api: Api) -> None:
        await api.make_ready()
        assert (await retract(api, "s0", "t0")).readers_gone_by_unix_ms == 0

    async def test_a_late_announcement_is_refused(self, api: Api) -> None:
        await api.create()
        await api.register("t0")
        assert not (await retract(api, "s0", "t0")).retracted
        await refused(api.publish("s0", "t0"), FAILED, "retracted")

    async def test_unknown(self, api: Api) -> None:
        await refused(retract(api, "s0", "t0"), UNKNOWN)
        await api.create()
        assert not (await retract(api, "odd", "nobody")).retracted


class TestWorkers:
    async def test_unregistering_degrades_at_once(self, api: Api) -> None:
        await api.make_ready()
        request = v1.UnregisterWorkerRequest(worker_id="t0")
        assert (await api.control.UnregisterWorker(request)).unregistered
        assert not (await api.control.UnregisterWorker(request)).unregistered
        assert (await api.status()).state == v1.VERSION_STATE_DEGRADED
        unknown = v1.UnregisterWorkerRequest(worker_id="unknown")
        assert not (await api.control.UnregisterWorker(unknown)).unregistered

    async def test_serving_reports(self, server: Server, api: Api) -> None:
        await api.register("g", GENERATOR, ttl_s=10)
        await api.register("t", TRAINER, ttl_s=10)

        async def report(worker: str, version: str | None, uncertain: bool = False) -> v1.WorkerStatus:
            request = v1.ReportServingRequest(worker_id=worker, version_id=version, uncertain=uncertain)
            return (await api.control.ReportServing(request)).worker

        assert (await report("g", "v")).serving_version_id == "v"
        status = await report("g", None, True)
        assert (status.HasField("serving_version_id"), status.serving_uncertain) == (False, True)
        await refused(report("t", "v"), FAILED, "TRAINER")
        await refused(report("unknown", "v"), FAILED, "not registered")
        await refused(report("g", " "), INVALID, "version_id")
        server.clock.advance(10_000)
        await refused(report("g", "v"), FAILED, "expired")

    async def test_listing(self, server: Server, api: Api) -> None:
        await api.register("t", ttl_s=10)
        await api.register("g", GENERATOR, ttl_s=60)
        await api.register("other", model="other", ttl_s=60)

        async def listed(**fields: Any) -> list[str]:
            answer = await api.control.ListWorkers(v1.ListWorkersRequest(**fields))
            assert answer.now_unix_ms == server.clock.now_ms()
            return [worker.worker_id for worker in answer.workers]

        assert await listed() == ["g", "other", "t"]
        assert await listed(model_name="other") == ["other"]
        assert await listed(role=GENERATOR) == ["g"]
        server.clock.advance(10_000)
        assert await listed() == ["g", "other"]
        assert await listed(include_expired=True) == ["g", "other", "t"]
        answer = await api.control.ListWorkers(v1.ListWorkersRequest(include_expired=True))
        lives = {worker.worker_id: worker.life for worker in answer.workers}
        assert lives["t"] == v1.WORKER_LIFE_EXPIRED
        assert lives["g"] == v1.WORKER_LIFE_LIVE


class TestListVersions:
    async def test_pages(self, api: Api) -> None:
        for n in range(5):
            await api.create(f"b{n}", model="b")
        await api.create("a", model="a")

        async def page(token: str = "", **fields: Any) -> tuple[list[str], str]:
            request = v1.ListVersionsRequest(page_token=token, **fields)
            answer = await api.control.ListVersions(request)
            assert [one.version.uid for one in answer.versions] == [
                one.status.version_id for one in answer.versions
            ]
            return [one.version.uid for one in answer.versions], answer.next_page_token

        assert await page() == (["a", "b0", "b1", "b2", "b3", "b4"], "")
        first, token = await page(model_name="b", page_size=2)
        second, token = await page(token, model_name="b", page_size=2)
        third, token = await page(token, model_name="b", page_size=2)
        assert (first + second + third, token) == (["b0", "b1", "b2", "b3", "b4"], "")
        await refused(page("nonsense"), INVALID, "page_token")

    async def test_by_state(self, server: Server, api: Api) -> None:
        await api.make_ready("ready", ttl_s=10)
        await api.create("staging")
        await api.create("retired")
        await api.delete("retired")

        async def listed(*states: int) -> list[str]:
            answer = await api.control.ListVersions(v1.ListVersionsRequest(states=states))
            return [one.version.uid for one in answer.versions]

        assert await listed(v1.VERSION_STATE_READY) == ["ready"]
        assert await listed(v1.VERSION_STATE_STAGING, v1.VERSION_STATE_RETIRED) == ["staging", "retired"]
        server.clock.advance(10_000)
        assert await listed(v1.VERSION_STATE_READY) == []
        assert await listed(v1.VERSION_STATE_DEGRADED) == ["ready"]
        await refused(listed(77), INVALID, "77")

    async def test_sequences_grow_whatever_the_labels(self, api: Api) -> None:
        for uid in ("step-57", "step-1"):
            await api.create(uid)
        answer = await api.control.ListVersions(v1.ListVersionsRequest())
        sequences = [one.status.sequence for one in answer.versions]
        assert sequences == sorted(set(sequences))
        assert [one.version.uid for one in answer.versions] == ["step-57", "step-1"]


class TestKeepLast:
    async def states(self, api: Api) -> dict[str, int]:
        answer = await api.control.ListVersions(v1.ListVersionsRequest())
        return {one.version.uid: one.status.state for one in answer.versions}

    async def test_a_newer_ready_version_pushes_the_older_out(self) -> None:
        clock = VirtualClock()
        async with server_on(MemoryStore(clock), clock, Settings(keep_last=2)) as server:
            api = server.api
            await api.create("never-ready")
            for n in range(4):
                await api.make_ready(f"v{n}")

            async def pushed_out() -> bool:
                states = await self.states(api)
                return states["v1"] == states["v0"] == v1.VERSION_STATE_RELEASING

            await eventually(pushed_out)
            states = await self.states(api)
            assert states["v2"] == states["v3"] == v1.VERSION_STATE_READY
            assert states["never-ready"] == v1.VERSION_STATE_RETIRED
            assert (await api.status("v0")).reason == "superseded: v2 is READY"

    async def test_the_bases_of_what_is_kept_are_kept(self) -> None:
        clock = VirtualClock()
        async with server_on(MemoryStore(clock), clock, Settings(keep_last=1)) as server:
            api, delta = server.api, refit.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA
            await api.create("old", fmt=CHECKPOINT, storage=S3, state=READY)
            await api.create("base", fmt=CHECKPOINT, storage=S3, state=READY)
            await api.create("delta", fmt=delta, base="base", storage=S3, state=READY)
            await api.create("delta2", fmt=delta, base="delta", storage=S3, state=READY)

            async def pushed_out() -> bool:
                return (await self.states(api))["old"] == v1.VERSION_STATE_RETIRED

            await eventually(pushed_out)
            states = await self.states(api)
            assert {states[uid] for uid in ("base", "delta", "delta2")} == {v1.VERSION_STATE_READY}
