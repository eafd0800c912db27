"""Chains of every encoding as one, and the cheapest way through the graph of versions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelexpress_rl.canonical.chain import Chain, Link
from modelexpress_rl.canonical.index import Encoding, Index, read_index, shard_name, write_index
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.plain_files import Change, add_full
from modelexpress_rl.canonical.route import Step, cheapest
from modelexpress_rl.canonical.shard_writer import ShardWriter
from modelexpress_rl.canonical.sparse_writer import SparseWriter, TypedChange
from modelexpress_rl.errors import DigestMismatch, ObjectError, VersionGone
from tests.canonical.weights import in_memory, stepped, xor_version

FILE = shard_name(0, 1)
Weights = dict[str, Bytes]


def step(weights: Weights, seed: int) -> Weights:
    """Every other tensor changes."""
    return {
        name: stepped(data, 2, 0.05, seed) if (place + seed) % 2 else data
        for place, (name, data) in enumerate(weights.items())
    }


def link(kind: Encoding, number: int, base: Weights, new: Weights) -> Link:
    version = f"v{number}"
    if kind is Encoding.XOR:
        index, files = xor_version(
            version, f"v{number - 1}", [[Change(name, base[name], new[name]) for name in new]]
        )
    elif kind is Encoding.SPARSE:
        with SparseWriter(threads=1, chunk_bytes=1000) as sparse:
            sparse.add([TypedChange(n, "BF16", (new[n].nbytes // 2,), base[n], new[n]) for n in new])
            weight_map = dict.fromkeys(sparse.names, FILE)
            prefixes = {FILE: sparse.prefix()}
            index = write_index(Index(kind, weight_map, version, f"v{number - 1}", prefixes=prefixes))
            files = {FILE: b"".join(sparse.parts())}
    else:
        with ShardWriter() as full:
            for name, data in new.items():
                add_full(full, name, "U8", (data.nbytes,), data)
            files = {FILE: b"".join(full.parts())}
        size = sum(data.nbytes for data in new.values())
        index = write_index(Index(kind, dict.fromkeys(new, FILE), total_size_bytes=size))
    return Link(version, read_index(index, version), in_memory(files))


def chain_of(kinds: tuple[Encoding, ...]) -> tuple[list[Weights], list[Link]]:
    noise = np.random.default_rng(0)
    versions = [{name: noise.integers(0, 256, 3000, np.uint8) for name in "abc"}]
    for number in range(1, len(kinds) + 1):
        versions.append(step(versions[-1], number))
    links = [
        link(kind, number, versions[number - 1], versions[number]) for number, kind in enumerate(kinds, 1)
    ]
    return versions, links


@pytest.mark.parametrize("kinds", [each for n in (1, 2, 3) for each in itertools.product(Encoding, repeat=n)])
def test_every_mixture_is_rebuilt(kinds: tuple[Encoding, ...]) -> None:
    versions, links = chain_of(kinds)
    chain = Chain(links)
    assert (chain.full is None) == (Encoding.FULL not in kinds)
    for name, right in versions[-1].items():
        out = np.zeros_like(right)
        chain.rebuild(name, versions[0][name], out, threads=1)
        assert np.array_equal(out, right)
        assert (chain.size_bytes(name) > 0) == (name in chain.changed or chain.full is not None)


def test_a_version_that_does_not_follow() -> None:
    versions, links = chain_of((Encoding.XOR, Encoding.SPARSE, Encoding.XOR))
    with pytest.raises(ObjectError, match="version v3: expected a delta on v1, got one on v2"):
        Chain([links[0], links[2]])
    out = versions[0]["a"].copy()
    late = Chain(links[1:])
    name = min(late.changed - {name for name in "abc" if versions[1][name] is versions[2][name]})
    with pytest.raises(DigestMismatch, match=f"tensor '{name}'"):
        late.rebuild(name, versions[2][name], out)


def test_what_is_not_there_is_named() -> None:
    versions, links = chain_of((Encoding.FULL, Encoding.SPARSE))
    out = np.zeros(3000, np.uint8)
    with pytest.raises(ObjectError, match="tensor 'x' is not in the full checkpoint"):
        Chain(links).rebuild("x", None, out)
    with pytest.raises(ObjectError, match="tensor 'a': the chain begins with a delta, and no base"):
        Chain(links[1:]).rebuild("a", None, out)
    changed = min(Chain(links[1:]).changed)
    with pytest.raises(ObjectError, match=r"expected 10 bytes, it is of 3000"):
        Chain(links[1:]).rebuild(changed, out[:10].copy(), out[:10])
    smaller = {name: data for name, data in versions[1].items() if name != changed}
    with pytest.raises(ObjectError, match=f"version v2: it changes tensor '{changed}', which its base lacks"):
        Chain([link(Encoding.FULL, 1, versions[0], smaller), links[1]])


def full(version: str, size: int, label: str = "") -> Step:
    return Step(version, None, size, 1.0, label=label)


def delta(version: str, base: str, size: int) -> Step:
    return Step(version, base, size, 1.0)


def test_the_cheapest_way_is_taken() -> None:
    deltas = [delta(f"v{n}", f"v{n - 1}", 10) for n in range(1, 41)]
    squashed = delta("v32", "v0", 70)
    anchor = full("v30", 100)
    disk = full("v0", 0, "disk")
    assert [s.version for s in cheapest("v40", [*deltas, anchor]).steps] == [f"v{n}" for n in range(30, 41)]
    route = cheapest("v40", [*deltas, anchor, disk, squashed])
    assert [s.version for s in route.steps] == ["v0", "v32", *(f"v{n}" for n in range(33, 41))]
    assert (route.size_bytes, route.seconds) == (150, 150.0)
    assert cheapest("v40", [*deltas, anchor, full("v40", 90, "peer")]).steps[0].label == "peer"
    assert len(cheapest("v40", [*deltas, full("v40", 101), disk], max_steps=39).steps) == 1
    assert cheapest("v3", [*deltas, full("v3", 30), disk]).steps == (full("v3", 30),)


def test_latency_counts_as_well_as_bytes() -> None:
    far = Step("v1", None, 100, 1e3, latency_s=5.0)
    near = Step("v1", None, 100, 1e2, apply_s=0.5)
    assert cheapest("v1", [far, near]).steps == (near,)


def test_no_way_says_what_is_missing() -> None:
    with pytest.raises(
        VersionGone, match="version v2: nothing leads to it; one of v0 would have to be there"
    ):
        cheapest("v2", [delta("v2", "v1", 1), delta("v1", "v0", 1)])
    with pytest.raises(VersionGone, match=r"version v9: .* one of v9"):
        cheapest("v9", [])
    with pytest.raises(VersionGone, match="nothing leads to it in 1 deltas"):
        cheapest("v2", [delta("v2", "v1", 1), delta("v1", "v0", 1), full("v0", 1)], max_steps=1)
    with pytest.raises(VersionGone, match="version a: nothing leads to it"):
        cheapest("a", [delta("a", "b", 0), delta("b", "a", 0)])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            Step, st.sampled_from("abcd"), st.sampled_from([None, *"abcd"]), st.integers(0, 9), st.just(1.0)
        ),
        max_size=9,
    ),
    st.integers(0, 4),
)
def test_it_is_as_cheap_as_the_best_of_all_ways(steps: list[Step], max_steps: int) -> None:
    def ways(version: str, deltas: int) -> list[float]:
        found = []
        for each in steps:
            if each.version == version and each.base is None:
                found.append(each.seconds)
            elif each.version == version and each.base is not None and deltas:
                found += [each.seconds + rest for rest in ways(each.base, deltas - 1)]
        return found

    best = min(ways("a", max_steps), default=None)
    if best is None:
        with pytest.raises(VersionGone):
            cheapest("a", steps, max_steps)
    else:
        assert cheapest("a", steps, max_steps).seconds == best
