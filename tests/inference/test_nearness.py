"""Which of several replicas a generator reads: one on its own host, then one that shares its labels."""

from __future__ import annotations

import pytest

from modelexpress_rl import envs
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference import nearness
from modelexpress_rl.rpc import WorkerEndpoint, parse_address
from modelexpress_rl.topology import Topology
from modelexpress_rl.train.adapter import WeightVersionShardManifest
from modelexpress_rl.train.manifest_service import ManifestService, ServedShard
from tests.inference.publisher import create_version, whole
from tests.inference.world import Model, World, as_bytes, weights

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("hosts_count", "read"), [(True, {"t0", "t1", "t2"}), (False, {"t1"})], ids=["same host", "labels"]
)
async def test_of_replicas_the_nearest_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch, hosts_count: bool, read: set[str]
) -> None:
    if not hosts_count:  # as if every trainer ran on a host of its own
        monkeypatch.setattr(nearness, "_LOOPBACK", ())
        monkeypatch.setenv("MX_WORKER_HOST", "elsewhere")
        monkeypatch.setattr(envs, "own_address", lambda: "10.9.9.9")
    await create_version(world.control, "v1", ["s0"])
    chosen = set()
    for name, labels in (("t0", "zone=a,rack=r1"), ("t1", "zone=a,rack=r2"), ("t2", "{odd labels}")):
        trainer = await world.trainer(name)
        trainer.topology = labels
        await trainer.publish("v1", "s0", whole(weights(1)))
    for rank in range(6):
        model = Model()
        client = await world.generator(
            model, worker_id=f"g{rank}", topology={"zone": "a", "rack": "r2", "row": "5"}
        )
        await client.apply_weight(await client.stage_weight("v1"))
        assert model.bytes() == as_bytes(weights(1))
        planned = client._parts.planning._planned
        chosen |= {worker for key in planned for worker in planned._kept[key].reads.workers}
    assert chosen == read


async def test_a_trainer_tells_its_labels_with_its_manifest() -> None:
    for labels in (Topology(), Topology.of({"zone": "b", "rack": "r-1.x"})):
        service = ManifestService("127.0.0.1", topology=labels)
        await service.start()
        service.serve("v1", "s", ServedShard(WeightVersionShardManifest(b"m", 1, 1)))
        address = parse_address(service.endpoint, what="endpoint")
        async with WorkerEndpoint(address) as endpoint:
            request = refit.GetWeightVersionShardManifestRequest(version_id="v1", source_slot_id="s")
            answer = await endpoint.get_weight_version_shard_manifest(request, timeout_s=5)
            assert (answer.manifest, endpoint.topology) == (b"m", labels)
        await service.aclose()


def test_labels_are_counted_and_what_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Topology.parse(" zone=a, rack=r7 ")
    assert str(own) == "rack=r7,zone=a"
    assert [own.unlike(Topology.parse(text)) for text in ("", "zone=a", "rack=r7,zone=a,x=y")] == [2, 1, 0]
    for text in ("zone", "zone=", "=a", "zone=a b", "zone=a,zone=b", "z=" + "a" * 64):
        monkeypatch.setenv("MX_TOPOLOGY", text)
        with pytest.raises(UsageError, match=r"MX_TOPOLOGY.*zone=a,rack=r7"):
            envs.topology()
    with pytest.raises(UsageError, match="mapping"):
        Topology.of("zone=a")  # type: ignore[arg-type]
