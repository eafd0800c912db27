"""Replicas are compared by the digests of their slabs, as far as those are known."""

from __future__ import annotations

import numpy as np
import pytest

from modelexpress_rl.errors import GeometryError
from modelexpress_rl.reshard.geometry import Source
from modelexpress_rl.reshard.grid import digest_grid
from modelexpress_rl.reshard.hashing import ShardDigests, ShardHasher
from modelexpress_rl.reshard.replicas import SlabDigests, refuse_disagreeing_replicas, shared_rows, slabs_of
from tests.reshard.digested import memory_of, one_tensor
from tests.reshard.reference import World

WHOLE = ((0, 0), (512, 1024))


def told(world: World) -> dict[Source, SlabDigests]:
    """What each publisher tells of all its rows."""
    out = {}
    for number, each in enumerate(world.manifests):
        table = each.manifest.table
        hasher = ShardHasher(table, memory_of(world, number), fixed=False)
        made = ShardDigests(hasher)
        for unit in range(len(hasher.units)):
            hasher.hash_slabs(unit, made, lambda: False)
        ask = slabs_of(np.arange(len(table)))
        out[each.source] = SlabDigests.of(ask, digest_grid(table), made.gather(ask))
    return out


def test_replicas_that_differ_are_refused_by_name() -> None:
    world = one_tensor((512, 1024), *[WHOLE] * 3, dtype="torch.bfloat16")
    digests = told(world)
    assert len(next(iter(digests.values())).digests) > 1  # of several slabs
    refuse_disagreeing_replicas(world.merged(), digests)
    world.buffers[2][-5000] ^= 1
    changed = told(world)
    with pytest.raises(GeometryError, match=r"tensor 't': replicas of .* differ, worker 'w1'.* worker 'w2'"):
        refuse_disagreeing_replicas(world.merged(), changed)
    silent = {source: table for source, table in changed.items() if source.worker_id != "w2"}
    refuse_disagreeing_replicas(world.merged(), silent)
    refuse_disagreeing_replicas(world.merged(), {})


def test_only_what_is_read_and_held_twice_is_asked_for() -> None:
    world = one_tensor((512, 1024), *[WHOLE] * 3, dtype="torch.uint8")
    merged = world.merged()
    every = np.arange(len(merged.shards))
    assert {s.worker_id: rows.tolist() for s, rows in shared_rows(merged, every, merged.sources).items()} == {
        "w0": [0], "w1": [0], "w2": [0],
    }  # fmt: skip
    assert set(shared_rows(merged, every[:1], merged.sources[:2])) == set(merged.sources[:2])
    assert shared_rows(merged, every, merged.sources[:1]) == {}
    assert shared_rows(merged, every[:0], merged.sources) == {}
    alone = one_tensor((512, 1024), ((0, 0), (256, 1024)), ((256, 0), (256, 1024)), dtype="torch.uint8")
    assert shared_rows(alone.merged(), np.arange(2), alone.merged().sources) == {}
