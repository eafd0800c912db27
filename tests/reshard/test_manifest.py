"""Version 1 manifests: exactly 0.7.0's bytes, and nothing hostile gets further than ManifestError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelexpress_rl.errors import ManifestError
from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest, decode, digest, encode
from tests.examples import many
from tests.reshard.documents import shard_lists

GOLDEN = (Path(__file__).parent.parent / "data" / "manifest_v1.json").read_bytes()
GOLDEN_SHA256 = "015ed9b82495b04f044355782e2cd1ac54f6189d0bd0d30de5edf4d8b1059bf4"


def golden() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(GOLDEN)
    return document


def test_the_golden_manifest_survives_byte_for_byte() -> None:
    assert digest(GOLDEN) == GOLDEN_SHA256
    manifest = decode(GOLDEN)
    assert (manifest.agent_name, manifest.metadata_endpoint) == ("agent-0", "10.0.0.1:5555")
    assert manifest.agent_meta == bytes(range(64))
    table = manifest.table
    assert table.tensors.names == ("model.norm.weight", "model.layers.0.ünï.weight")
    assert (table.box(0), table.box(1)) == (((0,), (16,)), ((16, 0), (16, 16)))
    assert table.tensors.shape(1) == (32, 16)
    assert table.addr.tolist() == [140000000000000, 140000000004096]
    assert table.has_digest.tolist() == [False, True]
    assert digest(encode(manifest)) == GOLDEN_SHA256


@many
@given(shard_lists(), st.binary(max_size=80))
def test_what_is_encoded_is_decoded(shards: list[Shard], meta: bytes) -> None:
    data = encode(Manifest("a", "h:1", meta, ShardTable.build(shards)))
    again = decode(data)
    assert again.agent_meta == meta
    assert encode(again) == data
    table = again.table
    assert [
        (table.tensors.names[int(table.tensor[i])], *table.box(i), int(table.addr[i]))
        for i in range(len(table))
    ] == [(s.name, s.offset, s.shape, s.addr) for s in shards]


def changed(path: tuple[str | int, ...], value: object) -> bytes:
    document: Any = golden()
    at = document
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(document).encode()


TENSOR = ("tensors", 1)
SHARD = ("tensors", 1, "shards", 0)
NAME = "tensor 'model.layers.0.ünï.weight'"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "mx.reshard.shard_table.v2", "schema must be"),
        (("schema",), ..., "field 'schema' is missing"),
        (("agent_name",), "", "manifest: agent_name must be a printable string"),
        (
            ("agent_name",),
            "other",
            "tensor 'model.norm.weight': agent_name must be the manifest's own, 'other'",
        ),
        (("metadata_endpoint",), 5, "manifest: metadata_endpoint"),
        (("agent_meta_b64",), "====", "agent_meta_b64 is not base64"),
        (("agent_meta_b64",), "é", "agent_meta_b64 is not base64"),
        (("tensors",), {}, "manifest: tensors must be a list"),
        (("tensors", 1), 7, "tensor number 1: expected an object"),
        ((*TENSOR, "name"), "model.norm.weight", "tensor 'model.norm.weight': appears twice"),
        ((*TENSOR, "name"), "\ud800", "tensor number 1: name"),
        ((*TENSOR, "name"), "x" * 2000, "tensor number 1: name"),
        ((*TENSOR, "dtype"), "float32", f"{NAME}: dtype 'float32' is not known"),
        ((*TENSOR, "dtype"), ["torch.float32"], f"{NAME}: dtype must be"),
        ((*TENSOR, "elsize"), 2, f"{NAME}: elsize of torch.float32 is 4, got 2"),
        ((*TENSOR, "elsize"), 4.0, f"{NAME}: elsize must be an integer"),
        ((*TENSOR, "elsize"), True, f"{NAME}: elsize must be an integer"),
        ((*TENSOR, "full_shape"), [32, -16], f"{NAME}: full_shape must be an integer"),
        ((*TENSOR, "full_shape"), "32", f"{NAME}: full_shape must be a list"),
        ((*TENSOR, "full_shape"), [1] * 17, f"{NAME}: full_shape has rank 17"),
        (
            (*TENSOR, "full_shape"),
            [1 << 40, 1 << 40],
            f"{NAME}: full_shape \\(1099511627776, .* is more than",
        ),
        ((*TENSOR, "full_shape"), [0, 1 << 40, 1 << 40], f"{NAME}: full_shape .* is more than"),
        ((*TENSOR, "full_shape"), [16, 16], f"{NAME}: shard_offset .* lies outside the global shape"),
        ((*TENSOR, "full_shape"), [32, 16, 1], f"{NAME}: shard_offset .* does not have the rank"),
        ((*TENSOR, "shards"), None, f"{NAME}: shards must be a list, got None"),
        (SHARD, [], f"{NAME}: expected an object"),
        ((*SHARD, "addr"), ..., f"{NAME}: field 'addr' is missing"),
        ((*SHARD, "addr"), -1, f"{NAME}: addr must be an integer"),
        ((*SHARD, "addr"), 1 << 64, f"{NAME}: addr must be an integer"),
        ((*SHARD, "addr"), 10**4000, f"{NAME}: addr must be an integer in .*, got an integer of 13288 bits"),
        (
            (*SHARD, "addr"),
            (1 << 64) - 1,
            f"{NAME}: addr 18446744073709551615 plus 1024 bytes is past the end",
        ),
        ((*SHARD, "device_id"), "0", f"{NAME}: device_id must be an integer"),
        ((*SHARD, "shard_offset"), [16], f"{NAME}: shard_offset .* does not have the rank"),
        ((*SHARD, "shard_offset"), [17, 0], f"{NAME}: shard_offset .* lies outside"),
        ((*SHARD, "shape"), [16, 16.5], f"{NAME}: shape must be an integer"),
        ((*SHARD, "shape"), [1 << 63, 16], f"{NAME}: shape must be an integer"),
        ((*SHARD, "shape"), [[16], 16], f"{NAME}: shape must be an integer"),
        ((*SHARD, "digest"), None, f"{NAME}: digest must be 32 hex digits, got None"),
        ((*SHARD, "digest"), "0" * 31, f"{NAME}: digest must be 32 hex digits"),
        ((*SHARD, "digest"), " " * 32, f"{NAME}: digest must be 32 hex digits"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        decode(changed(path, value))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"null", "manifest: expected an object, got None"),
        (GOLDEN[:-1], "not JSON"),
        (GOLDEN.replace(b"140000000000000", b"NaN"), "NaN is not a number"),
        (GOLDEN.replace(b"140000000000000", b"9" * 5000), "not JSON"),
        (GOLDEN.replace(b"140000000000000", b"1e400"), "addr must be an integer in .*, got inf"),
        (b"[" * 100_000, "too many"),
        (b'{"schema":' + b'{"aaaaaaaaaaaaaaa":' * 20_000 + b"1" + b"}" * 20_001, "nested too deeply"),
        (b'{"a":[' + b"[]," * 100_000 + b"[]]}", "too many"),
    ],
)
def test_a_document_that_is_no_manifest(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        decode(data)


def test_size_is_bounded_before_parsing() -> None:
    with pytest.raises(ManifestError, match="at most 100 bytes are accepted, got 714"):
        decode(GOLDEN, max_bytes=100)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def paths(node: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    steps = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [*([at] if at else []), *(path for step, inner in steps for path in paths(inner, (*at, step)))]


@many
@given(st.sampled_from(paths(golden())), JSON | st.just(...))
def test_any_value_anywhere_is_accepted_or_a_manifest_error(
    path: tuple[str | int, ...], value: object
) -> None:
    try:
        manifest = decode(changed(path, value))
    except ManifestError:
        return
    assert decode(encode(manifest)).table.total_bytes == manifest.table.total_bytes


@many
@given(st.integers(0, len(GOLDEN) - 1), st.binary(max_size=6), st.integers(0, 40))
@example(0, b"", len(GOLDEN))
def test_any_damage_is_accepted_or_a_manifest_error(at: int, inserted: bytes, removed: int) -> None:
    try:
        manifest = decode(GOLDEN[:at] + inserted + GOLDEN[at + removed :])
    except ManifestError:
        return
    assert manifest.table.total_bytes >= 0
