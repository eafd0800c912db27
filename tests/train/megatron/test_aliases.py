"""Specs to zero-copy Hugging Face shards: roles other than QKV, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexpress_rl.train.engines.megatron import HfTensor, MegatronTensorSpec, build_hf_aliases
from tests.train.megatron.support import aliases, assemble, numbered, same_bytes, sharded, to_dicts

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "megatron_aliases.json").read_text())
QKV_EXTRAS = {"qkv_interleave": "by_head", "head_dim": 4, "num_heads": 8, "num_kv_heads": 2}
GATED = {"gated_mlp_order": "gate_then_up"}


def golden_specs(size: int, rank: int) -> list[MegatronTensorSpec]:
    def shard(
        name: str, role: str, shape: tuple[int, int], hf: tuple[str, ...], axis: int, extras: Any = None
    ):
        full = numbered(*shape, dtype=torch.bfloat16)
        return sharded(name, role, full, hf, axis, size, rank, extras)

    specs = [
        shard("linear_qkv", "qkv_column", (48, 16), ("q", "k", "v"), 0, QKV_EXTRAS),
        shard("linear_fc1", "gated_mlp_column", (48, 16), ("gate", "up"), 0, GATED),
        shard("linear_proj", "row", (16, 32), ("o",), 1),
    ]
    if rank == 0:
        norm = numbered(16, dtype=torch.bfloat16)
        specs.append(MegatronTensorSpec("norm", norm, "replicated", ("norm",), (16,)))
    return specs


@pytest.mark.parametrize(
    ("key", "size", "rank"), [("tp1_rank0", 1, 0), ("tp2_rank0", 2, 0), ("tp2_rank1", 2, 1)]
)
def test_boxes_are_those_of_the_golden_file(key: str, size: int, rank: int) -> None:
    assert to_dicts(build_hf_aliases(golden_specs(size, rank), "agent")) == GOLDEN[key]


def test_shards_are_views_of_the_live_tensor() -> None:
    spec = golden_specs(2, 1)[0]
    q, k, v = build_hf_aliases([spec], "trainer-1")
    assert [t.shards[0].addr - spec.tensor.data_ptr() for t in (q, k, v)] == [0, 16 * 32, 20 * 32]
    spec.tensor.fill_(7)
    assert all(bool((s.view == 7).all()) for t in (q, k, v) for s in t.shards)
    assert {s.agent_name for t in (q, k, v) for s in t.shards} == {"trainer-1"}
    assert {s.device_id for t in (q, k, v) for s in t.shards} == {0}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gate_and_up_are_halves_of_each_rank(size: int) -> None:
    gate, up = numbered(16, 3), numbered(16, 3, start=1000)
    ranks = []
    for rank in range(size):
        rows = slice(rank * 16 // size, (rank + 1) * 16 // size)
        local = torch.cat([gate[rows], up[rows]])
        span = (rank * 32 // size, (rank + 1) * 32 // size)
        spec = MegatronTensorSpec(
            "fc1", local, "gated_mlp_column", ("gate", "up"), (32, 3), "SHARD", 0, span, GATED
        )
        ranks.append(aliases(spec))
    full = assemble(ranks)
    assert same_bytes(full["gate"], gate)
    assert same_bytes(full["up"], up)


def test_gate_and_up_biases_have_one_axis() -> None:
    spec = MegatronTensorSpec("b", numbered(8), "gated_mlp_column", ("g", "u"), (8,), extras=GATED)
    full = assemble([aliases(spec)])
    assert full["g"].tolist() == numbered(8)[:4].tolist()
    assert full["u"].tolist() == numbered(8)[4:].tolist()


@pytest.mark.parametrize("role_axis", [("column", 0), ("row", 1), ("expert_column", 0), ("expert_row", 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_and_row(role_axis: tuple[str, int], size: int) -> None:
    role, axis = role_axis
    full = numbered(8, 12, dtype=torch.bfloat16)
    ranks = [aliases(sharded("w", role, full, ("hf",), axis, size, r)) for r in range(size)]
    assert same_bytes(assemble(ranks)["hf"], full)


def test_a_scalar_is_replicated() -> None:
    (tensor,) = aliases(MegatronTensorSpec("scale", torch.tensor(3.0), "replicated", ("scale",), ()))
    assert (tensor.full_shape, tensor.shards[0].shard_offset, tensor.shards[0].shape) == ((), (), ())


def test_vocabulary_padding_is_cut_off() -> None:
    full = numbered(16, 2)
    ranks = [
        aliases(sharded("emb", "column", full, ("hf",), 0, 4, rank, {"hf_rows": 9})) for rank in range(4)
    ]
    assert [len(rank) for rank in ranks] == [1, 1, 1, 0]
    assert same_bytes(assemble(ranks)["hf"], full[:9])


class TestExperts:
    @pytest.mark.parametrize("size", [1, 2])
    def test_sequential(self, size: int) -> None:
        gate, up, down = numbered(8, 3), numbered(8, 3, start=100), numbered(3, 8, start=200)
        ranks = []
        for rank in range(size):
            rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
            fc1 = torch.cat([gate[rows], up[rows]])
            span = (rank * 16 // size, (rank + 1) * 16 // size)
            ranks.append(
                aliases(
                    MegatronTensorSpec(
                        "e7.fc1", fc1, "expert_column", ("g7", "u7"), (16, 3), "SHARD", 0, span, GATED
                    ),
                    sharded("e7.fc2", "expert_row", down, ("d7",), 1, size, rank),
                )
            )
        full = assemble(ranks)
        assert same_bytes(full["g7"], gate)
        assert same_bytes(full["u7"], up)
        assert same_bytes(full["d7"], down)

    @pytest.mark.parametrize("etp", [1, 2])
    def test_grouped_tensors_over_expert_ranks(self, etp: int) -> None:
        """4 experts on 2 expert-parallel ranks, each tensor further sharded by expert TP."""
        gates, ups, downs = numbered(4, 8, 3), numbered(4, 8, 3, start=500), numbered(4, 3, 8, start=900)
        ranks = []
        for ep_rank in range(2):
            experts = range(2 * ep_rank, 2 * ep_rank + 2)
            for rank in range(etp):
                rows = slice(rank * 8 // etp, (rank + 1) * 8 // etp)
                fc1 = torch.stack([torch.cat([gates[e, rows], ups[e, rows]]) for e in experts])
                fc2 = downs[2 * ep_rank : 2 * ep_rank + 2, :, rows].clone()
                names = [f"{part}{e}" for e in experts for part in ("g", "u")]
                span = (rank * 16 // etp, (rank + 1) * 16 // etp)
                half = (rank * 8 // etp, (rank + 1) * 8 // etp)
                extras = {"num_local_experts": 2}
                ranks.append(
                    aliases(
                        MegatronTensorSpec(
                            "fc1", fc1, "expert_column", names, (2, 16, 3), "SHARD", 1, span, extras | GATED
                        ),
                        *(
                            MegatronTensorSpec(
                                f"fc2.{e}",
                                fc2[i].contiguous(),
                                "expert_row",
                                [f"d{e}"],
                                (3, 8),
                                "SHARD",
                                1,
                                half,
                            )
                            for i, e in enumerate(experts)
                        ),
                    )
                )
        full = assemble(ranks)
        for e in range(4):
            assert same_bytes(full[f"g{e}"], gates[e])
            assert same_bytes(full[f"u{e}"], ups[e])
            assert same_bytes(full[f"d{e}"], downs[e])

    def test_grouped_rows_without_a_gate(self) -> None:
        full = numbered(2, 3, 8)
        specs = [
            MegatronTensorSpec(
                "fc2",
                full[:, :, 4 * r : 4 * r + 4].clone(),
                "expert_row",
                ("d0", "d1"),
                (2, 3, 8),
                "SHARD",
                2,
                (4 * r, 4 * r + 4),
                {"num_local_experts": "2"},
            )
            for r in range(2)
        ]
        assembled = assemble([aliases(spec) for spec in specs])
        assert same_bytes(assembled["d0"], full[0])
        assert same_bytes(assembled["d1"], full[1])

    def test_stacked_under_one_name_is_a_box(self) -> None:
        full = numbered(4, 3, 2)
        ranks = [aliases(sharded("w", "expert_column", full, ("experts",), 0, 2, r)) for r in range(2)]
        assert same_bytes(assemble(ranks)["experts"], full)


class TestTiedEmbeddings:
    def test_one_name_once(self) -> None:
        tensors = aliases(sharded("emb", "column", numbered(8, 2), ("model.embed_tokens.weight",), 0, 1, 0))
        assert [t.name for t in tensors] == ["model.embed_tokens.weight"]

    def test_a_second_name_is_an_alias_of_the_same_memory(self) -> None:
        spec = sharded("emb", "column", numbered(8, 2), ("embed", "lm_head"), 0, 2, 1)
        embed, lm_head = aliases(spec)
        assert embed.shards[0].addr == lm_head.shards[0].addr == spec.tensor.data_ptr()

    def test_the_same_tensor_under_two_specs_of_one_name_is_refused(self) -> None:
        weight = numbered(8, 2)
        specs = [MegatronTensorSpec(n, weight, "column", ("lm_head",), (8, 2)) for n in ("emb", "out")]
        with pytest.raises(ValueError, match=r"^out: duplicate names: lm_head is already that of emb"):
            build_hf_aliases(specs, "agent")


def spec(**changes: Any) -> MegatronTensorSpec:
    base: dict[str, Any] = {
        "name": "decoder.w",
        "tensor": numbered(4, 6),
        "role": "column",
        "hf_names": ("hf",),
        "global_shape": (8, 6),
        "placement_kind": "SHARD",
        "shard_axis": 0,
        "local_shard_range": (0, 4),
    }
    return MegatronTensorSpec(**(base | changes))


GATED_SPEC = {"role": "gated_mlp_column", "hf_names": ("g", "u"), "extras": GATED}
EXPERTS = {
    "role": "expert_column",
    "tensor": numbered(2, 4, 6),
    "hf_names": ("e0", "e1"),
    "global_shape": (2, 8, 6),
    "shard_axis": 1,
    "extras": {"num_local_experts": 2},
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"role": "diagonal"}, r"role must be one of .*, got 'diagonal'"),
        ({"hf_names": ()}, r"hf_names must be non-blank"),
        ({"hf_names": (" ",)}, r"hf_names must be non-blank"),
        ({"hf_names": "hf"}, r"must be a sequence of names, got the string 'hf'"),
        ({"hf_names": ("hf", "hf")}, r"duplicate names in hf_names"),
        ({"placement_kind": "PARTIAL"}, r"placement_kind must be SHARD or REPLICATE, got 'PARTIAL'"),
        ({"global_shape": (8, 0)}, r"global_shape must be positive"),
        ({"global_shape": (8,)}, r"has 1 axes, the local tensor \(4, 6\) has 2"),
        ({"global_shape": (8, 7)}, r"must be \(4, 7\) by global_shape \(8, 7\).*got \(4, 6\)"),
        ({"shard_axis": None}, r"needs a shard_axis from 0 to 1, got None"),
        ({"shard_axis": 2}, r"needs a shard_axis from 0 to 1, got 2"),
        ({"local_shard_range": None}, r"needs local_shard_range \(start, stop\), got None"),
        ({"local_shard_range": (6, 10)}, r"\(6, 10\) lies outside the global extent 8 of axis 0"),
        ({"local_shard_range": (-4, 0)}, r"lies outside the global extent"),
        ({"local_shard_range": (4, 4)}, r"lies outside the global extent"),
        ({"local_shard_range": (2, 6)}, r"uneven shard"),
        ({"global_shape": (9, 6), "local_shard_range": (4, 9)}, r"uneven shard"),
        ({"tensor": numbered(6, 4).t()}, r"view for hf is not contiguous"),
        ({"tensor": numbered(4, 12)[:, ::2]}, r"view for hf is not contiguous"),
        ({"placement_kind": "REPLICATE"}, r"takes no shard_axis"),
        (
            {"placement_kind": "REPLICATE", "shard_axis": None, "local_shard_range": None},
            r"must have its global_shape \(8, 6\), the local tensor is \(4, 6\)",
        ),
        ({"role": "replicated"}, r"role replicated needs placement REPLICATE, got SHARD"),
        ({"extras": {"hf_rows": 0}}, r"extra hf_rows must be a whole number of at least 1, got 0"),
        ({"extras": {"hf_rows": 9}}, r"extra hf_rows 9 exceeds"),
        (GATED_SPEC | {"extras": {}}, r"gated_mlp_order must be gate_then_up, got None"),
        (
            GATED_SPEC | {"extras": {"gated_mlp_order": "interleaved"}},
            r"must be gate_then_up, got 'interleaved'",
        ),
        (GATED_SPEC | {"hf_names": ("g",)}, r"needs the hf_names of gate and up"),
        (GATED_SPEC | {"global_shape": (8, 7)}, r"must be \(4, 7\)"),
        (GATED_SPEC | {"global_shape": (10, 6)}, r"uneven shard"),
        (GATED_SPEC | {"shard_axis": 1, "global_shape": (4, 12), "local_shard_range": (0, 6)}, r"on axis 0"),
        (
            GATED_SPEC | {"tensor": numbered(3, 6), "global_shape": (6, 6), "local_shard_range": (3, 6)},
            r"local 3 and start 3 must be even",
        ),
        (GATED_SPEC | {"tensor": numbered(6, 4).t()}, r"view for g is not contiguous"),
        (EXPERTS | {"extras": {"num_local_experts": 3}}, r"num_local_experts 3 must be the extent of axis 0"),
        (EXPERTS | {"hf_names": ("e0",)}, r"2 experts need 2 hf_names \(1 each\), got 1"),
        (
            EXPERTS | {"extras": {"num_local_experts": 2} | GATED},
            r"2 experts need 4 hf_names \(2 each\), got 2",
        ),
        (
            EXPERTS | {"extras": {"num_local_experts": "two"}},
            r"must be a whole number of at least 1, got 'two'",
        ),
        (
            EXPERTS | {"extras": {"num_local_experts": True}},
            r"must be a whole number of at least 1, got True",
        ),
        (
            EXPERTS | {"global_shape": (4, 4, 6), "shard_axis": 0, "local_shard_range": (0, 2)},
            r"can't be sharded on axis 0",
        ),
        (
            EXPERTS
            | {"global_shape": (2, 4, 12), "shard_axis": 2, "local_shard_range": (0, 6)}
            | {"hf_names": ("g0", "u0", "g1", "u1"), "extras": {"num_local_experts": 2} | GATED},
            r"grouped gate/up experts are sharded on axis 1",
        ),
        (
            EXPERTS | {"role": "expert_row", "extras": {"num_local_experts": 2} | GATED},
            r"belongs to expert_column",
        ),
    ],
)
def test_every_refusal_begins_with_the_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^decoder\.w: .*({problem})"):
        build_hf_aliases([spec(**changes)], "agent")


def test_a_fused_scalar_is_refused() -> None:
    scalar = MegatronTensorSpec("w", torch.tensor(1.0), "gated_mlp_column", ("g", "u"), (), extras=GATED)
    with pytest.raises(ValueError, match=r"^w: a fused gate/up tensor has rows"):
        build_hf_aliases([scalar], "agent")


def test_a_blank_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^' ': a Megatron tensor needs a name"):
        build_hf_aliases([spec(name=" ")], "agent")


def test_two_specs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^decoder\.w: duplicate names"):
        build_hf_aliases([spec(), spec(hf_names=("other",))], "agent")


def test_the_result_is_plain() -> None:
    (tensor,) = build_hf_aliases([spec()], "agent")
    assert isinstance(tensor, HfTensor)
    assert (tensor.name, tensor.dtype, tensor.elsize, tensor.full_shape) == ("hf", "torch.float32", 4, (8, 6))
