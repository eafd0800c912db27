"""Random manifests, and what is done to bytes that a peer may send."""

from __future__ import annotations

from hypothesis import strategies as st

from modelexpress_rl.reshard.geometry import Shard, ShardTable
from modelexpress_rl.reshard.manifest import Manifest

DTYPES = ("torch.float32", "torch.bfloat16", "torch.uint8")


@st.composite
def shard_lists(draw: st.DrawFn) -> list[Shard]:
    """Shards of a few tensors of rank 0 to 3, each tensor's together; some carry digests."""
    made = []
    for name in draw(
        st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1), max_size=4, unique=True)
    ):
        full = tuple(draw(st.lists(st.integers(0, 1 << 20), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        for _ in range(draw(st.integers(1, 3))):
            offset = tuple(draw(st.integers(0, n)) for n in full)
            shape = tuple(draw(st.integers(0, n - a)) for n, a in zip(full, offset, strict=True))
            made.append(
                Shard(
                    name,
                    dtype,
                    full,
                    offset,
                    shape,
                    addr=draw(st.integers(0, (1 << 64) - (1 << 62) - 1)),
                    device_id=draw(st.integers(0, 7)),
                    digest=draw(st.none() | st.binary(min_size=16, max_size=16)),
                )
            )
    return made


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests of such shards, in any order."""
    shards = draw(st.permutations(draw(shard_lists())))
    agent = draw(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=8))
    endpoint = draw(st.sampled_from(["", "10.0.0.1:5555"]))
    return Manifest(agent, endpoint, draw(st.binary(max_size=80)), ShardTable.build(shards))


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The same with some bytes changed, put in, taken out or cut off."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "change", "insert", "remove", "cut", "repeat"])):
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
            case "change":
                put = draw(st.sampled_from([b"\0", b"\xff", b"\x80", b"\0" * 8, b"\xff" * 8]))
                data = data[:at] + put + data[at + len(put) :]
            case "insert":
                data = data[:at] + draw(st.binary(max_size=8)) + data[at:]
            case "remove":
                data = data[:at] + data[at + draw(st.integers(1, 40)) :]
            case "cut":
                data = data[:at]
            case "repeat":
                data = data + data[at:]
    return data
