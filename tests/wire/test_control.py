"""The orchestrator's client against a server of the other stack: modern, old, restarted, emptied."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import grpc
import pytest

from modelexpress_rl import rpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.control import AsyncModelExpressControlClient, ModelExpressControlClient
from modelexpress_rl.errors import DeadlineExceeded, UsageError, VersionGone
from modelexpress_rl.object_storage import ObjectStorageSource, ObjectStorageType
from modelexpress_rl.rpc.watch import WatchPolicy
from modelexpress_rl.version import (
    VersionState,
    VersionStatus,
    WeightPayloadFormat,
    WeightVersionRef,
    WeightVersionState,
)
from tests.wire.fake_server import READY, RELEASING, FakeControlPlane, Store

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=[True, False], ids=["modern", "old"])
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane(modern=request.param) as server:
        yield server


@pytest.fixture
async def modern() -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane() as server:
        yield server


def client_of(fake: FakeControlPlane, **policy: object) -> AsyncModelExpressControlClient:
    plane = rpc.ControlPlane.dial(fake.url, rpc_timeout_s=10.0)
    return AsyncModelExpressControlClient(plane, policy=WatchPolicy(**policy))  # type: ignore[arg-type]


async def created(client: AsyncModelExpressControlClient, uid: str = "run:7", model: str = "m") -> None:
    await client.create_weight_version(
        model, uid, WeightPayloadFormat.FULL_TENSOR, expected_source_slots=["s0", "s1"], uid=uid
    )


async def test_a_versions_life(fake: FakeControlPlane) -> None:
    async with AsyncModelExpressControlClient.connect(fake.url) as client:
        version = await client.create_weight_version("m", "k", "FULL_TENSOR", ["s0", "s1"], uid="run:7")
        assert version.ref == WeightVersionRef("run:7")
        assert version.expected_source_slots == ("s0", "s1")
        assert version.state is WeightVersionState.STAGING
        assert await client.create_weight_version("m", "k", "FULL_TENSOR", ["s0", "s1"]) == version
        assert await client.get_weight_version(version) == version
        ready = await client.update_weight_version_state("run:7", WeightVersionState.READY)
        assert ready.state is WeightVersionState.READY
        assert (await client.delete_weight_version(version.ref)).state is WeightVersionState.RELEASING


async def test_a_delta_in_object_storage(fake: FakeControlPlane) -> None:
    source = ObjectStorageSource(ObjectStorageType.S3, "s3://b/v8/model.safetensors.index.json")
    async with AsyncModelExpressControlClient.connect(fake.url) as client:
        version = await client.create_weight_version(
            "m", "k8", "XOR_DELTA", base_version_id="v7", object_storage=source, state="READY"
        )
    assert version.object_storage == source
    assert version.base_version_id == "v7"
    assert version.version_id


async def test_a_refusal_is_a_grpc_rpc_error(fake: FakeControlPlane) -> None:
    async with AsyncModelExpressControlClient.connect(fake.url) as client:
        with pytest.raises(grpc.RpcError) as caught:
            await client.get_weight_version("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(UsageError, match="version_id"):
            await client.get_weight_version(" ")


async def test_a_call_is_tried_again(fake: FakeControlPlane) -> None:
    fake.store.failures = [grpc.StatusCode.UNAVAILABLE] * 2
    async with client_of(fake) as client:
        await created(client)
    assert fake.store.calls == ["CreateWeightVersion"] * 3


async def test_versions_are_listed_over_all_pages(modern: FakeControlPlane) -> None:
    async with client_of(modern) as client:
        for number in range(5):
            await created(client, f"v{number}")
        await created(client, "other", model="n")
        await modern.store.set_state("v3", READY)
        assert [each.version_id for each in await client.list_weight_versions("m")] == [
            f"v{number}" for number in range(5)
        ]
        assert len(await client.list_weight_versions()) == 6
        (ready,) = await client.list_version_statuses("m", states=["READY"])
        assert (ready.version_id, ready.covered_slots) == ("v3", 2)


async def test_an_old_server_can_not_list() -> None:
    async with FakeControlPlane(modern=False) as old, client_of(old) as client:
        with pytest.raises(rpc.Unimplemented):
            await client.list_weight_versions()
        with pytest.raises(rpc.Unimplemented):
            await anext(client.watch_model("m"))


async def test_waiting_for_ready(fake: FakeControlPlane) -> None:
    async with client_of(fake) as client, anyio.create_task_group() as tasks:
        await created(client)

        async def publish() -> None:
            await fake.store.set_state("run:7", READY)

        tasks.start_soon(publish)
        status = await client.wait_for_state("run:7", "READY", 10.0)
        assert status.state is VersionState.READY
        assert (await client.wait_for_state("run:7", WeightVersionState.READY, 10.0)).version_id == "run:7"


async def test_waiting_ends_and_says_how_the_version_stands(fake: FakeControlPlane) -> None:
    async with client_of(fake) as client:
        await created(client)
        with pytest.raises(
            DeadlineExceeded, match=r"run:7.* not READY after 0.2 s: run:7 STAGING, 0/2 slots"
        ):
            await client.wait_for_state("run:7", WeightVersionState.READY, 0.2)
        with pytest.raises(rpc.NotFound):
            await client.wait_for_state("nobody", "READY", 10.0)
        with pytest.raises(DeadlineExceeded, match="not known to the control plane"):
            await client.wait_for_state("nobody", "READY", 0.2, wait_for_creation=True)


async def test_waiting_for_what_will_not_come(fake: FakeControlPlane) -> None:
    async with client_of(fake) as client:
        await created(client)
        await client.delete_weight_version("run:7")
        with pytest.raises(VersionGone, match="will not become READY"):
            await client.wait_for_state("run:7", "READY", 10.0)
        assert (await client.wait_for_state("run:7", "RELEASING", 10.0)).state is VersionState.RELEASING


async def test_waiting_for_a_version_that_is_yet_to_come(fake: FakeControlPlane) -> None:
    async with client_of(fake) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(created, client)
        status = await client.wait_for_state("run:7", VersionState.STAGING, 10.0, wait_for_creation=True)
        assert status.missing_slots == ("s0", "s1")


async def test_watching_yields_changes_only(fake: FakeControlPlane) -> None:
    seen: list[VersionState] = []
    async with client_of(fake, heartbeat_s=0.05) as client:
        await created(client)
        async for status in client.watch("run:7"):
            seen.append(status.state)
            if len(seen) == 1:
                await asyncio.sleep(0.15)  # several heartbeats or polls, in which nothing changes
                await fake.store.set_state("run:7", READY)
            elif status.state is VersionState.READY:
                await fake.store.set_state("run:7", RELEASING)
            elif status.state is VersionState.RELEASING:
                await fake.store.forget("run:7")
    assert seen == [VersionState.STAGING, VersionState.READY, VersionState.RELEASING, VersionState.FORGOTTEN]


async def test_polling_slows_down_and_speeds_up_at_a_change() -> None:
    slept: list[float] = []

    async with FakeControlPlane(modern=False) as old:

        async def sleep(delay_s: float) -> None:
            slept.append(delay_s)
            if len(slept) == 8:
                await old.store.set_state("run:7", READY)
            if len(slept) == 9:
                await old.store.set_state("run:7", RELEASING)
                await old.store.forget("run:7")
            await asyncio.sleep(0)

        async with client_of(old, sleep=sleep, rng=random.Random(1)) as client:
            await created(client)
            states = [status.state async for status in client.watch("run:7")]
    assert states == [VersionState.STAGING, VersionState.READY, VersionState.FORGOTTEN]
    assert slept[0] <= 0.05
    assert 0.5 <= slept[7] <= 1.0
    assert slept[8] <= 0.05


@pytest.mark.parametrize("modern", [True, False])
async def test_watching_survives_a_restart(modern: bool) -> None:
    store = Store()
    async with FakeControlPlane(modern=modern, store=store) as first:
        client = client_of(first)
        await created(client)
        watch = client.watch("run:7")
        assert (await anext(watch)).state is VersionState.STAGING
    async with client, aclosing(watch), anyio.create_task_group() as tasks:

        async def restart() -> None:
            await store.set_state("run:7", READY)
            async with FakeControlPlane(modern=modern, store=store, port=first.port):
                await seen.wait()

        seen = anyio.Event()
        tasks.start_soon(restart)
        assert (await anext(watch)).state is VersionState.READY
        seen.set()


async def test_a_server_that_comes_back_empty_has_forgotten() -> None:
    async with FakeControlPlane() as first:
        client = client_of(first)
        await created(client)
        watch = client.watch("run:7")
        await anext(watch)
    async with FakeControlPlane(port=first.port), aclosing(watch):
        gone = await anext(watch)
        assert (gone.state, gone.model_name) == (VersionState.FORGOTTEN, "m")
        with pytest.raises(StopAsyncIteration):
            await anext(watch)
    await client.close()


async def test_watching_a_server_that_is_not_there_ends() -> None:
    async with FakeControlPlane() as gone:
        pass
    plane = rpc.ControlPlane.dial(gone.url, rpc_timeout_s=0.2)
    async with AsyncModelExpressControlClient(plane) as client:
        with pytest.raises(rpc.Unavailable):
            await anext(client.watch("v"))


async def test_watching_a_model(modern: FakeControlPlane) -> None:
    async with client_of(modern) as client, aclosing(client.watch_model("m")) as watch:
        await created(client, "v0")
        assert (await anext(watch)).version_id == "v0"
        await created(client, "elsewhere", model="n")
        await created(client, "v1")
        second = await anext(watch)
        assert (second.version_id, second.sequence) == ("v1", 3)
        await modern.store.set_state("v0", READY)
        assert (await anext(watch)).state is VersionState.READY


async def test_a_model_on_a_server_that_comes_back_empty() -> None:
    async with FakeControlPlane() as first:
        client = client_of(first)
        await created(client, "v0")
        watch = client.watch_model("m")
        await anext(watch)
    async with FakeControlPlane(port=first.port) as second, aclosing(watch):
        await second.store.put(refit.WeightVersion(uid="v1", model_name="m", state=1))  # type: ignore[arg-type]
        seen = {}
        for _ in range(2):
            status = await anext(watch)
            seen[status.version_id] = status.state
    assert seen == {"v0": VersionState.FORGOTTEN, "v1": VersionState.STAGING}
    await client.close()


class TestBlocking:
    """The facade, over a server in another process, since it blocks this one's loop."""

    @pytest.fixture
    def url(self) -> object:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.wire.fake_server", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()
        process.wait(10)
        process.stdout.close()

    def test_a_versions_life(self, url: str) -> None:
        with ModelExpressControlClient.connect(url) as client:
            version = client.create_weight_version("m", "k", WeightPayloadFormat.FULL_TENSOR, ["s"], uid="v")
            with client.watch("v") as watch:
                assert next(watch).state is VersionState.STAGING
                client.update_weight_version_state("v", "READY")
                assert next(watch).state is VersionState.READY
            assert client.wait_for_state(version, "READY", 10.0).state is VersionState.READY
            with pytest.raises(DeadlineExceeded):
                client.wait_for_state("w", "READY", 0.05, wait_for_creation=True)
            assert [each.version_id for each in client.list_weight_versions("m")] == ["v"]
            assert [each.version_id for each in client.list_version_statuses("m")] == ["v"]
            assert next(iter(client.watch_model("m"))).version_id == "v"
            with pytest.raises(grpc.RpcError) as caught:
                client.get_weight_version("nobody")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert client.delete_weight_version("v").state is WeightVersionState.RELEASING
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.get_weight_version("v")

    def test_a_bad_address_opens_nothing(self) -> None:
        with pytest.raises(UsageError, match="server_url"):
            ModelExpressControlClient.connect("nowhere")


def test_statuses_are_public_data() -> None:
    status = VersionStatus("v", "m", VersionState.READY)
    assert status.ref == WeightVersionRef("v")
