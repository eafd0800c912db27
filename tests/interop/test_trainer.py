"""0.7.0's trainer client publishes through our control plane; our generator reads it over NIXL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")

from modelexpress_rl._pb import refit_pb2 as refit  # noqa: E402
from modelexpress_rl.control import AsyncModelExpressControlClient  # noqa: E402
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient  # noqa: E402
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig  # noqa: E402
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext  # noqa: E402
from modelexpress_rl.reshard import manifest as manifests  # noqa: E402
from modelexpress_rl.rpc import ControlPlane, WorkerEndpoint, parse_address  # noqa: E402
from modelexpress_rl.server.app import Running  # noqa: E402
from modelexpress_rl.version import WeightVersionState  # noqa: E402
from tests.inference.world import until  # noqa: E402
from tests.interop.peer_weights import SHAPES, as_bytes, weights  # noqa: E402
from tests.interop.peers import Peer, Pool, Raised  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

MODEL = "m"
TOTAL_BYTES = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())


class Model(torch.nn.Module):
    """Parameters under the published names."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            layer, _, parameter = name.partition(".")
            if not hasattr(self, layer):
                self.add_module(layer, torch.nn.Module())
            tensor = torch.zeros(shape, dtype=torch.bfloat16)
            getattr(self, layer).register_parameter(
                parameter, torch.nn.Parameter(tensor, requires_grad=False)
            )

    def bytes(self) -> dict[str, bytes]:
        return {name: as_bytes(parameter) for name, parameter in self.named_parameters()}


def bytes_of(step: int) -> dict[str, bytes]:
    return {name: as_bytes(tensor) for name, tensor in weights(step).items()}


class Job:
    """A control plane of ours, our orchestrator and generator, and trainers of 0.7.0."""

    def __init__(self, plane: Running, pool: Pool, control: AsyncModelExpressControlClient) -> None:
        self.address = plane.address
        self.control = control
        self._pool = pool

    async def trainers(self, count: int, **start: Any) -> list[Trainer]:
        """Trainers that have bound their tensors; with `store` they are the ranks of one world."""
        peers = await self._pool.atake("peer_trainer.py", count)
        made: list[Trainer] = []

        async def join(rank: int) -> None:
            world = {"rank": rank, "world": count} if "store" in start else {}
            who = await peers[rank].acall("start", address=self.address, model=MODEL, **start, **world)
            made.append(Trainer(peers[rank], who["slot"], who["worker_id"]))

        async with anyio.create_task_group() as group:
            for rank in range(count):
                group.start_soon(join, rank)
        return made

    async def generator(self, model: Model) -> AsyncModelExpressGeneratorClient:
        return await AsyncModelExpressGeneratorClient.initialize(
            ModelExpressGeneratorConfig(
                engine_context=TorchGeneratorContext(model),
                model_name=MODEL,
                server_url=self.address,
                rpc_timeout_seconds=10.0,
            )
        )

    async def manifests(self, version: str) -> list[manifests.Manifest]:
        """The manifests of a version, from its trainers."""
        found = []
        async with ControlPlane(parse_address(self.address)) as plane:
            listed = await plane.list_weight_version_shards(
                refit.ListWeightVersionShardsRequest(version_id=version)
            )
        for shard in listed.shards:
            async with WorkerEndpoint(parse_address(shard.manifest_endpoint)) as worker:
                request = refit.GetWeightVersionShardManifestRequest(
                    version_id=version, source_slot_id=shard.source_slot_id
                )
                answer = await worker.get_weight_version_shard_manifest(request)
            found.append(manifests.decode(answer.manifest))
        return found

    async def expires_at_ms(self, trainer: Trainer) -> int:
        """When its registration ends, by the control plane."""
        workers = await self.control.list_workers(MODEL)
        return next(w.expires_at_unix_ms for w in workers if w.worker_id == trainer.worker_id)

    async def create(self, version: str, *slots: str) -> None:
        await self.control.create_weight_version(MODEL, f"key {version}", "FULL_TENSOR", slots, uid=version)


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer client of 0.7.0."""

    peer: Peer
    slot: str
    worker_id: str

    async def publish(self, version: str, step: int) -> None:
        await self.peer.acall("publish", version=version, step=step)


@pytest.fixture
async def job(plane: Running, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Job]:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "30")
    async with AsyncModelExpressControlClient.connect(plane.address) as control:
        yield Job(plane, pool, control)


async def test_versions_in_sequence_and_their_release(job: Job) -> None:
    [trainer] = await job.trainers(1, ttl_s=2)
    model = Model()
    async with await job.generator(model) as client:
        for step in (1, 2, 3):
            version = f"v{step}"
            await job.create(version, trainer.slot)
            await trainer.publish(version, step)
            assert (await job.control.get_weight_version(version)).state is WeightVersionState.READY
            await client.apply_weight(await client.stage_weight(version))
            assert model.bytes() == bytes_of(step)
            # 0.7.0 makes no tile digests: what was read is counted, as not verified.
            metrics = client.pop_metrics()
            assert (metrics["verified_bytes"], metrics["unverified_bytes"]) == (0, TOTAL_BYTES)
            await job.control.delete_weight_version(version)
            await trainer.peer.acall("release", version=version)
    await trainer.peer.acall("close")


async def test_it_renews_its_registration(job: Job) -> None:
    [trainer] = await job.trainers(1, ttl_s=2)
    first_ms = await job.expires_at_ms(trainer)

    async def later() -> bool:
        return await job.expires_at_ms(trainer) > first_ms

    await until(later, within_s=10)
    await trainer.peer.acall("close")


async def test_two_ranks_hold_half_of_the_rows_each(job: Job, tmp_path: Path) -> None:
    trainers = await job.trainers(2, store=str(tmp_path / "rendezvous"), digests=True)
    assert {t.slot for t in trainers} == {"publisher:global-rank:0", "publisher:global-rank:1"}
    model, staged = Model(), []
    async with await job.generator(model) as client:
        await job.create("v1", *(trainer.slot for trainer in trainers))

        async def stage() -> None:
            staged.append(await client.stage_weight("v1"))  # waits until it is READY

        async with anyio.create_task_group() as group:
            group.start_soon(stage)
            for trainer in trainers:
                group.start_soon(trainer.publish, "v1", 5)
        await client.apply_weight(staged[0])
        assert model.bytes() == bytes_of(5)
        for manifest in await job.manifests("v1"):
            assert manifest.table.has_digest.all()  # with digests in it, it is read all the same
        assert client.pop_metrics()["sources"] == 2
    for trainer in trainers:
        await trainer.peer.acall("close")


async def test_what_it_is_told_when_it_is_refused(job: Job) -> None:
    async def refused(version: str, code: str) -> None:
        with pytest.raises(Raised) as caught:
            await trainer.publish(version, 1)
        assert caught.value.code == code

    [trainer] = await job.trainers(1)
    await refused("unknown", "NOT_FOUND")
    await job.create("of others", "another slot")
    await refused("of others", "INVALID_ARGUMENT")
    await job.create("v1", trainer.slot)
    for _ in range(2):
        await trainer.publish("v1", 1)
    await job.control.delete_weight_version("v1")
    await job.create("v2", trainer.slot)
    await job.control.delete_weight_version("v2")
    await refused("v2", "FAILED_PRECONDITION")
    await trainer.peer.acall("close")


async def test_a_replica_takes_over_from_a_killed_trainer(job: Job) -> None:
    # Each is rank 0 of a world of its own, so both publish the same slot. It kills one: the last test.
    first, second = await job.trainers(2, ttl_s=60)
    model = Model()
    async with await job.generator(model) as client:
        await job.create("v1", first.slot)
        for trainer in (first, second):
            await trainer.publish("v1", 1)
        await client.apply_weight(await client.stage_weight("v1"))
        await job.create("v2", first.slot)
        for trainer in (first, second):
            await trainer.publish("v2", 2)
        first.peer.kill()  # its registration lives on for a minute
        await client.apply_weight(await client.stage_weight("v2"))
        assert model.bytes() == bytes_of(2)
    async with await job.generator(model) as client:  # one that has no manifests yet
        await client.apply_weight(await client.stage_weight("v1"))
        # IN_PLACE its memory holds the newer step by now, and 0.7.0 has nothing that would tell.
        assert model.bytes() == bytes_of(2)
