"""0.7.0's generator client reads versions of our trainer, through our control plane, over NIXL."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")

from modelexpress_rl._pb import refit_pb2 as refit  # noqa: E402
from modelexpress_rl.control import AsyncModelExpressControlClient  # noqa: E402
from modelexpress_rl.reshard import manifest as manifests  # noqa: E402
from modelexpress_rl.reshard.geometry import Shard, ShardTable  # noqa: E402
from modelexpress_rl.rpc import ControlPlane, WorkerEndpoint, parse_address  # noqa: E402
from modelexpress_rl.server.app import Running  # noqa: E402
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient  # noqa: E402
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerStagingMode  # noqa: E402
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext  # noqa: E402
from modelexpress_rl.version import VersionState, VersionStatus  # noqa: E402
from tests.inference.world import until  # noqa: E402
from tests.interop.peer_weights import SHAPES, as_bytes, weights  # noqa: E402
from tests.interop.peers import Peer, Pool, Raised  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

MODEL = "m"
GOLDEN = Path(__file__).parents[1] / "data" / "manifest_v1.json"


def engine_holds(step: int) -> dict[str, str]:
    """The sha256 of every parameter of the peer's engine, once it serves a step."""
    tensors = weights(step)
    parameters = {
        "gate_up": torch.cat([tensors["gate.weight"], tensors["up.weight"]]),
        "down": tensors["down.weight"],
        "down_bias": tensors["down.bias"],
        "norm": tensors["norm.weight"],
    }
    return {name: hashlib.sha256(as_bytes(tensor)).hexdigest() for name, tensor in parameters.items()}


class Trainer:
    """A trainer client of ours, and the tensors that it trains in place."""

    def __init__(
        self, client: AsyncModelExpressTrainerClient, held: dict[str, Any], half: int | None
    ) -> None:
        self.client = client
        self.held = held
        self.half = half

    def train(self, step: int) -> None:
        for name, tensor in weights(step).items():
            self.held[name].copy_(part(tensor, self.half))


def part(tensor: Any, half: int | None) -> Any:
    """The whole tensor, or half of its rows."""
    if half is None:
        return tensor
    rows = len(tensor) // 2
    return tensor[half * rows : (half + 1) * rows]


class Job:
    """A control plane of ours, our orchestrator and trainers, and a generator of 0.7.0."""

    def __init__(
        self, plane: Running, peer: Peer, control: AsyncModelExpressControlClient, stack: Any
    ) -> None:
        self.address = plane.address
        self.peer = peer
        self.control = control
        self._stack = stack

    async def trainer(self, half: int | None = None, **config: Any) -> Trainer:
        held = {name: part(tensor, half).clone() for name, tensor in weights(0).items()}
        boxes = [PlainBox(name, held[name], SHAPES[name], offset_of(SHAPES[name], half)) for name in SHAPES]
        client = await self._stack.enter_async_context(
            await AsyncModelExpressTrainerClient.initialize(
                ModelExpressTrainerConfig(
                    device_id=0,
                    model_name=MODEL,
                    server_url=self.address,
                    rpc_timeout_seconds=10.0,
                    close_timeout_seconds=2.0,
                    engine_context=PlainTrainerContext(boxes),
                    **config,
                )
            )
        )
        return Trainer(client, held, half)

    async def generator(self, **config: Any) -> str:
        return await self.peer.acall("start", address=self.address, model=MODEL, **config)

    async def refit(self, version: str) -> None:
        """Stage, install, let go."""
        await self.peer.acall("stage", version=version)
        assert await self.peer.acall("apply")
        await self.peer.acall("release")

    async def create(self, version: str, *trainers: Trainer) -> None:
        slots = [trainer.client.source_slot_id for trainer in trainers]
        await self.control.create_weight_version(MODEL, f"key {version}", "FULL_TENSOR", slots, uid=version)

    async def status(self, version: str) -> VersionStatus:
        listed = await self.control.list_version_statuses(MODEL)
        return next(status for status in listed if status.version_id == version)

    async def refused(self, version: str, code: str | None = None) -> Raised:
        """What staging a version raises in the peer."""
        with pytest.raises(Raised) as caught:
            await self.peer.acall("stage", version=version)
        assert caught.value.code == code, caught.value
        return caught.value


def offset_of(shape: tuple[int, ...], half: int | None) -> tuple[int, ...]:
    return ((half or 0) * (shape[0] // 2), *(0,) * (len(shape) - 1))


@pytest.fixture(scope="module")
def peer(pool: Pool) -> Peer:
    [peer] = pool.take("peer_generator.py")
    return peer


@pytest.fixture
async def job(plane: Running, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Job]:
    for name in ("LOCAL_RANK", "MODEL_NAME", "MX_WORKER_GRPC_PORT", "MX_METADATA_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    async with (
        AsyncModelExpressControlClient.connect(plane.address) as control,
        contextlib.AsyncExitStack() as stack,
    ):
        yield Job(plane, peer, control, stack)
        await peer.acall("close")


async def test_tensors_in_blocks_of_columns(job: Job) -> None:
    """Each block is simply a shard of the manifest."""
    blocks = {"down.weight": 3, "g*.weight": 2}
    trainer = await job.trainer(staging_mode="COPY_TO_HOST", column_blocks=blocks)
    await job.generator()
    trainer.train(1)
    await job.create("v1", trainer)
    shard = await trainer.client.publish_version("v1")
    table = manifests.decode(shard._staged.data.manifest.data).table  # type: ignore[attr-defined]
    counts = {name: int((table.tensor == number).sum()) for number, name in enumerate(table.tensors.names)}
    assert counts == {"gate.weight": 2, "up.weight": 1, "down.weight": 3, "down.bias": 1, "norm.weight": 1}
    await job.refit("v1")
    assert await job.peer.acall("holds") == engine_holds(1)


@pytest.mark.parametrize("mode", [TrainerStagingMode.IN_PLACE, TrainerStagingMode.COPY_TO_HOST])
async def test_versions_in_sequence_and_fences_that_wait_for_it(job: Job, mode: TrainerStagingMode) -> None:
    trainer = await job.trainer(staging_mode=mode)
    await job.generator()
    for step in (1, 2, 3):
        version = f"v{step}"
        trainer.train(step)
        await job.create(version, trainer)
        shard = await trainer.client.publish_version(version)
        await job.peer.acall("stage", version=version)
        assert (await job.status(version)).live_leases == 1
        await job.control.delete_weight_version(version)
        fence = shard.release()
        with anyio.move_on_after(0.3) as while_it_reads:
            await fence.wait()
        assert while_it_reads.cancelled_caught
        assert await job.peer.acall("apply")  # which returns its lease
        assert await job.peer.acall("holds") == engine_holds(step)
        with anyio.fail_after(10):
            await fence.wait()
        assert (await job.status(version)).state is VersionState.RETIRED
        await job.peer.acall("release")


async def test_trainers_that_hold_half_of_the_rows_each(job: Job) -> None:
    trainers = [await job.trainer(half) for half in (0, 1)]
    await job.generator()
    for step in (7, 8):
        await job.create(f"v{step}", *trainers)
        for trainer in trainers:
            trainer.train(step)
            await trainer.client.publish_version(f"v{step}")
        await job.refit(f"v{step}")
        assert await job.peer.acall("holds") == engine_holds(step)


async def test_it_renews_its_lease_and_its_registration(job: Job) -> None:
    trainer = await job.trainer()
    worker_id = await job.generator(lease_ttl_seconds=2, registration_ttl_seconds=2)
    await job.create("v1", trainer)
    await trainer.client.publish_version("v1")
    await job.peer.acall("stage", version="v1")

    async def ends_ms() -> tuple[int, int]:
        workers = await job.control.list_workers(MODEL)
        registered = next(w.expires_at_unix_ms for w in workers if w.worker_id == worker_id)
        return (await job.status("v1")).last_lease_deadline_unix_ms or 0, registered

    lease_ms, registration_ms = await ends_ms()

    async def both_later() -> bool:
        now_lease_ms, now_registration_ms = await ends_ms()
        return now_lease_ms > lease_ms and now_registration_ms > registration_ms

    await until(both_later, within_s=10)
    await job.peer.acall("release")
    assert (await job.status("v1")).live_leases == 0


async def test_what_it_is_told_when_it_is_refused(job: Job) -> None:
    trainer = await job.trainer()
    await job.generator()
    await job.refused("unknown", "NOT_FOUND")
    await job.create("v1", trainer)
    for state in (VersionState.STAGING, VersionState.RETIRED):
        # It looks first, and asks for no lease where the version is not READY.
        assert "not READY" in (await job.refused("v1")).message
        assert (await job.status("v1")).state is state
        await job.control.delete_weight_version("v1")
    await job.create("v2", trainer)
    trainer.train(2)
    await trainer.client.publish_version("v2")
    await job.refit("v2")
    assert await job.peer.acall("holds") == engine_holds(2)


async def test_a_source_that_is_gone_and_its_replica(job: Job) -> None:
    trainer = await job.trainer()
    await job.generator()
    await job.create("v1", trainer)
    trainer.train(1)
    await trainer.client.publish_version("v1")
    await announce_a_dead_replica(job, "v1", trainer.client.source_slot_id)
    [found] = await job.peer.acall("resolve", version="v1")
    assert [source["worker_id"] for source in found] == [trainer.client.worker_id]
    await job.refit("v1")
    assert await job.peer.acall("holds") == engine_holds(1)


async def announce_a_dead_replica(job: Job, version: str, slot: str) -> None:
    """A worker that sorts first, is registered, and whose endpoint nobody answers."""
    worker = refit.WorkerRegistration(worker_id="!", role=refit.WORKER_ROLE_TRAINER, model_name=MODEL)
    shard = refit.WeightVersionShard(
        version_id=version,
        source_slot_id=slot,
        worker_id="!",
        tensor_count=1,
        total_bytes=1,
        manifest_digest="0" * 64,
        manifest_endpoint="127.0.0.1:1",
    )
    async with ControlPlane(parse_address(job.address)) as plane:
        await plane.register_worker(refit.RegisterWorkerRequest(worker=worker, ttl_seconds=60))
        await plane.create_weight_version_shard(refit.CreateWeightVersionShardRequest(shard=shard))


async def test_its_resolver_accepts_our_manifests(job: Job) -> None:
    trainers = [await job.trainer(half) for half in (0, 1)]
    await job.generator()
    await job.create("v1", *trainers)
    for trainer in trainers:
        await trainer.client.publish_version("v1")
    [found] = await job.peer.acall("resolve", version="v1")
    assert {source["slot"]: source["endpoint"] for source in found} == {
        trainer.client.source_slot_id: trainer.client.worker_endpoint for trainer in trainers
    }


async def test_it_reads_through_our_metadata_listener(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        monkeypatch.setenv("MX_METADATA_PORT", str(free.getsockname()[1]))
    trainer = await job.trainer()
    trainer.train(3)
    await job.create("v1", trainer)
    await trainer.client.publish_version("v1")
    async with WorkerEndpoint(parse_address(trainer.client.worker_endpoint)) as worker:
        request = refit.GetWeightVersionShardManifestRequest(
            version_id="v1", source_slot_id=trainer.client.source_slot_id
        )
        manifest = manifests.decode((await worker.get_weight_version_shard_manifest(request)).manifest)
    tensor = trainer.held["down.weight"]
    sha256 = await job.peer.acall(
        "read_by_endpoint",
        agent=manifest.agent_name,
        endpoint=manifest.metadata_endpoint,
        addr=tensor.data_ptr(),
        size=tensor.nbytes,
    )
    assert sha256 == hashlib.sha256(as_bytes(tensor)).hexdigest()


def manifest_of_many() -> bytes:
    """A manifest of ours with what is odd: a name that isn't ASCII, a scalar, many dtypes, boxes, digests."""
    digest = np.arange(16, dtype=np.uint8).tobytes()
    rows = [
        Shard("model.embed", "torch.bfloat16", (8, 4), (0, 0), (4, 4), 0x1000),
        Shard("model.embed", "torch.bfloat16", (8, 4), (4, 0), (4, 4), 0x2000, digest=digest),
        Shard("gewicht.größe", "torch.float32", (3,), (0,), (3,), 0x7FFF_FFFF_F000),
        Shard("a.scalar", "torch.float32", (), (), (), 0x3000),
        Shard("b.box", "torch.float8_e4m3fn", (4, 6, 2), (0, 2, 0), (4, 2, 2), 0x4000, device_id=3),
    ]
    table = ShardTable.build(rows)
    return manifests.encode(manifests.Manifest("agent", "127.0.0.1:5555", bytes(range(64)), table))


def test_its_parser_reads_ours_and_writes_the_same_bytes(peer: Peer) -> None:
    for data in (manifest_of_many(), GOLDEN.read_bytes()):
        read = peer.call("parse", manifest=base64.b64encode(data).decode())
        ours = manifests.decode(data)
        assert read["agent_name"] == ours.agent_name
        assert read["metadata_endpoint"] == ours.metadata_endpoint
        assert base64.b64decode(read["agent_metadata"]) == ours.agent_meta
        assert [tensor["name"] for tensor in read["tensors"]] == list(ours.table.tensors.names)
        for tensor in read["tensors"]:
            tensor_number = ours.table.tensors.index[tensor["name"]]
            shape = ours.table.tensors.shape(tensor_number)
            assert tuple(tensor["full_shape"]) == shape
            [rows] = np.nonzero(ours.table.tensor == tensor_number)
            for shard, row in zip(tensor["shards"], rows.tolist(), strict=True):
                pad = ours.table.tensors.width - len(shape)
                assert shard["addr"] == int(ours.table.addr[row])
                assert shard["shard_offset"] == ours.table.offset[row][pad:].tolist()
                assert shard["shape"] == ours.table.shape[row][pad:].tolist()
                assert (shard["digest"] is not None) == bool(ours.table.has_digest[row])
        assert base64.b64decode(read["again"]) == data
