"""Replicas that are nearer are read, evenly among those that are equally near."""

from __future__ import annotations

import pytest

from modelexpress_rl.errors import IncompleteVersionError
from modelexpress_rl.reshard.geometry import Shard, ShardTable, Source
from modelexpress_rl.reshard.manifest import Manifest
from modelexpress_rl.reshard.merge import Merged, SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.planner import plan, replan
from modelexpress_rl.reshard.proof import prove_plan

BF16 = "torch.bfloat16"
NAMES = [f"t{i}" for i in range(40)]
NEEDS = NeedTable.build([Need(name, BF16, (0, 0), (8, 4)) for name in NAMES])


def replicas(count: int, names: list[str] | None = None, lone: str | None = None) -> Merged:
    """`count` workers that all hold `names`; the last one alone holds `lone`."""
    manifests = []
    for worker in range(count):
        held = [name for name in names or NAMES if name != lone or worker == count - 1]
        table = ShardTable.build([Shard(name, BF16, (8, 4), (0, 0), (8, 4), 1 << 20) for name in held])
        manifests.append(SourceManifest.of("s", f"w{worker}", Manifest(f"a{worker}", "", b"", table)))
    return merge(manifests)


def distances(merged: Merged, *far: int) -> dict[Source, int]:
    return dict(zip(merged.sources, far, strict=True))


def by_worker(merged: Merged, far: dict[Source, int], **options: int) -> dict[str, int]:
    made = plan(NEEDS, merged, distance=far, **options)
    prove_plan(made, NEEDS, merged)
    return {source.worker_id: size for source, size in made.source_bytes.items()}


def test_only_the_nearest_holders_are_read_and_those_evenly() -> None:
    merged = replicas(4)
    for rank in range(3):
        assert by_worker(merged, distances(merged, 2, 1, 3, 1), spread=rank) == {"w1": 1280, "w3": 1280}
    assert by_worker(merged, distances(merged, 2, 0, 3, 1)) == {"w1": 2560}
    assert len(by_worker(merged, distances(merged, 1, 1, 1, 1))) == 4


def test_a_far_holder_is_read_for_what_no_near_one_has() -> None:
    merged = replicas(3, lone="t7")
    assert by_worker(merged, distances(merged, 0, 1, 9)) == {"w0": 39 * 64, "w2": 64}


def test_what_a_near_one_that_failed_had_comes_from_the_next_nearest() -> None:
    merged = replicas(3)
    far = distances(merged, 0, 1, 2)
    first = plan(NEEDS, merged, distance=far)
    landed = first.pieces.need < 10
    failed = [merged.sources[0]]
    again = replan(first, NEEDS, merged, failed_sources=failed, landed=landed, distance=far)
    assert {s.worker_id: n for s, n in again.source_bytes.items()} == {"w1": 30 * 64}
    with pytest.raises(IncompleteVersionError):
        replan(first, NEEDS, merged, failed_sources=merged.sources, landed=landed, distance=far)
