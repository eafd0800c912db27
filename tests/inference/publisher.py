"""A small trainer for tests: it lends numpy arrays as shards, serves their manifest, announces them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import anyio
import numpy as np
from numpy.typing import NDArray

from modelexpress_rl._pb import modelexpress_rl_grpc, refit_grpc
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard.digests import digest_table, encode_digests
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.grid import FINER, Selection
from modelexpress_rl.reshard.hashing import ShardDigests, ShardHasher, encode_answer
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.rpc.endpoint import EndpointServer
from modelexpress_rl.topology import TOPOLOGY_HEADER
from modelexpress_rl.transport.port import Agent, Region

NUMPY_DTYPES = {"float32": "torch.float32", "float16": "torch.float16", "uint16": "torch.bfloat16"}


@dataclass
class Held:
    """One shard: a C-contiguous box of a tensor (uint16 stands for bfloat16)."""

    name: str
    data: NDArray[np.generic]
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, data: NDArray[np.generic]) -> Held:
        return cls(name, np.ascontiguousarray(data), (0,) * data.ndim, data.shape)


@dataclass
class Published:
    manifest: bytes
    digest: str
    digests: bytes | None
    hasher: ShardHasher | None = None
    hashed: ShardDigests | None = None
    calls: list[str] = field(default_factory=list)


class Publisher:
    """One trainer process: `async with Publisher(control, agent, "w0") as publisher`."""

    def __init__(
        self, control: ControlPlane, agent: Agent, worker_id: str, *, model_name: str = "m", ttl_s: int = 60
    ) -> None:
        self.control = control
        self.agent = agent
        self.worker_id = worker_id
        self.model_name = model_name
        self.served: dict[tuple[str, str], Published] = {}
        self.calls: list[str] = []
        # "selected" as trainers answer now; "whole" as one does that knows no selection, "other grid" as
        # one does whose grid is another.
        self.digests_are = "selected"
        self.damages_digests = False
        self.digests_made, self.digests_answered = anyio.Event(), anyio.Event()
        self.digests_made.set()
        self.digests_answered.set()
        self.topology = ""
        self.answering = anyio.Event()
        self.answering.set()
        self._ttl_s = ttl_s
        self._registered: set[tuple[Region, ...]] = set()
        self.lent: list[Sequence[Held]] = []
        self._server = EndpointServer([_Manifests(self), _Digests(self)], host="127.0.0.1")

    async def __aenter__(self) -> Self:
        await self._server.start()
        await self.register()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.aclose()
        await self.agent.aclose()

    async def stop_serving(self) -> None:
        """The endpoint goes away; the registration stays."""
        await self._server.aclose()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    async def register(self) -> None:
        worker = refit.WorkerRegistration(
            worker_id=self.worker_id, role=refit.WORKER_ROLE_TRAINER, model_name=self.model_name
        )
        await self.control.register_worker(
            refit.RegisterWorkerRequest(worker=worker, ttl_seconds=self._ttl_s)
        )

    async def serve(
        self, version: str, slot: str, held: Sequence[Held], *, digests: bool = True
    ) -> Published:
        """Register the memory, kept alive for good, and serve its manifest."""
        rows = [
            Shard(
                h.name,
                NUMPY_DTYPES[h.data.dtype.name],
                h.full_shape,
                h.offset,
                h.data.shape,
                h.data.ctypes.data,
            )
            for h in held
        ]
        self.lent.append(held)
        regions = tuple(Region(h.data.ctypes.data, h.data.nbytes) for h in held)
        if regions not in self._registered:
            await self.agent.register(regions)
            self._registered.add(regions)
        table = ShardTable.build(rows)
        data = manifests.encode(manifests.Manifest(self.agent.name, "", await self.agent.metadata(), table))
        published = self.served[version, slot] = Published(data, manifests.digest(data), None)
        if digests:
            flat = [h.data.reshape(-1).view(np.uint8) for h in held]
            whole_table = digest_table(table, lambda row: flat[row])
            published.digests = encode_digests(whole_table, published.digest)
            hasher = published.hasher = ShardHasher(table, lambda row: flat[row], fixed=False)
            published.hashed = ShardDigests(hasher)
            for unit in range(len(hasher.units)):
                hasher.hash_slabs(unit, published.hashed, lambda: False)
        return published

    async def announce(self, version: str, slot: str, *, digest: str | None = None) -> None:
        shard = refit.WeightVersionShard(
            version_id=version,
            source_slot_id=slot,
            worker_id=self.worker_id,
            tensor_count=1,
            total_bytes=1,
            manifest_digest=digest or self.served[version, slot].digest,
            manifest_endpoint=self.endpoint,
        )
        await self.control.create_weight_version_shard(refit.CreateWeightVersionShardRequest(shard=shard))

    async def publish(self, version: str, slot: str, held: Sequence[Held], *, digests: bool = True) -> None:
        await self.serve(version, slot, held, digests=digests)
        await self.announce(version, slot)


async def create_version(control: ControlPlane, version: str, slots: Sequence[str]) -> None:
    await control.create_weight_version(
        refit.CreateWeightVersionRequest(
            model_name="m",
            idempotency_key=f"key-{version}",
            uid=version,
            payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
            expected_source_slots=slots,
            state=refit.WEIGHT_VERSION_STATE_STAGING,
        )
    )


def whole(tensors: Mapping[str, NDArray[np.generic]]) -> list[Held]:
    return [Held.whole(name, data) for name, data in tensors.items()]


class _Manifests(refit_grpc.RefitWorkerServiceBase):
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def GetWeightVersionShardManifest(self, stream) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
        request = await stream.recv_message()
        self._publisher.calls.append("manifest")
        await self._publisher.answering.wait()
        if self._publisher.topology:
            await stream.send_initial_metadata(metadata={TOPOLOGY_HEADER: self._publisher.topology})
        found = self._publisher.served[request.version_id, request.source_slot_id]
        await stream.send_message(
            refit.GetWeightVersionShardManifestResponse(manifest=found.manifest, manifest_digest=found.digest)
        )


class _Digests(modelexpress_rl_grpc.RefitWorkerDigestServiceBase):
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def GetShardDigests(self, stream) -> None:  # type: ignore[no-untyped-def]  # noqa: N802
        from grpclib import GRPCError, Status

        request = await stream.recv_message()
        self._publisher.calls.append("digests")
        published = self._publisher.served[request.version_id, request.source_slot_id]
        found = published.digests
        if found is None:
            raise GRPCError(Status.NOT_FOUND, "no digests")
        await self._publisher.digests_answered.wait()
        if not request.HasField("selection") or request.selection.row_count:
            await self._publisher.digests_made.wait()
        if request.HasField("selection") and self._publisher.digests_are == "other grid":
            raise GRPCError(Status.INVALID_ARGUMENT, "another grid")
        if request.HasField("selection") and self._publisher.digests_are == "selected":
            found = _selected(published, request.selection)
        if self._publisher.damages_digests:
            found = found[:-1] + bytes([found[-1] ^ 1])
        await stream.send_message(
            v1.GetShardDigestsResponse(digests=found, sha256=hashlib.sha256(found).hexdigest())
        )


def _selected(published: Published, wanted: v1.DigestSelection) -> bytes:
    hasher, hashed = published.hasher, published.hashed
    assert hasher is not None
    assert hashed is not None
    rows = hasher.grid.count.shape[1]
    bitmaps = [wanted.slabs, wanted.bands, wanted.tiles, wanted.groups]
    selection = Selection.of_bitmaps(wanted.first_row, wanted.row_count, bitmaps, rows)
    for level in FINER:
        there = selection.wanted[level] & (hasher.grid.count[level, selection.rows] > 0)
        hasher.hash_parts(
            level, (selection.first_row + np.flatnonzero(there)).tolist(), hashed, lambda: False
        )
    return encode_answer(hashed.gather(selection), selection, published.digest)
