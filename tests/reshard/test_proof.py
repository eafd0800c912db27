"""Every error of the proof before a transfer names the tensor, the rank and the box that it is about.

Of a manifest that can't be, the rank is the publisher's: whoever fetched it adds worker and slot (see
tests/inference); here it names tensor and box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from modelexpress_rl.errors import GeometryError, IncompleteVersionError, ModelExpressError, UsageError
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest
from modelexpress_rl.reshard.merge import Merged, SourceManifest, merge
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan
from modelexpress_rl.reshard.planner import plan, replan
from modelexpress_rl.reshard.proof import prove_plan

BF16 = "torch.bfloat16"
ALL = "needs offset (0, 0) shape (8, 4)"


def shard(first: int, last: int, **changes: object) -> Shard:
    """Rows first .. last - 1 of tensor "t", of shape (8, 4)."""
    made = Shard("t", BF16, (8, 4), (first, 0), (last - first, 4), 4096 + first * 8)
    return replace(made, **changes)  # type: ignore[arg-type]


def held(*sources: list[Shard]) -> Merged:
    return merge(
        [
            SourceManifest.of(f"s{n}", f"w{n}", Manifest(f"a{n}", "", b"", ShardTable.build(shards)))
            for n, shards in enumerate(sources)
        ]
    )


def planned(merged: Merged, need: Need) -> Plan:
    return plan(NeedTable.build([need], owner="rank 3"), merged)


def need(offset: tuple[int, ...] = (0, 0), shape: tuple[int, ...] = (8, 4), **changes: str) -> Need:
    return replace(Need("t", BF16, offset, shape), **changes)


def tampered(change: Callable[[PieceTable], PieceTable]) -> None:
    merged = held([shard(0, 4)], [shard(4, 8)])
    needs = NeedTable.build([need()], owner="rank 3")
    made = plan(needs, merged)
    prove_plan(replace(made, pieces=change(made.pieces)), needs, merged)


def rows_of(pieces: PieceTable, rows: list[int]) -> PieceTable:
    return PieceTable(*(getattr(pieces, name)[rows] for name in PieceTable.__slots__))


def shifted(pieces: PieceTable) -> PieceTable:
    return replace(pieces, offset=pieces.offset + np.array([1, 0]))


def a_lost_source() -> None:
    merged = held([shard(0, 4)], [shard(4, 8)])
    needs = NeedTable.build([need()], owner="rank 3")
    made = plan(needs, merged)
    landed = np.array([True, False])
    replan(made, needs, merged, failed_sources=[merged.sources[1]], landed=landed)


READERS = {
    "an unknown tensor": (
        lambda: planned(held([shard(0, 8)]), need(name="u")),
        IncompleteVersionError,
        ["tensor 'u'", ALL, "none of the 1 sources has the tensor"],
    ),
    "a missing tensor: only empty shards": (
        lambda: planned(held([shard(0, 0)]), need()),
        IncompleteVersionError,
        [ALL, "nobody who may be read holds offset (0, 0) shape (8, 4)", "published by nobody"],
    ),
    "a gap": (
        lambda: planned(held([shard(0, 3)], [shard(5, 8)]), need()),
        IncompleteVersionError,
        [ALL, "holds offset (3, 0) shape (2, 4)", "8 of 32 elements missing", "worker 'w0'", "worker 'w1'"],
    ),
    "a gap as big as an overlap": (
        lambda: planned(held([shard(0, 4)], [shard(2, 6)]), need()),
        IncompleteVersionError,
        [ALL, "holds offset (6, 0) shape (2, 4)"],
    ),
    "what a failed source had": (
        a_lost_source,
        IncompleteVersionError,
        [ALL, "holds offset (4, 0) shape (4, 4)", "16 of 16 elements missing"],
    ),
    "another dtype": (
        lambda: planned(held([shard(0, 8)]), need(dtype="torch.float16")),
        GeometryError,
        [f"{ALL} as torch.float16", "worker 'w0'", "publish torch.bfloat16"],
    ),
    "another spelling of the dtype": (
        lambda: planned(held([shard(0, 8)]), need(dtype="bfloat16")),
        UsageError,
        ["needs unknown dtype 'bfloat16'"],
    ),
    "a range outside the global shape": (
        lambda: planned(held([shard(0, 8)]), need((4, 0), (5, 4))),
        GeometryError,
        ["needs offset (4, 0) shape (5, 4)", "lies outside the global shape (8, 4)", "worker 'w0'"],
    ),
    "another rank": (
        lambda: planned(held([shard(0, 8)]), need((0,), (8,))),
        GeometryError,
        ["needs offset (0,) shape (8,)", "does not have the rank of the global shape (8, 4)"],
    ),
    "a piece that is missing in the plan": (
        lambda: tampered(lambda pieces: rows_of(pieces, [0])),
        IncompleteVersionError,
        [ALL, "holds offset (4, 0) shape (4, 4)"],
    ),
    "an element that is read twice": (
        lambda: tampered(lambda pieces: rows_of(pieces, [0, 0, 1])),
        GeometryError,
        [ALL, "reads an element of it twice"],
    ),
    "a piece that is another's": (
        lambda: tampered(shifted),
        GeometryError,
        [ALL, "the plan reads offset (1, 0) shape (4, 4)", "outside its shard"],
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_a_refused_plan_names_tensor_rank_and_box(name: str) -> None:
    refuse, kind, words = READERS[name]
    with pytest.raises(kind) as raised:
        refuse()
    for word in ["tensor '", "rank 3", *words]:
        assert word in str(raised.value)


PUBLISHERS = {
    "publishers of different dtypes": (
        lambda: held([shard(0, 4)], [shard(4, 8, dtype="torch.float16")]),
        ["worker 'w0'", "torch.bfloat16 (8, 4)", "worker 'w1'", "torch.float16 (8, 4)"],
    ),
    "publishers of different global shapes": (
        lambda: held([shard(0, 4)], [shard(4, 8, full_shape=(9, 4))]),
        ["worker 'w0'", "(8, 4)", "worker 'w1'", "(9, 4)"],
    ),
    "replicas that disagree": (
        lambda: held([shard(0, 4, digest=b"a" * 16)], [shard(0, 4, digest=b"b" * 16)]),
        ["offset (0, 0) shape (4, 4)", "different digests", "worker 'w0'", "worker 'w1'"],
    ),
    "a shard outside its tensor": (
        lambda: held([shard(4, 9)]),
        ["shard_offset (4, 0) with shape (5, 4)", "lies outside the global shape (8, 4)"],
    ),
    "a shard of another rank": (
        lambda: held([shard(0, 8, offset=(0,))]),
        ["offset (0,) and shape (8, 4) do not have the rank of the global shape (8, 4)"],
    ),
    "an unknown spelling of a dtype": (
        lambda: held([shard(0, 8, dtype="BF16")]),
        ["unknown dtype 'BF16'"],
    ),
}


@pytest.mark.parametrize("name", PUBLISHERS)
def test_a_refused_publication_names_tensor_publishers_and_box(name: str) -> None:
    refuse, words = PUBLISHERS[name]
    with pytest.raises(ModelExpressError) as raised:
        refuse()
    for word in ["tensor 't'", *words]:
        assert word in str(raised.value)
