"""Watching: the first message at once, nothing missed or invented, nothing repeated, nobody held up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from statemachines.ids import lease_id_of
from tests.server.api import GENERATOR, MODEL, Api, Server, eventually

pytestmark = pytest.mark.anyio

STAGING, READY, DEGRADED, RELEASING, RETIRED, FORGOTTEN = range(1, 7)


class Watch:
    """One open stream; `next` is bounded."""

    def __init__(self, call: Any) -> None:
        self._messages = aiter(call)

    async def next(self, within_s: float = 5.0) -> Any:
        with anyio.fail_after(within_s):
            return await anext(self._messages)

    async def status(self) -> v1.VersionStatus:
        return (await self.next()).status

    async def ended(self) -> bool:
        try:
            await self.next()
        except StopAsyncIteration:
            return True
        return False


@asynccontextmanager
async def watching(api: Api, uid: str = "v", **fields: Any) -> AsyncIterator[Watch]:
    call = api.control.WatchVersion(v1.WatchVersionRequest(version_id=uid, **fields))
    try:
        yield Watch(call)
    finally:
        call.cancel()


@asynccontextmanager
async def watching_model(api: Api, model: str = MODEL, **fields: Any) -> AsyncIterator[Watch]:
    call = api.control.WatchModel(v1.WatchModelRequest(model_name=model, **fields))
    try:
        yield Watch(call)
    finally:
        call.cancel()


class TestWatchVersion:
    async def test_a_whole_life(self, server: Server, api: Api) -> None:
        await api.create()
        for worker in ("t0", "t1"):
            await api.register(worker, ttl_s=60)
        await api.register("g", GENERATOR, ttl_s=600)
        seen: list[v1.VersionStatus] = []
        async with watching(api) as watch:
            seen.append(await watch.status())
            await api.publish("s0", "t0")
            seen.append(await watch.status())
            await api.publish("s1", "t1")
            seen.append(await watch.status())
            await api.lease("g", ttl_s=200)
            seen.append(await watch.status())
            await server.pass_time(60)
            seen.append(await watch.status())
            for worker, slot in (("t0", "s0"), ("t1", "s1")):
                await api.register(worker, ttl_s=600)
                await api.publish(slot, worker)
                seen.append(await watch.status())
            await api.delete()
            seen.append(await watch.status())
            await api.give_back(lease_id_of("v", "g"), "g")
            seen.append(await watch.status())
            await api.withdraw("s0", "t0")
            seen.append(await watch.status())
            await api.withdraw("s1", "t1")
            seen.append(await watch.status())
            assert await watch.ended()
        told = [(s.state, s.covered_slots, list(s.missing_slots), s.live_leases) for s in seen]
        assert told == [
            (STAGING, 0, ["s0", "s1"], 0),
            (STAGING, 1, ["s1"], 0),
            (READY, 2, [], 0),
            (READY, 2, [], 1),
            (DEGRADED, 0, ["s0", "s1"], 1),
            (DEGRADED, 1, ["s1"], 1),
            (READY, 2, [], 1),
            (RELEASING, 2, [], 1),
            (RELEASING, 2, [], 0),
            (RELEASING, 1, ["s0"], 0),
            (RETIRED, 0, ["s0", "s1"], 0),
        ]
        revisions = [status.revision for status in seen]
        assert revisions == sorted(set(revisions))
        assert "t0" in seen[4].reason
        assert seen[2].ready_at_unix_ms == seen[6].ready_at_unix_ms > 0
        assert {status.expected_slots for status in seen} == {2}

    async def test_unknown_and_blank(self, api: Api) -> None:
        for uid, code in (("v", grpc.StatusCode.NOT_FOUND), (" ", grpc.StatusCode.INVALID_ARGUMENT)):
            async with watching(api, uid) as watch:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.next()
                assert caught.value.code() == code

    async def test_before_its_creation(self, api: Api) -> None:
        async with watching(api, wait_for_creation=True, heartbeat_ms=100) as watch:
            assert not (await watch.next()).HasField("status")
            await api.create()
            message = await watch.next()
            while not message.HasField("status"):
                message = await watch.next()
            assert message.status.state == STAGING

    async def test_resuming_where_nothing_has_changed(self, api: Api) -> None:
        await api.create()
        await api.register("t0")
        revision = (await api.status()).revision
        async with watching(api, from_revision=revision) as watch:
            with anyio.move_on_after(0.1) as silence:
                await watch.next()
            assert silence.cancelled_caught
        async with watching(api, from_revision=revision) as watch:
            await api.publish("s0", "t0")
            assert (await watch.status()).covered_slots == 1
        async with watching(api, from_revision=revision) as watch:
            assert (await watch.status()).covered_slots == 1
        async with watching(api, from_revision=revision + 1_000) as watch:  # of a store that was lost
            assert (await watch.status()).covered_slots == 1

    async def test_silence_is_filled_with_the_present_status(self, api: Api) -> None:
        await api.create()
        async with watching(api, heartbeat_ms=100) as watch:
            first = await watch.status()
            assert await watch.status() == first

    async def test_what_says_nothing_new_is_not_sent(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        await api.lease("g")
        async with watching(api) as watch:
            assert (await watch.status()).live_leases == 1
            for _ in range(5):
                server.clock.advance(100)
                await api.lease("g")  # renewals
                await api.publish("s0", "t0")  # repeats
            await api.delete()
            assert (await watch.status()).state == RELEASING

    async def test_it_ends_at_once_where_all_is_over(self, api: Api) -> None:
        await api.create()
        await api.delete()
        revision = (await api.status()).revision
        async with watching(api, from_revision=revision) as watch:
            assert (await watch.status()).state == RETIRED
            assert await watch.ended()

    async def test_forgotten_is_the_last_word(self, server: Server, api: Api) -> None:
        await api.create()
        async with watching(api) as watch:
            last = await watch.status()
            stored = (await server.running.registry.store.read_version("v")).stored
            await server.running.registry.store.commit_version(
                "v", None, expected_revision=stored.revision, valid_until_ms=None, wake_at_ms=None
            )
            gone = await watch.status()
            assert (gone.state, gone.version_id, gone.sequence) == (FORGOTTEN, "v", last.sequence)
            assert await watch.ended()

    async def test_an_expiry_is_told_without_anybody_asking(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        async with watching(api) as watch:
            assert (await watch.status()).state == READY

            async def let_time_pass() -> None:
                while True:
                    server.clock.advance(1_000)
                    await anyio.sleep(0.005)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(let_time_pass)
                assert (await watch.status()).state == DEGRADED
                tasks.cancel_scope.cancel()

    async def test_a_thousand_slots_show_sixteen_that_are_missing(self, api: Api) -> None:
        await api.create(slots=[f"s{n:04}" for n in range(1_000)])
        status = await api.status()
        assert (status.expected_slots, status.covered_slots) == (1_000, 0)
        assert list(status.missing_slots) == [f"s{n:04}" for n in range(16)]


class TestWatchModel:
    async def test_snapshot_then_changes(self, api: Api) -> None:
        await api.register("t0")
        await api.create("a")
        await api.create("b")
        await api.create("elsewhere", model="other")
        async with watching_model(api) as watch:
            assert [(await watch.status()).version_id for _ in "ab"] == ["a", "b"]
            assert (await watch.next()).snapshot_complete
            await api.publish("s0", "t0", uid="b")
            assert (await watch.status()).covered_slots == 1
            await api.create("c")
            assert (await watch.status()).version_id == "c"
            await api.create("elsewhere2", model="other")
            await api.delete("a")
            status = await watch.status()
            assert (status.version_id, status.state) == ("a", RETIRED)

    async def test_forgotten_versions_are_told(self, server: Server, api: Api) -> None:
        await api.create("a")
        await api.delete("a")
        async with watching_model(api) as watch:
            assert (await watch.status()).state == RETIRED
            assert (await watch.next()).snapshot_complete
            await server.pass_time(3_600)
            assert (await watch.status()).state == FORGOTTEN

    async def test_an_empty_model_and_its_heartbeat(self, api: Api) -> None:
        async with watching_model(api, heartbeat_ms=100) as watch:
            assert (await watch.next()).snapshot_complete
            beat = await watch.next()
            assert not beat.HasField("status")
            assert not beat.snapshot_complete

    async def test_a_large_snapshot_comes_in_pages(self, api: Api) -> None:
        async with anyio.create_task_group() as tasks:
            for n in range(250):
                tasks.start_soon(api.create, f"v{n}")
        async with watching_model(api) as watch:
            assert len({(await watch.status()).version_id for _ in range(250)}) == 250
            assert (await watch.next()).snapshot_complete


class TestManyWatchers:
    async def test_a_slow_one_holds_up_nobody_and_gets_the_newest(self, server: Server, api: Api) -> None:
        slots = [f"s{n}" for n in range(100)]
        await api.create(slots=slots)
        await api.register("t0")
        async with watching(api) as slow, watching(api) as quick:
            await slow.status()
            await quick.status()
            for slot in slots:
                await api.publish(slot, "t0")
            status = await quick.status()
            while status.state != READY:
                status = await quick.status()
            status = await slow.status()
            while status.state != READY:
                status = await slow.status()
            assert status.covered_slots == 100

    async def test_all_are_told_and_leave_nothing_behind(self, server: Server, api: Api) -> None:
        await api.make_ready()
        hub = server.running.hub
        async with anyio.create_task_group() as tasks:
            told: list[int] = []

            async def one() -> None:
                async with watching(api) as watch:
                    while (await watch.status()).state != RELEASING:
                        pass
                    told.append(1)

            for _ in range(100):
                tasks.start_soon(one)

            async def all_watch() -> bool:
                return hub.watchers == 100

            await eventually(all_watch)
            await api.delete()
        assert len(told) == 100

        async def nobody_watches() -> bool:
            return hub.watchers == 0

        await eventually(nobody_watches)

    async def test_a_server_that_stops_tells_them(self, server: Server, api: Api) -> None:
        await api.create()
        async with watching(api) as watch, watching_model(api) as model_watch:
            await watch.status()
            await model_watch.status()
            await model_watch.next()
            server.running.hub.close()
            for stream in (watch, model_watch):
                with pytest.raises(grpc.aio.AioRpcError, match="the server is stopping") as caught:
                    await stream.next()
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
