"""A control plane, the in-process transport, and trainer clients over both."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np

from modelexpress_rl import rpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.transport.inprocess import Hub
from modelexpress_rl.transport.port import Agent, ReadList, Region
from tests.train.support import MODEL, SLOT, Orchestrator


class Job:
    """A control plane, a transport, and the clients that a test opens."""

    def __init__(self, address: str, orchestrator: Orchestrator) -> None:
        self.address = address
        self.orchestrator = orchestrator
        self.hub = Hub()
        self.agents: list[Agent] = []

    def config(self, tensors: Any = None, **more: Any) -> ModelExpressTrainerConfig:
        given: dict[str, Any] = {
            "device_id": 0,
            "model_name": MODEL,
            "server_url": self.address,
            "engine_context": PlainTrainerContext(tensors, slot_id=SLOT),
            "release_grace_seconds": 0.05,
            "close_timeout_seconds": 2.0,
            **more,
        }
        return ModelExpressTrainerConfig(**given)

    async def open(self, tensors: Any = None, **more: Any) -> AsyncModelExpressTrainerClient:
        return await AsyncModelExpressTrainerClient.initialize(
            self.config(tensors, **more), create_agent=self.agent
        )

    async def agent(self, where: Any) -> Agent:
        self.agents.append(self.hub.agent(where.agent_name))
        return self.agents[-1]

    async def manifest(self, version_id: str) -> tuple[manifests.Manifest, refit.WeightVersionShard]:
        [shard] = await self.orchestrator.shards(version_id)
        async with rpc.WorkerEndpoint(rpc.parse_address(shard.manifest_endpoint)) as endpoint:
            answer = await endpoint.get_weight_version_shard_manifest(
                refit.GetWeightVersionShardManifestRequest(
                    version_id=version_id, source_slot_id=shard.source_slot_id
                )
            )
        assert manifests.digest(answer.manifest) == answer.manifest_digest == shard.manifest_digest
        return manifests.decode(answer.manifest), shard

    async def read(self, version_id: str) -> dict[str, bytes]:
        """Every box of a version, as a reader gets it over the transport."""
        found, _ = await self.manifest(version_id)
        reader = self.hub.agent("reader")
        into = np.zeros(found.table.total_bytes, np.uint8)
        await reader.register([_region(into)])
        peer = await reader.add_peer(found.agent_meta)
        sizes = found.table.size_bytes.astype(np.uint64)
        places = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes)[:-1]]).astype(np.uint64)
        local = places + np.uint64(into.ctypes.data)
        prepared = await reader.prepare(peer, ReadList(found.table.addr, local, sizes))
        read = await reader.post(prepared)
        await read.wait(anyio.current_time() + 5)
        await reader.aclose()
        names = [found.table.tensors.names[i] for i in found.table.tensor.tolist()]
        return {
            name: into[int(at) : int(at + size)].tobytes()
            for name, at, size in zip(names, places, sizes, strict=True)
        }


def _region(array: np.ndarray[Any, Any]) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def weights() -> dict[str, Any]:
    return {
        "a": np.arange(24, dtype=np.float32).reshape(4, 6),
        "b": np.arange(7, dtype=np.int16),
        "c": np.array(5.0, dtype=np.float64),
    }


def bytes_of(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}
