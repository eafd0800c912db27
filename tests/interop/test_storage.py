"""Versions in object storage: 0.7.0's receiver rebuilds ours byte for byte, and we rebuild its."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelexpress_rl.canonical.index import INDEX_NAME, Encoding, Index, read_index, shard_name, write_index
from modelexpress_rl.canonical.memory import Bytes
from modelexpress_rl.canonical.objects import BytesObject
from modelexpress_rl.canonical.plain_files import (
    Change,
    add_full,
    copy_full,
    full_batches,
    read_full,
    read_xor,
)
from modelexpress_rl.canonical.shard_writer import ShardWriter
from modelexpress_rl.canonical.sparse_writer import SparseWriter, TypedChange
from modelexpress_rl.canonical.xor import replay
from tests.canonical.weights import stepped, xor_version
from tests.interop.peers import Peer, Pool, Raised
from tests.interop.s3_server import serving

pytestmark = pytest.mark.heavy

SHAPES = {
    "model.embed_tokens.weight": ("BF16", (64, 48)),
    "model.layers.0.mlp.down_proj.weight": ("BF16", (48, 96)),
    "model.layers.0.mlp.gate.bias": ("F32", (7,)),
    "model.norm.weight": ("BF16", (48,)),
    "lm_head.weight": ("BF16", (64, 48)),
}
WIDTH = {"BF16": 2, "F32": 4}
Weights = dict[str, Bytes]


def model(step: int) -> Weights:
    """The weights after some steps; no step changes the norm."""
    weights = {}
    for seed, (name, (dtype, shape)) in enumerate(SHAPES.items()):
        noise = np.random.default_rng(seed).integers(0, 60, int(np.prod(shape)) * WIDTH[dtype], np.uint8)
        for number in range(1, step + 1):
            noise = noise if name == "model.norm.weight" else stepped(noise, WIDTH[dtype], 0.2, number)
        weights[name] = noise
    return weights


def full_version(weights: Weights) -> tuple[bytes, dict[str, bytes]]:
    """A full checkpoint of ours, in more than one file."""
    batches = full_batches({name: data.nbytes for name, data in weights.items()}, 7000)
    files, weight_map = {}, {}
    for number, names in enumerate(batches, 1):
        with ShardWriter() as writer:
            for name in names:
                add_full(writer, name, *SHAPES[name], weights[name])
            files[shard_name(number, len(batches))] = b"".join(writer.parts())
        weight_map |= dict.fromkeys(names, shard_name(number, len(batches)))
    size = sum(data.nbytes for data in weights.values())
    return write_index(Index(Encoding.FULL, weight_map, total_size_bytes=size)), files


def put(folder: Path, version: tuple[bytes, dict[str, bytes]]) -> None:
    folder.mkdir(parents=True)
    (folder / INDEX_NAME).write_bytes(version[0])
    for name, data in version[1].items():
        (folder / name).write_bytes(data)


def digests(weights: Weights) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in weights.items()}


def record(number: int, kind: str = "XOR_DELTA") -> dict[str, Any]:
    return {
        "version_id": f"v{number}",
        "payload_format": kind,
        "base_version_id": f"v{number - 1}" if kind == "XOR_DELTA" else None,
        "uri": f"s3://bucket/run/v{number}/{INDEX_NAME}",
    }


@pytest.fixture
def peer(pool: Pool) -> Peer:
    return pool.take("peer_storage.py")[0]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A storage service over tmp_path/s3."""
    with serving(tmp_path / "s3") as address:
        yield address


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Where the versions lie that are under s3://bucket/run; beside a seed checkpoint."""
    seed = tmp_path / "seed"
    seed.mkdir()
    (seed / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    put_checkpoint(seed, model(0))
    return tmp_path / "s3" / "bucket" / "run"


def put_checkpoint(folder: Path, weights: Weights) -> None:
    folder.mkdir(exist_ok=True)
    with ShardWriter() as writer:
        for name, data in weights.items():
            add_full(writer, name, *SHAPES[name], data)
        (folder / "model.safetensors").write_bytes(b"".join(writer.parts()))


def delta_of_two_ranks(number: int) -> tuple[bytes, dict[str, bytes]]:
    base, new = model(number - 1), model(number)
    changes = [Change(name, base[name], new[name]) for name in SHAPES]
    return xor_version(f"v{number}", f"v{number - 1}", [changes[:2], [], changes[2:]])


def test_its_receiver_rebuilds_our_deltas(peer: Peer, endpoint: str, run: Path, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        put(run / f"v{number}", delta_of_two_ranks(number))
    got = peer.call(
        "reconstruct",
        endpoint=endpoint,
        seed=str(tmp_path / "seed"),
        folder=str(tmp_path / "host"),
        chain=[record(number) for number in (1, 2, 3)],
    )
    assert got == digests(model(3))


def test_its_receiver_rebuilds_our_checkpoint_and_a_delta_on_it(
    peer: Peer, endpoint: str, run: Path, tmp_path: Path
) -> None:
    put(run / "v1", full_version(model(1)))
    put(run / "v2", delta_of_two_ranks(2))
    got = peer.call(
        "reconstruct",
        endpoint=endpoint,
        seed=str(tmp_path / "seed"),
        folder=str(tmp_path / "host"),
        chain=[record(1, "FULL_HF_CHECKPOINT"), record(2)],
    )
    assert got == digests(model(2))


def test_its_receiver_refuses_our_sparse_deltas(peer: Peer, endpoint: str, run: Path, tmp_path: Path) -> None:
    """It can't take one for a delta that it knows."""
    base, new = model(0), model(1)
    with SparseWriter() as writer:
        writer.add([TypedChange(name, *SHAPES[name], base[name], new[name]) for name in SHAPES])
        index = Index(
            Encoding.SPARSE,
            dict.fromkeys(writer.names, shard_name(0, 1)),
            "v1",
            "v0",
            prefixes={shard_name(0, 1): writer.prefix()},
        )
        put(run / "v1", (write_index(index), {shard_name(0, 1): b"".join(writer.parts())}))
    with pytest.raises(Raised) as caught:
        peer.call(
            "reconstruct",
            endpoint=endpoint,
            seed=str(tmp_path / "seed"),
            folder=str(tmp_path / "host"),
            chain=[record(1)],
        )
    assert caught.value.kind in ("ValueError", "RuntimeError")


def test_we_rebuild_its_versions(peer: Peer, endpoint: str, run: Path, tmp_path: Path) -> None:
    chain = [record(1), record(2), record(3, "FULL_HF_CHECKPOINT")]
    for number in (1, 2, 3):
        put_checkpoint(tmp_path / f"c{number}", model(number))
    peer.call(
        "publish",
        endpoint=endpoint,
        seed=str(tmp_path / "seed"),
        checkpoints=[str(tmp_path / f"c{number}") for number in (1, 2, 3)],
        chain=chain,
    )
    weights = model(0)
    frames: dict[str, list[Any]] = {}
    for number in (1, 2):
        for name, frame in read_xor(*opened(run / f"v{number}")).items():
            frames.setdefault(name, []).append(frame)
    for name, of_it in frames.items():
        replay(name, weights[name], of_it, weights[name])
    assert digests(weights) == digests(model(2))
    tensors = read_full(*opened(run / "v3"))
    for name, tensor in tensors.items():
        copy_full(name, tensor, weights[name])
    assert {name: (each.stored.dtype, each.stored.shape) for name, each in tensors.items()} == SHAPES
    assert digests(weights) == digests(model(3))


def opened(folder: Path) -> tuple[Index, Any]:
    index = read_index((folder / INDEX_NAME).read_bytes(), str(folder))
    files = {name: BytesObject(name, (folder / name).read_bytes()) for name in index.files}
    return index, files.__getitem__
