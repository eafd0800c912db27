"""Small shards that land together are checked by one digest; where they don't, by their own."""

from __future__ import annotations

import re

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from modelexpress_rl.errors import DigestMismatch, UsageError
from modelexpress_rl.reshard import grid as grids
from modelexpress_rl.reshard.geometry import Bytes, Int, Shard, ShardTable
from modelexpress_rl.reshard.grid import GROUP_BYTES, GROUP_ROWS, GROUPED_BYTES, GROUPS, SLABS, digest_grid
from modelexpress_rl.reshard.hashing import ShardDigests, ShardHasher
from modelexpress_rl.reshard.needs import Need, NeedTable
from modelexpress_rl.reshard.verify import Verified
from tests.examples import many
from tests.reshard.digested import Checker, never, pulled
from tests.reshard.reference import World, publish, worlds

HERE = np.zeros(1, np.int64)  # one read brings everything


def table(
    sizes: list[int], addresses: list[int] | None = None, devices: list[int] | None = None
) -> ShardTable:
    ends = np.cumsum(sizes)
    at = addresses or (ends - sizes).tolist()
    on = devices or [0] * len(sizes)
    shards = [
        Shard(f"t{n}", "torch.uint8", (size,), (0,), (size,), 4096 + addr, device_id=device)
        for n, (size, addr, device) in enumerate(zip(sizes, at, on, strict=True))
    ]
    return ShardTable.build(shards)


def groups(made: ShardTable) -> list[list[int]]:
    grid = digest_grid(made)
    found = (
        [part.tolist() for part in np.split(grid.members, grid.group_start[1:-1])]
        if len(grid.members)
        else []
    )
    assert [max(group) for group in found] == grid.group_row.tolist()
    assert np.flatnonzero(grid.count[GROUPS]).tolist() == sorted(grid.group_row.tolist())
    assert (grid.count[GROUPS] <= 1).all()
    return found


def test_small_neighbours_in_memory_are_a_group() -> None:
    assert groups(table([16, 16, 16])) == [[0, 1, 2]]
    assert groups(table([16, GROUPED_BYTES + 1, 16])) == [[0, 2]]  # what is big lies between
    assert groups(table([16, 0, 16])) == [[0, 2]]
    assert groups(table([16, 16, 16], addresses=[64, 0, 32])) == [[1, 2, 0]]
    assert groups(table([16])) == groups(table([])) == groups(table([GROUPED_BYTES + 1] * 3)) == []


def test_groups_are_bounded_in_bytes_and_shards_and_lie_on_one_device() -> None:
    each = GROUP_BYTES // GROUPED_BYTES
    assert [len(group) for group in groups(table([GROUPED_BYTES] * (2 * each + 1)))] == [each, each]
    assert [len(group) for group in groups(table([1] * (GROUP_ROWS + 2)))] == [GROUP_ROWS, 2]
    assert groups(table([16] * 4, devices=[0, 1, 0, 1])) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("gap_bytes", [0, 48])
def test_a_group_is_digested_as_if_its_shards_touched(gap_bytes: int, fixed: bool) -> None:
    memory = np.random.default_rng(3).integers(0, 256, 8192, np.uint8)
    places = [n * (100 + gap_bytes) for n in range(5)]
    made = table([100] * 5, addresses=places)
    rows = [memory[at : at + 100] for at in places]
    hasher = ShardHasher(made, rows.__getitem__, fixed=fixed)
    found = ShardDigests(hasher)
    for unit in range(len(hasher.units)):
        hasher.hash_slabs(unit, found, never)
    assert found.get(GROUPS, 4).tobytes() == xxhash.xxh3_128_digest(b"".join(row.tobytes() for row in rows))
    assert found.get(SLABS, 3).tobytes() == xxhash.xxh3_128_digest(rows[3].tobytes())


def test_a_group_whose_rows_are_of_several_units_is_hashed_with_the_last() -> None:
    big = 33 << 20
    memory = np.ones(big + 32, np.uint8)
    hasher = ShardHasher(
        table([16, big, 16]), [memory[:16], memory[16 : 16 + big], memory[16 + big :]].__getitem__, fixed=True
    )
    assert len(hasher.units) == 3
    found = ShardDigests(hasher)
    hasher.hash_slabs(2, found, never)
    assert found.get(GROUPS, 2).tobytes() == xxhash.xxh3_128_digest(bytes([1]) * 32)


def small(count: int, *, gap_bytes: int = 0) -> World:
    noise = np.random.default_rng(5)
    tensors = {f"t{n}": ("torch.uint8", noise.integers(0, 256, (4, 16, 1), np.uint8)) for n in range(count)}
    return publish(tensors, [[(name, (0, 0), (4, 16)) for name in tensors]], gap_bytes=gap_bytes)


def needs_of(*names: str) -> list[Need]:
    return [Need(name, "torch.uint8", (0, 0), (4, 16)) for name in names]


def grouped(check: Checker) -> int:
    return sum(int((verifier.groups.of_piece >= 0).sum()) for verifier in check.verifiers.values())


@pytest.mark.parametrize("gap_bytes", [0, 24])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_one_digest_checks_all_of_a_group(order: tuple[int, ...], gap_bytes: int) -> None:
    world = small(4, gap_bytes=gap_bytes)
    needs = NeedTable.build(needs_of(*(f"t{n}" for n in order)), owner="rank 2")
    check, arena = pulled(world, needs, reads=HERE)
    (verifier,) = check.verifiers.values()
    assert grouped(check) == 4
    assert verifier.digest_count == 1
    assert check.verify(arena) == Verified(256, 0)
    for at in range(256):
        arena[at] ^= 4
        named = "4 small tensors from 't0' to 't3', as read by rank 2: one of them is not what"
        with pytest.raises(DigestMismatch, match=re.escape(named)):
            check.verify(arena)
        arena[at] ^= 4


@pytest.mark.parametrize(
    "needs",
    [
        needs_of("t0", "t1", "t2"),  # not all
        [*needs_of("t0", "t1", "t2"), Need("t3", "torch.uint8", (0, 0), (2, 16))],  # not whole
        [*needs_of("t0", "t1", "t2", "t3"), Need("t3", "torch.uint8", (0, 0), (2, 16))],
    ],
)
def test_what_is_not_read_whole_is_checked_by_itself(needs: list[Need]) -> None:
    check, arena = pulled(small(4), NeedTable.build(needs), reads=HERE)
    whole = len(needs) == 5
    assert grouped(check) == (4 if whole else 0)
    assert check.verify(arena).verified_bytes >= 192
    arena[0] ^= 1
    with pytest.raises(DigestMismatch, match="4 small tensors" if whole else "tensor 't0'"):
        check.verify(arena)


def test_what_is_needed_twice_is_checked_by_itself() -> None:
    check, arena = pulled(small(2), NeedTable.build(needs_of("t0", "t1", "t1")), reads=HERE)
    assert grouped(check) == 0
    for at in range(len(arena)):
        arena[at] ^= 1
        with pytest.raises(DigestMismatch):
            check.verify(arena)
        arena[at] ^= 1


def test_a_group_of_two_reads_is_checked_by_its_shards() -> None:
    check, arena = pulled(small(4), NeedTable.build(needs_of("t0", "t1", "t2", "t3")), reads=np.array([0, 2]))
    (verifier,) = check.verifiers.values()
    assert grouped(check) == 0
    (digests,) = check.digests.values()
    assert verifier.verify(arena, digests, slice(0, 2)) == Verified(128, 0)


def test_a_part_of_a_group_is_not_taken_for_the_whole() -> None:
    check, arena = pulled(small(4), NeedTable.build(needs_of("t0", "t1", "t2", "t3")), reads=HERE)
    (verifier,) = check.verifiers.values()
    with pytest.raises(UsageError, match="2 pieces of groups that are read as one are not among"):
        verifier.verify(arena, *check.digests.values(), slice(0, 2))


@many
@given(worlds(), st.data())
def test_in_any_geometry_groups_cover_as_much_and_miss_no_flip(
    drawn: tuple[World, list[Need]], data: st.DataObject
) -> None:
    world, needs = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "GROUP_ROWS", data.draw(st.integers(2, 5)))
        apart, arena = pulled(world, NeedTable.build(needs))
        pieces = len(apart.plan.pieces)
        begins = data.draw(st.sets(st.integers(0, max(pieces - 1, 0)), max_size=3)) | {0}
        reads = np.array(sorted(begins), np.int64)
        check, arena = pulled(world, NeedTable.build(needs), reads=reads)
    assert check.coverage == apart.coverage
    assert by_reads(check, arena, reads) == check.coverage
    if not check.coverage.verified_bytes:
        return
    at = data.draw(st.integers(0, len(arena) - 1))
    arena[at] ^= 1
    refused = [is_refused(each, arena, reads) for each in (apart, check)]
    assert refused[0] == refused[1]


def by_reads(check: Checker, arena: Bytes, reads: Int) -> Verified:
    found = Verified(0, 0)
    ends = [*reads[1:].tolist(), len(check.plan.pieces)]
    for begin, end in zip(reads.tolist(), ends, strict=True):
        for source, verifier in check.verifiers.items():
            first, last = max(begin, verifier.first), min(end, verifier.first + len(verifier.pieces))
            if first < last:
                found += verifier.verify(arena, check.digests[source], slice(first, last))
    return found


def is_refused(check: Checker, arena: Bytes, reads: Int) -> bool:
    try:
        by_reads(check, arena, reads)
    except DigestMismatch:
        return True
    return False
