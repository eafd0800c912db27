"""Our grpclib clients against a server of the other stack, and against peers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import grpclib.server
import pytest

from modelexpress_rl import rpc
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_grpc, refit_pb2_grpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import StateError, TryAgainError, UsageError
from tests.wire.fake_server import READY, STAGING, FakeControlPlane
from tests.wire.planes import REGISTER, get, plane_at, version

pytestmark = pytest.mark.anyio


async def test_a_unary_call_reaches_the_other_stack(fake: FakeControlPlane) -> None:
    await fake.store.put(version("run:7"))
    async with plane_at(fake.url) as plane:
        answer = await plane.get_weight_version(get("run:7"))
    assert answer.version.uid == "run:7"


async def test_a_status_of_the_server_is_a_grpc_rpc_error(fake: FakeControlPlane) -> None:
    async with plane_at(fake.url) as plane:
        with pytest.raises(grpc.RpcError) as caught:
            await plane.get_weight_version(get("ünknown"))
    error = caught.value
    assert isinstance(error, rpc.NotFound)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == "version 'ünknown' is not known"
    assert not error.outcome_unknown
    assert str(error).startswith(f"GetWeightVersion at {fake.url}: NOT_FOUND: ")


async def test_an_unknown_service_is_unimplemented() -> None:
    async with FakeControlPlane(modern=False) as old, plane_at(old.url) as plane:
        with pytest.raises(rpc.Unimplemented):
            await plane.get_server_info(v1.GetServerInfoRequest())
        async with plane.watch_model(v1.WatchModelRequest(model_name="m")) as messages:
            with pytest.raises(rpc.Unimplemented):
                await anext(messages)


async def test_a_refused_connection_was_certainly_not_applied() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with plane_at(f"127.0.0.1:{unused.getsockname()[1]}") as plane:
            with pytest.raises(rpc.Unavailable) as caught:
                await plane.get_weight_version(get("v"))
    assert isinstance(caught.value, TryAgainError)
    assert not caught.value.outcome_unknown


async def test_an_unknown_host_is_unavailable() -> None:
    async with plane_at("no-such-host.invalid:1") as plane:
        with pytest.raises(rpc.Unavailable):
            await plane.get_weight_version(get("v"))


async def test_a_call_without_an_answer_ends_at_its_deadline(fake: FakeControlPlane) -> None:
    async with plane_at(fake.url) as plane:
        with pytest.raises(rpc.DeadlineExceeded) as caught:
            await plane.register_worker(REGISTER, timeout_s=0.05)
    assert caught.value.outcome_unknown
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(caught.value, TimeoutError)


async def test_a_peer_that_accepts_and_says_nothing_is_dropped() -> None:
    connections: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server, plane_at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as plane:
        for wanted in (1, 2):
            with pytest.raises(rpc.DeadlineExceeded):
                await plane.get_weight_version(get("v"), timeout_s=0.05)
            await _until(lambda wanted=wanted: len(connections) == wanted)
        for writer in connections:
            writer.close()


async def test_one_slow_call_does_not_break_the_others(fake: FakeControlPlane) -> None:
    await fake.store.put(version("v"))
    async with plane_at(fake.url) as plane, anyio.create_task_group() as tasks:
        ended = anyio.Event()

        async def slow() -> None:
            with pytest.raises(rpc.DeadlineExceeded):
                await plane.register_worker(REGISTER, timeout_s=0.05)
            ended.set()

        await plane.get_weight_version(get("v"))
        channel = plane._channel
        tasks.start_soon(slow)
        while not ended.is_set():
            await plane.get_weight_version(get("v"))
        assert plane._channel is channel


async def test_a_garbage_speaking_peer_is_unavailable() -> None:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server, plane_at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as plane:
        with pytest.raises(rpc.Unavailable):
            await plane.get_weight_version(get("v"))


async def test_a_broken_call_leaves_the_callers_cancellation_count_alone() -> None:
    """grpclib cancels the task of a call that broke; a scope around it must still see its own timeout."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server, plane_at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as plane:
        task = asyncio.current_task()
        assert task is not None
        with anyio.move_on_after(0.05) as scope:
            with pytest.raises(rpc.Unavailable):
                await plane.get_weight_version(get("v"))
            assert task.cancelling() == 0
            await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_a_cancelled_call_ends_at_once(fake: FakeControlPlane) -> None:
    await fake.store.put(version("v"))
    async with plane_at(fake.url) as plane:
        with anyio.move_on_after(0.05) as scope:
            await plane.register_worker(REGISTER)
        assert scope.cancelled_caught
        assert (await plane.get_weight_version(get("v"))).version.uid == "v"


async def test_closing_ends_the_calls_in_flight(fake: FakeControlPlane) -> None:
    plane = plane_at(fake.url)
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(rpc.Unavailable):
                await plane.register_worker(REGISTER)

        tasks.start_soon(call)
        await _until(lambda: fake.store.calls == ["RegisterWorker"])
        await plane.aclose()
    await plane.aclose()
    with pytest.raises(StateError):
        await plane.get_weight_version(get("v"))


async def test_a_stream_yields_changes_and_ends(fake: FakeControlPlane) -> None:
    await fake.store.put(version("v"))
    states = []
    request = v1.WatchVersionRequest(version_id="v")
    async with plane_at(fake.url) as plane, plane.watch_version(request) as messages:
        async for message in messages:
            states.append(message.status.state)
            if len(states) == 1:
                await fake.store.set_state("v", READY)
            elif message.status.state == v1.VERSION_STATE_READY:
                await fake.store.forget("v")
    assert states == [v1.VERSION_STATE_STAGING, v1.VERSION_STATE_READY, v1.VERSION_STATE_FORGOTTEN]


async def test_a_silent_stream_is_ended(fake: FakeControlPlane) -> None:
    await fake.store.put(version("v"))
    request = v1.WatchVersionRequest(version_id="v", heartbeat_ms=60_000)
    async with plane_at(fake.url) as plane, plane.watch_version(request, silence_s=0.1) as messages:
        assert (await anext(messages)).status.version_id == "v"
        with pytest.raises(rpc.DeadlineExceeded):
            await anext(messages)


async def test_leaving_a_stream_early_tells_the_server(fake: FakeControlPlane) -> None:
    await fake.store.put(version("v"))
    async with plane_at(fake.url) as plane:
        for _ in range(3):
            async with plane.watch_version(v1.WatchVersionRequest(version_id="v")) as messages:
                await anext(messages)
        assert (await plane.get_weight_version(get("v"))).version.uid == "v"


class ManifestService(refit_grpc.RefitWorkerServiceBase):
    def __init__(self, manifest: bytes) -> None:
        self.manifest = manifest
        self.sending = 0
        self.released = asyncio.Event()

    async def GetWeightVersionShardManifest(self, stream: grpclib.server.Stream) -> None:  # type: ignore[type-arg]  # noqa: N802
        assert await stream.recv_message() is not None
        self.sending += 1
        try:
            await stream.send_message(refit.GetWeightVersionShardManifestResponse(manifest=self.manifest))
        finally:
            self.sending -= 1


async def test_a_manifest_over_16_mib_passes_and_one_over_the_limit_does_not() -> None:
    manifest = random.Random(0).randbytes(20 * 2**20)
    request = refit.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")
    async with _served(ManifestService(manifest)) as address:
        async with rpc.WorkerEndpoint(address) as endpoint:
            assert (await endpoint.get_weight_version_shard_manifest(request)).manifest == manifest
            with pytest.raises(rpc.Unimplemented):
                await endpoint.get_shard_digests(v1.GetShardDigestsRequest(version_id="v"))
        async with rpc.WorkerEndpoint(address, max_message_bytes=2**20) as endpoint:
            with pytest.raises(rpc.RpcError) as caught:
                await endpoint.get_weight_version_shard_manifest(request)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_reader_that_leaves_in_the_middle_of_a_manifest_leaves_nothing_behind() -> None:
    request = refit.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")
    service = ManifestService(bytes(64 * 2**20))
    async with rpc.EndpointServer([service], host="127.0.0.1") as server:
        for _ in range(3):
            endpoint = rpc.WorkerEndpoint(rpc.Address("127.0.0.1", server.port), max_message_bytes=2**20)
            async with endpoint:
                with pytest.raises(rpc.RpcError):
                    await endpoint.get_weight_version_shard_manifest(request)
        await _until(lambda: service.sending == 0)
        with anyio.fail_after(5):
            await server.aclose(grace_s=60)
        await server.aclose()


async def test_a_call_that_the_peer_resets_leaves_the_others_alone() -> None:
    class Resets(ManifestService):
        async def GetWeightVersionShardManifest(self, stream: Any) -> None:  # noqa: N802
            request = await stream.recv_message()
            if request.version_id == "reset":
                await stream.cancel()
            else:
                await self.released.wait()
                await stream.send_message(refit.GetWeightVersionShardManifestResponse(manifest=b"m"))

    service = Resets(b"")
    async with (
        _served(service) as address,
        rpc.WorkerEndpoint(address) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        answers = []

        async def other() -> None:
            request = refit.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")
            answers.append(await endpoint.get_weight_version_shard_manifest(request))

        tasks.start_soon(other)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(rpc.Unavailable) as caught:
            await endpoint.get_weight_version_shard_manifest(
                refit.GetWeightVersionShardManifestRequest(version_id="reset", source_slot_id="s")
            )
        assert caught.value.outcome_unknown
        service.released.set()
    assert [answer.manifest for answer in answers] == [b"m"]


async def test_a_taken_port_is_named() -> None:
    async with rpc.EndpointServer([ManifestService(b"")]) as first:
        with pytest.raises(UsageError, match=f"{first.port} is taken"):
            await rpc.EndpointServer([ManifestService(b"")], port=first.port).start()
        with pytest.raises(UsageError, match=r"no-such-host.invalid:0"):
            await rpc.EndpointServer([ManifestService(b"")], host="no-such-host.invalid").start()


async def test_the_other_stack_reads_a_manifest_from_our_endpoint() -> None:
    manifest = random.Random(1).randbytes(20 * 2**20)
    request = refit.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")
    async with _served(ManifestService(manifest)) as address:
        channel = grpc.aio.insecure_channel(str(address), options=rpc.GRPC_SERVER_OPTIONS)
        stub = refit_pb2_grpc.RefitWorkerServiceStub(channel)
        assert (await stub.GetWeightVersionShardManifest(request, timeout=10)).manifest == manifest
        await channel.close()


async def test_a_big_request_passes_to_the_other_stack(fake: FakeControlPlane) -> None:
    slots = [f"megatron:partition:{n:064x}" for n in range(200_000)]
    request = refit.CreateWeightVersionRequest(
        model_name="m", idempotency_key="k", state=STAGING, expected_source_slots=slots
    )
    async with plane_at(fake.url) as plane:
        answer = await plane.create_weight_version(request)
    assert answer.version.expected_source_slots == slots


async def test_the_token_goes_with_every_call(fake: FakeControlPlane, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    now_s = 0.0
    credentials = rpc.TokenFile(path, clock=lambda: now_s)
    await fake.store.put(version("v"))
    async with rpc.ControlPlane(rpc.parse_address(fake.url), credentials=credentials) as plane:
        await plane.get_weight_version(get("v"))
        path.write_text("rotated")
        now_s = 59.0
        await plane.get_weight_version(get("v"))
        now_s = 61.0
        await plane.get_weight_version(get("v"))
        path.unlink()
        now_s = 200.0
        await plane.get_weight_version(get("v"))
    sent = [metadata["authorization"] for metadata in fake.store.metadata]
    assert sent == ["Bearer s3cret", "Bearer s3cret", "Bearer rotated", "Bearer rotated"]


@pytest.mark.parametrize("content", [None, "", "two words", "schlüssel", "a\nb"])
def test_a_bad_token_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"MX_AUTH_TOKEN_PATH: no token in .*token"):
        rpc.TokenFile(path).metadata()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("localhost:8001", "localhost:8001"),
        (" http://host.example:80/ ", "host.example:80"),
        ("https://host:443", "host:443"),
        ("grpc://host:1", "host:1"),
        ("[::1]:8001", "[::1]:8001"),
        ("http://[fe80::1]:8001", "[fe80::1]:8001"),
        ("dns:///host:8001", "host:8001"),
        ("dns:host:8001", "host:8001"),
        ("dns:8001", "dns:8001"),
    ],
)
def test_addresses(text: str, wanted: str) -> None:
    address = rpc.parse_address(text)
    assert str(address) == wanted
    assert address.secure == text.startswith("https")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:8o",
        "::1:80",
        "ftp://h:1",
        "h:1/path",
        "u@h:1",
    ],
)
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="MODEL_EXPRESS_URL"):
        rpc.parse_address(text, what="MODEL_EXPRESS_URL")


def test_one_process_may_use_many_event_loops() -> None:
    async def use() -> bytes:
        request = refit.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")
        async with _served(ManifestService(b"m")) as address, rpc.WorkerEndpoint(address) as endpoint:
            return (await endpoint.get_weight_version_shard_manifest(request)).manifest

    assert [asyncio.run(use()) for _ in range(2)] == [b"m", b"m"]


async def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is polled has no event)
            await anyio.sleep(0.005)


@contextlib.asynccontextmanager
async def _served(*services: Any) -> AsyncIterator[rpc.Address]:
    async with rpc.EndpointServer(services, host="127.0.0.1") as server:
        yield rpc.Address("127.0.0.1", server.port)
