"""Publications while the control plane is away, forgets, or comes back as another one; virtual clock."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import grpc
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import Unavailable
from modelexpress_rl.rpc.registration import MARGIN_MS
from modelexpress_rl.train.publication import Publication
from statemachines.publication_records import PublicationState as State
from tests.train.support import Rig, ScriptedControl, VirtualClock, failure, rig_of

pytestmark = pytest.mark.anyio
TTL_MS = 30_000
LEASE_MS = 60_000
VERSION = "v1"


class Server:
    """A scripted control plane that knows, or doesn't know, one version."""

    def __init__(self) -> None:
        self.store_id = "store-1"
        self.created_ms: int | None = 1
        self.state = v1.VERSION_STATE_STAGING
        self.filed = 0
        self.leases = 0
        self.away = False
        self.streams = True
        self.control = ScriptedControl(
            RegisterWorker=self._if_there(lambda _: refit.RegisterWorkerResponse()),
            GetServerInfo=self._if_there(self._info),
            CreateWeightVersionShard=self._if_there(self._file),
            GetWeightVersion=self._if_there(self._version),
            WatchVersion=self._if_there(self._watch),
            RetractShard=self._if_there(self._retract),
        )

    def _if_there(self, handler: Any) -> Any:
        def handle(request: Any) -> Any:
            if self.away:
                raise failure(grpc.StatusCode.UNAVAILABLE, "any")
            return handler(request)

        return handle

    def _info(self, _: Any) -> v1.GetServerInfoResponse:
        return v1.GetServerInfoResponse(store_id=self.store_id, max_lease_ttl_seconds=LEASE_MS // 1000)

    def _known(self) -> int:
        if self.created_ms is None:
            raise failure(grpc.StatusCode.NOT_FOUND, "any")
        return self.created_ms

    def _file(self, request: Any) -> refit.CreateWeightVersionShardResponse:
        created_ms = self._known()
        self.filed += 1
        version = refit.WeightVersion(uid=VERSION, created_at_unix_ms=created_ms)
        return refit.CreateWeightVersionShardResponse(shard=request.shard, version=version)

    def _version(self, _: Any) -> refit.GetWeightVersionResponse:
        version = refit.WeightVersion(uid=VERSION, created_at_unix_ms=self._known(), state=1)
        return refit.GetWeightVersionResponse(version=version)

    def _watch(self, _: Any) -> v1.WatchVersionResponse:
        if not self.streams:
            raise failure(grpc.StatusCode.DEADLINE_EXCEEDED, "any")
        status = v1.VersionStatus(
            version_id=VERSION,
            state=self.state,
            created_at_unix_ms=self._known(),
            live_leases=self.leases,
        )
        return v1.WatchVersionResponse(status=status)

    def _retract(self, _: Any) -> v1.RetractShardResponse:
        self._known()
        return v1.RetractShardResponse(retracted=True, readers_gone_by_unix_ms=0, now_unix_ms=1)


class Scene:
    """A published version, the server and the clock."""

    def __init__(self, server: Server, clock: VirtualClock, rig: Rig) -> None:
        self.server = server
        self.clock = clock
        self.rig = rig

    async def published(self) -> Publication:
        one = self.rig.stage(VERSION)
        async with anyio.create_task_group() as group:
            group.start_soon(one.publish)
            await self.clock.advance(100)
        assert one.state is State.PUBLISHED
        return one

    async def until_told(self) -> None:
        """Until the renewals have failed for long enough."""
        await self.clock.advance(2 * TTL_MS // 3 + 100)


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    server, clock = Server(), VirtualClock()
    async with rig_of(server.control, clock=clock, rpc_timeout_s=0.2) as rig:
        yield Scene(server, clock, rig)


async def test_cut_off_for_ever_the_fence_completes_at_the_bound_and_not_before() -> None:
    async with scene() as s:
        last_renewal_ms = s.clock.now_ms()
        one = await s.published()
        s.server.away = True
        await s.until_told()
        assert one.state is State.ORPHANED
        s.rig.publications.release(VERSION)
        bound_ms = last_renewal_ms + TTL_MS + LEASE_MS + MARGIN_MS
        await s.clock.advance(bound_ms - s.clock.now_ms() - 1)
        assert not one.source_reuse_ready.ended
        await s.clock.advance(2)
        assert one.source_reuse_ready.done
        assert s.rig.buffers[VERSION].released == 1


async def test_released_only_after_it_was_cut_off_and_answered_again_it_drains() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.away = True
        await s.until_told()
        s.rig.publications.release(VERSION)
        s.server.away = False
        await s.clock.advance(5000)
        await one.source_reuse_ready.wait()
        assert "RetractShard" in s.server.control.calls


async def test_a_server_that_returns_is_told_again() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.away = True
        await s.clock.advance(TTL_MS)
        s.server.away = False
        await s.clock.advance(5000)
        assert one.state is State.PUBLISHED
        assert s.server.filed == 2
        assert not one.source_reuse_ready.ended


async def test_publishing_while_cut_off_counts_from_the_bound_too() -> None:
    async with scene() as s:
        s.server.away = True
        await s.until_told()
        one = s.rig.stage(VERSION)
        with pytest.raises(Unavailable, match="counts as announced"):
            await one.publish()
        assert one.state is State.ORPHANED
        await s.clock.advance(TTL_MS + LEASE_MS + MARGIN_MS)
        assert one.source_reuse_ready.done


async def test_publishing_while_cut_off_goes_through_when_the_server_returns() -> None:
    async with scene() as s:
        s.server.away = True
        await s.until_told()
        one = s.rig.stage(VERSION)
        with pytest.raises(Unavailable):
            await one.publish()
        s.server.away = False
        await s.clock.advance(5000)
        assert one.state is State.PUBLISHED
        await one.publish()


async def test_a_store_that_forgot_everything_is_told_again_once_the_version_is_made_again() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.store_id, s.server.created_ms = "store-2", None
        await s.clock.advance(TTL_MS // 3 + 500)
        assert one.state is State.ORPHANED
        s.server.created_ms = 2
        await s.clock.advance(5000)
        assert one.state is State.PUBLISHED
        assert s.server.filed == 2
        assert s.rig.buffers[VERSION].released == 0


async def test_readers_that_a_flushed_store_forgot_are_waited_for() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.store_id, s.server.created_ms = "store-2", 2  # wiped, and made again at once
        await s.clock.advance(TTL_MS // 3 + 500)
        assert one.state is State.PUBLISHED
        s.rig.publications.release(VERSION)
        await s.clock.advance(LEASE_MS // 2)
        assert not one.source_reuse_ready.ended  # the new store says that nobody reads
        await s.clock.advance(TTL_MS + LEASE_MS // 2 + MARGIN_MS)
        assert one.source_reuse_ready.done


async def test_a_version_that_was_lost_for_good_gives_the_buffers_back_in_time() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.store_id, s.server.created_ms = "store-2", None
        await s.clock.advance(TTL_MS // 3 + 500)
        await s.clock.advance(TTL_MS + LEASE_MS + MARGIN_MS)
        assert one.source_reuse_ready.done
        assert s.rig.publications.live == ()


async def test_one_that_is_draining_when_it_is_cut_off_stays_wanted_back() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.state, s.server.leases = v1.VERSION_STATE_RELEASING, 1
        s.rig.publications.release(VERSION)
        await s.clock.advance(100)
        assert one.state is State.DRAINING
        s.server.away = True
        await s.until_told()
        assert one.state is State.ORPHANED
        await s.clock.advance(TTL_MS + LEASE_MS + MARGIN_MS)
        assert one.source_reuse_ready.done


async def test_registered_again_without_a_sight_of_the_version_the_bound_is_not_the_end() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.away = True
        await s.until_told()
        del s.server.control.handlers["GetWeightVersion"], s.server.control.handlers["WatchVersion"]
        s.server.away = False
        await s.clock.advance(2 * (TTL_MS + LEASE_MS + MARGIN_MS))
        assert s.rig.registration.live
        assert one.state is State.ORPHANED
        s.server.away = True
        await s.clock.advance(TTL_MS + TTL_MS + LEASE_MS + MARGIN_MS)
        assert one.source_reuse_ready.done


async def test_where_streams_are_held_back_calls_show_the_version() -> None:
    async with scene() as s:
        one = await s.published()
        s.server.away, s.server.streams = True, False
        await s.until_told()
        s.server.away = False
        await s.clock.advance(5000)
        assert one.state is State.PUBLISHED


async def test_what_was_never_announced_while_nobody_was_left_says_so() -> None:
    async with scene() as s:
        s.server.away = True
        await s.until_told()
        await s.clock.advance(TTL_MS + LEASE_MS + MARGIN_MS)
        one = s.rig.stage(VERSION)
        async with anyio.create_task_group() as group:
            group.start_soon(s.clock.advance, 100)
            with pytest.raises(Unavailable, match="nothing was announced"):
                await one.publish()
        assert one.source_reuse_ready.done
