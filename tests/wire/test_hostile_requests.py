"""What a trainer's endpoint does with requests that are huge, no message at all, or never come."""

from __future__ import annotations

import asyncio
import resource
import struct
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, TrailersReceived

from modelexpress_rl import rpc
from modelexpress_rl._pb import refit_grpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.rpc import endpoint

pytestmark = pytest.mark.anyio
PATH = "/model_express.refit.RefitWorkerService/GetWeightVersionShardManifest"
NAMES = refit.GetWeightVersionShardManifestRequest(version_id="v", source_slot_id="s")


class Service(refit_grpc.RefitWorkerServiceBase):
    async def GetWeightVersionShardManifest(self, stream: Any) -> None:  # noqa: N802 (the wire's name)
        assert await stream.recv_message() == NAMES
        await stream.send_message(refit.GetWeightVersionShardManifestResponse(manifest=b"m"))


async def _answers(port: int) -> bool:
    async with rpc.WorkerEndpoint(rpc.Address("127.0.0.1", port), rpc_timeout_s=10.0) as client:
        return (await client.get_weight_version_shard_manifest(NAMES)).manifest == b"m"


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\x0a" + b"\xff" * 40, grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(endpoint.MAX_REQUEST_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (bytes(64 * 2**20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["unreadable", "too big", "far too big"],
)
async def test_it_is_refused_and_not_logged_as_our_fault(
    request_bytes: bytes, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async with rpc.EndpointServer([Service()], host="127.0.0.1") as server:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                await channel.unary_unary(PATH)(request_bytes, timeout=30)
            assert refused.value.code() is code
            assert await channel.unary_unary(PATH)(NAMES.SerializeToString(), timeout=10)
    assert "Traceback" not in caplog.text


async def test_a_request_that_claims_four_gigabytes_is_not_waited_for() -> None:
    async with rpc.EndpointServer([Service()], host="127.0.0.1") as server:
        peer = _Peer()
        await peer.send(server.port, b"\0" + struct.pack(">I", 2**32 - 1) + bytes(1000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert (await peer.status())["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
        assert await _answers(server.port)
        await peer.close()


async def test_a_request_that_does_not_come_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_TIMEOUT_S", 0.05)
    async with rpc.EndpointServer([Service()], host="127.0.0.1") as server:
        peer = _Peer()
        await peer.send(server.port, b"\0" + struct.pack(">I", 100) + bytes(10))
        assert (await peer.status())["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        await peer.close()


class _Peer:
    """Speaks HTTP/2 by hand, so that it can stop in the middle."""

    def __init__(self) -> None:
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))

    async def send(self, port: int, data: bytes) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._h2.initiate_connection()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "peer")]
        self._h2.send_headers(1, [*headers, ("te", "trailers"), ("content-type", "application/grpc")])
        self._h2.send_data(1, data)
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()

    async def status(self) -> dict[str, str]:
        """The headers with which the call ended."""
        with anyio.fail_after(10):
            while True:
                for event in self._h2.receive_data(await self._reader.read(65536)):
                    assert not isinstance(event, DataReceived)
                    headers = dict(getattr(event, "headers", None) or ())
                    if isinstance(event, TrailersReceived) or "grpc-status" in headers:
                        return headers

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
