"""Trainers that keep projections fused, through the aliases that they publish, to generators of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from modelexpress_rl.reshard.geometry import Shard, ShardTable  # noqa: E402
from modelexpress_rl.reshard.manifest import Manifest  # noqa: E402
from modelexpress_rl.reshard.merge import Merged, SourceManifest, merge  # noqa: E402
from modelexpress_rl.reshard.needs import Need, NeedTable  # noqa: E402
from modelexpress_rl.reshard.planner import plan  # noqa: E402
from modelexpress_rl.reshard.proof import prove_plan  # noqa: E402
from modelexpress_rl.train.engines.megatron import HfTensor, MegatronTensorSpec, build_hf_aliases  # noqa: E402
from tests.examples import many  # noqa: E402
from tests.reshard.reference import pull  # noqa: E402
from tests.train.megatron.support import numbered  # noqa: E402

DTYPE = "torch.float32"


def merged(ranks: list[tuple[HfTensor, ...]]) -> Merged:
    return merge(
        [
            SourceManifest.of(
                f"slot-{number}",
                f"w{number}",
                Manifest(
                    f"agent-{number}",
                    "",
                    b"",
                    ShardTable.build(
                        Shard(t.name, t.dtype, t.full_shape, s.shard_offset, s.shape, s.addr)
                        for t in tensors
                        for s in t.shards
                    ),
                ),
            )
            for number, tensors in enumerate(ranks)
        ]
    )


def fused_parameter(
    ranks: list[tuple[HfTensor, ...]], slices: list[tuple[str, int, int]], columns: int
) -> bytes:
    """Read row slices so that they lie one below the other, as an engine's fused parameter has them."""
    needs = [Need(name, DTYPE, (begin, 0), (end - begin, columns)) for name, begin, end in slices]
    sizes = [4 * columns * (end - begin) for _, begin, end in slices]
    places = [sum(sizes[:number]) for number in range(len(sizes))]
    table, sources = NeedTable.build(needs, local_offsets=places), merged(ranks)
    made = plan(table, sources)
    prove_plan(made, table, sources)
    assert made.amplification == 1.0
    arena = np.full(table.arena_bytes, 0xA5, np.uint8)
    pull(made, arena)
    return arena.tobytes()


@many
@given(
    kv_heads=st.sampled_from([1, 2, 3, 4]),
    queries=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 4]),
    columns=st.integers(1, 3),
    data=st.data(),
)
def test_fused_qkv_by_group_with_rank_boundaries_anywhere(
    kv_heads: int, queries: int, head_dim: int, columns: int, data: st.DataObject
) -> None:
    """Trainer ranks may end inside a group or a head; generator ranks may outnumber the KV heads."""
    heads = kv_heads * queries
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    parts = {name: numbered(n, columns, start=10_000 * i) for i, (name, n) in enumerate(rows.items())}
    fused = []
    for group in range(kv_heads):
        fused.append(parts["q"][group * queries * head_dim : (group + 1) * queries * head_dim])
        fused += [parts[name][group * head_dim : (group + 1) * head_dim] for name in "kv"]
    whole = torch.cat(fused)
    extras = {
        "qkv_interleave": "by_head",
        "head_dim": head_dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }
    sizes = [size for size in range(1, 9) if len(whole) % size == 0]
    size = data.draw(st.sampled_from(sizes), label="trainer")
    step = len(whole) // size
    kept = [whole[rank * step : (rank + 1) * step].clone() for rank in range(size)]
    ranks = [
        build_hf_aliases(
            [
                MegatronTensorSpec(
                    "qkv",
                    local,
                    "qkv_column",
                    ("q", "k", "v"),
                    tuple(whole.shape),
                    "SHARD",
                    0,
                    (rank * step, (rank + 1) * step),
                    extras,
                )
            ],
            f"agent-{rank}",
        )
        for rank, local in enumerate(kept)
    ]
    sizes = [size for size in range(1, heads + 1) if heads % size == 0]
    generator = data.draw(st.sampled_from(sizes), label="generator")
    for rank in range(generator):
        slices = [("q", rank * rows["q"] // generator, (rank + 1) * rows["q"] // generator)]
        # Where there are fewer KV heads than ranks, neighbours load the same one.
        first = rank * kv_heads // generator
        last = max(first + 1, (rank + 1) * kv_heads // generator)
        slices += [(name, first * head_dim, last * head_dim) for name in "kv"]
        expected = torch.cat([parts[name][begin:end] for name, begin, end in slices])
        assert fused_parameter(ranks, slices, columns) == expected.numpy().tobytes()


@many
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_fused_gate_and_up(trainer: int, generator: int, factor: int, columns: int) -> None:
    """Each trainer rank has its half of gate over its half of up; a generator's parameter as well."""
    ffn = trainer * generator * factor
    gate, up = numbered(ffn, columns), numbered(ffn, columns, start=10_000)
    step = ffn // trainer
    kept = [
        torch.cat([part[rank * step : (rank + 1) * step] for part in (gate, up)]) for rank in range(trainer)
    ]
    ranks = [
        build_hf_aliases(
            [
                MegatronTensorSpec(
                    "fc1",
                    local,
                    "gated_mlp_column",
                    ("gate", "up"),
                    (2 * ffn, columns),
                    "SHARD",
                    0,
                    (2 * rank * step, 2 * (rank + 1) * step),
                    {"gated_mlp_order": "gate_then_up"},
                )
            ],
            f"agent-{rank}",
        )
        for rank, local in enumerate(kept)
    ]
    step = ffn // generator
    for rank in range(generator):
        slices = [(name, rank * step, (rank + 1) * step) for name in ("gate", "up")]
        expected = torch.cat([part[rank * step : (rank + 1) * step] for part in (gate, up)])
        assert fused_parameter(ranks, slices, columns) == expected.numpy().tobytes()
