"""The trainer over real NIXL: another process reads what is published, in place and from a copy."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.rpc import WorkerEndpoint, parse_address
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.train.resources import nixl_agent
from tests.train.support import MODEL, SLOT, Orchestrator, within

pytest.importorskip("nixl")
pytestmark = [pytest.mark.anyio, pytest.mark.heavy]


@pytest.mark.parametrize("mode", ["IN_PLACE", "COPY_TO_HOST"])
async def test_another_process_reads_the_second_version(
    address: str, orchestrator: Orchestrator, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    tensors = {"a": np.arange(50_000, dtype=np.float32), "b": np.arange(300, dtype=np.int64)}
    config = ModelExpressTrainerConfig(
        device_id=0,
        model_name=MODEL,
        server_url=address,
        staging_mode=mode,
        engine_context=PlainTrainerContext(tensors, slot_id=SLOT),
    )
    async with await AsyncModelExpressTrainerClient.initialize(config) as client:
        for version in ("v1", "v2"):
            for tensor in tensors.values():
                tensor += 1
            await orchestrator.create(version)
            staged = await client.publish_version(version)
            if version == "v2":  # loading NIXL in another process takes seconds: once is enough
                got = await anyio.to_thread.run_sync(read_elsewhere, client.worker_endpoint, version)
                assert got == b"".join(tensor.tobytes() for tensor in tensors.values())
            await orchestrator.release(version)
            await within(10, staged.source_reuse_ready)


async def test_the_metadata_listener_runs_only_where_its_port_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    where = SimpleNamespace(agent_name="trainer", host="127.0.0.1", device_index=1)
    monkeypatch.delenv("MX_METADATA_PORT", raising=False)
    async with await nixl_agent(where) as agent:  # type: ignore[arg-type]
        assert agent.metadata_endpoint == ""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MX_METADATA_PORT", str(port - 1))
    async with await nixl_agent(where) as agent:  # type: ignore[arg-type]
        assert agent.metadata_endpoint == f"127.0.0.1:{port}"


def read_elsewhere(endpoint: str, version_id: str) -> bytes:
    command = [sys.executable, "-m", __name__, endpoint, version_id]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


async def read(endpoint: str, version_id: str) -> bytes:
    """In the other process: fetch the manifest, read all it names, one box after the other."""
    from modelexpress_rl.transport.nixl import NixlAgent
    from modelexpress_rl.transport.port import ReadList, Region

    async with WorkerEndpoint(parse_address(endpoint)) as worker:
        request = refit.GetWeightVersionShardManifestRequest(version_id=version_id, source_slot_id=SLOT)
        answer = await worker.get_weight_version_shard_manifest(request)
    found = manifests.decode(answer.manifest)
    into: np.ndarray[Any, Any] = np.zeros(found.table.total_bytes, np.uint8)
    agent = await NixlAgent.create(readable=False)
    await agent.register([Region(into.ctypes.data, into.nbytes)])
    peer = await agent.add_peer(found.agent_meta)
    sizes = found.table.size_bytes.astype(np.uint64)
    local = (np.cumsum(sizes) - sizes).astype(np.uint64) + np.uint64(into.ctypes.data)
    posted = await agent.post(await agent.prepare(peer, ReadList(found.table.addr, local, sizes)))
    await posted.wait(anyio.current_time() + 30)
    await agent.aclose()
    return into.tobytes()


if __name__ == "__main__":
    sys.stdout.buffer.write(anyio.run(read, sys.argv[1], sys.argv[2]))
