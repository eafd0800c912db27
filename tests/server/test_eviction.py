"""The end of a version from outside: eviction, drains with short spans, a trainer that died, `keep_last`."""

from __future__ import annotations

import json
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.cli.main import main
from modelexpress_rl.control import AsyncModelExpressControlClient, ModelExpressControlClient
from modelexpress_rl.rpc import NotFound
from modelexpress_rl.version import VersionState
from tests.server.api import GENERATOR, RELEASING, Api, Server, eventually, refused
from tests.server.process import serve

pytestmark = pytest.mark.anyio

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
SPANS = ("--drain-deadline", "300ms", "--retention", "600ms")


async def evict(api: Api, uid: str = "v") -> v1.VersionStatus:
    return (await api.control.EvictVersion(v1.EvictVersionRequest(version_id=uid))).status


async def check(api: Api, lease_id: str, worker_id: str, uid: str = "v") -> v1.CheckLeaseResponse:
    request = v1.CheckLeaseRequest(version_id=uid, worker_id=worker_id, lease_id=lease_id)
    return await api.control.CheckLease(request)


class TestEvict:
    async def test_no_lease_is_granted_or_renewed_and_those_that_are_live_end(
        self, server: Server, api: Api
    ) -> None:
        await api.make_ready(ttl_s=600)
        for reader in ("g", "h"):
            await api.register(reader, GENERATOR, ttl_s=600)
        lease = await api.lease("g", ttl_s=30)
        status = await evict(api)
        assert (status.state, status.live_leases) == (v1.VERSION_STATE_RELEASING, 1)
        assert status.drain_deadline_unix_ms == status.now_unix_ms
        assert status.reason == "evicted by an operator"
        await refused(api.lease("g", ttl_s=30), PRECONDITION, "drain deadline")
        await refused(api.lease("h", ttl_s=30), PRECONDITION)
        assert (await check(api, lease.lease_id, "g")).held
        await server.pass_time(31)
        assert (await api.status()).live_leases == 0
        assert await api.withdraw("s0", "t0")
        assert await api.withdraw("s1", "t1")
        assert (await api.status()).state == v1.VERSION_STATE_RETIRED

    async def test_again_and_after_a_release_that_was_kinder(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.delete()
        before = await api.status()
        after = await evict(api)
        assert after.drain_deadline_unix_ms < before.drain_deadline_unix_ms
        assert await evict(api) == after
        await refused(evict(api, "other"), grpc.StatusCode.NOT_FOUND, "other")
        await refused(evict(api, " "), grpc.StatusCode.INVALID_ARGUMENT, "version_id")

    async def test_the_control_clients(self, server: Server, api: Api) -> None:
        address = server.running.address
        await api.create("a", slots=["s"])
        await api.create("b", slots=["s"])
        async with AsyncModelExpressControlClient.connect(address) as client:
            assert (await client.evict_weight_version("a")).state is VersionState.RETIRED

        def blocking() -> None:
            with ModelExpressControlClient.connect(address) as client:
                assert client.evict_weight_version("b").state is VersionState.RETIRED
                with pytest.raises(NotFound, match="nobody"):
                    client.evict_weight_version("nobody")

        await anyio.to_thread.run_sync(blocking)


class TestCheckLease:
    async def test_it_is_held_while_it_is_live_and_by_its_holder_only(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=600)
        for reader in ("g", "h"):
            await api.register(reader, GENERATOR, ttl_s=600)
        lease = await api.lease("g", ttl_s=30)
        other = await api.lease("h", ttl_s=60)
        answer = await check(api, lease.lease_id, "g")
        assert answer.held
        granted = {one.worker_id: one.lease_id for one in answer.live_leases}
        assert {name.partition(".")[0] for name in granted.values()} == {lease.lease_id, other.lease_id}
        assert (await check(api, granted["g"], "g")).held  # as our readers name it: which grant it was
        assert not (await check(api, f"{lease.lease_id}.1", "g")).held
        assert lease.expires_at_unix_ms - answer.now_unix_ms == 30_000
        assert not (await check(api, lease.lease_id, "h")).held
        assert not (await check(api, "00000000", "g")).held
        await server.pass_time(30)  # the deadline itself is too late
        answer = await check(api, lease.lease_id, "g")
        assert (answer.held, [one.worker_id for one in answer.live_leases]) == (False, ["h"])
        await api.give_back(other.lease_id, "h")
        assert not (await check(api, other.lease_id, "h")).held
        await refused(check(api, lease.lease_id, "g", "w"), grpc.StatusCode.NOT_FOUND, "w")


class TestTheCommand:
    async def test_it_ends_a_version_and_waits(self, server: Server, api: Api, capsys: Any) -> None:
        address = server.running.address
        await api.make_ready()
        code = await anyio.to_thread.run_sync(main, ["evict", "v", "--server", address])
        assert code == 0
        assert capsys.readouterr().out.startswith("v RELEASING, 2/2 slots (evicted by an operator)")
        await api.withdraw("s0", "t0")
        await api.withdraw("s1", "t1")
        words = ["evict", "v", "--server", address, "--json", "--wait", "5"]
        assert await anyio.to_thread.run_sync(main, words) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "RETIRED"

    async def test_what_goes_wrong_is_said(self, server: Server, api: Api, capsys: Any) -> None:
        address = server.running.address
        words = ["evict", "nobody", "--server", address]
        assert await anyio.to_thread.run_sync(main, words) == 1
        assert "version nobody is not known" in capsys.readouterr().err
        await api.make_ready()
        words = ["evict", "v", "--server", address, "--wait", "0.2"]
        assert await anyio.to_thread.run_sync(main, words) == 1
        assert "is not RETIRED after 0.2 s" in capsys.readouterr().err


class TestShortSpans:
    """A real server with a real clock, from release to forgotten."""

    async def test_a_drain_has_an_end_and_then_everything_is_forgotten(self) -> None:
        async with (
            serve(*SPANS, "--max-lease-ttl", "2s") as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            api = Api(channel)
            await api.make_ready(ttl_s=60)
            await api.register("g", GENERATOR, ttl_s=60)
            await api.lease("g", ttl_s=2)
            await api.delete()
            await api.lease("g", ttl_s=2)  # it is renewed until the drain deadline

            async def refused_now() -> str | None:
                try:
                    await api.lease("g", ttl_s=2)
                except grpc.aio.AioRpcError as error:
                    return error.details()
                return None

            assert "drain deadline passed" in await eventually(refused_now)
            assert (await api.get()).state == RELEASING

            async def forgotten() -> bool:
                try:
                    await api.status()
                except grpc.aio.AioRpcError as error:
                    return error.code() == grpc.StatusCode.NOT_FOUND
                return False

            # The trainers live and never withdraw: it is abandoned at drain deadline plus retention,
            # once the last lease has ended, and forgotten a retention later.
            await eventually(forgotten)
            assert (await api.create(slots=["s0"])).expected_source_slots == ["s0"]

    async def test_a_released_version_whose_trainer_is_dead_ends_by_itself(self) -> None:
        async with serve(*SPANS) as running, grpc.aio.insecure_channel(running.address) as channel:
            api = Api(channel)
            await api.create(slots=["s0"])
            await api.register("t0", ttl_s=1)
            await api.publish("s0", "t0")
            await api.delete()
            call = api.control.WatchVersion(v1.WatchVersionRequest(version_id="v"))
            with anyio.fail_after(10):
                states = [message.status.state async for message in call]
            assert states[0] == v1.VERSION_STATE_RELEASING
            assert v1.VERSION_STATE_RETIRED in states

    async def test_the_server_keeps_as_many_as_it_was_told(self) -> None:
        options = ("--keep-last", "2", "--keep-last-for", "a=b=1", *SPANS)
        async with serve(*options) as running, grpc.aio.insecure_channel(running.address) as channel:
            api = Api(channel)
            for model in ("m", "a=b"):
                await api.register(f"t {model}", model=model, ttl_s=600)
                for n in range(4):
                    await api.create(f"{model} {n}", model=model, slots=["s"])
                    await api.publish("s", f"t {model}", uid=f"{model} {n}")

            async def kept() -> bool:
                states = [v1.VERSION_STATE_READY]
                listed = await api.control.ListVersions(v1.ListVersionsRequest(states=states))
                return [each.version.uid for each in listed.versions] == ["a=b 3", "m 2", "m 3"]

            await eventually(kept)
