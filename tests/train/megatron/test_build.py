"""Specs from conversion tasks that look like Megatron-Bridge's."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelexpress_rl.train.engines.megatron import (
    MegatronTensorSpec,
    build_hf_aliases,
    build_megatron_tensor_specs,
)
from tests.train.megatron.support import assemble, numbered, same_bytes


@dataclass
class Mapping:
    hf_param: str | dict[str, str]
    permute_dims: tuple[int, ...] | None = None


class AutoMapping(Mapping): ...


class QKVMapping(Mapping): ...


class GatedMLPMapping(Mapping): ...


class ColumnParallelMapping(Mapping): ...


class RowParallelMapping(Mapping): ...


class ReplicatedMapping(Mapping): ...


class RMSNorm2ZeroCenteredRMSNormMapping(Mapping): ...


class ColumnParallelLinear: ...


class TELayerNormColumnParallelLinear: ...


class RowParallelLinear: ...


class VocabParallelEmbedding: ...


class RMSNorm: ...


@dataclass
class Task:
    param_name: str
    mapping: Mapping
    param_weight: torch.Tensor | None
    megatron_module: Any = None
    global_param_name: str = ""
    pp_rank: int = 0
    vp_stage: int = 0


@dataclass
class Config:
    num_attention_heads: int = 8
    num_query_groups: int | None = 2
    kv_channels: int | None = 4
    hidden_size: int = 16
    extra: dict[str, Any] = field(default_factory=dict)


QKV = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
GATE_UP = {"gate": "gate_proj", "up": "up_proj"}


def build(
    *tasks: Task | None, config: Any = None, tp: tuple[int, int] = (2, 1), etp: tuple[int, int] = (1, 0)
):
    return build_megatron_tensor_specs(tasks, config or Config(), *tp, *etp)


def one(*tasks: Task, **kwargs: Any) -> MegatronTensorSpec:
    (spec,) = build(*tasks, **kwargs)
    return spec


def facts(spec: MegatronTensorSpec) -> tuple[Any, ...]:
    return (spec.role, spec.global_shape, spec.placement_kind, spec.shard_axis, spec.local_shard_range)


def test_qkv() -> None:
    spec = one(Task("decoder.layers.0.self_attention.linear_qkv.weight", QKVMapping(QKV), numbered(24, 16)))
    assert facts(spec) == ("qkv_column", (48, 16), "SHARD", 0, (24, 48))
    assert spec.hf_names == ("q_proj", "k_proj", "v_proj")
    assert spec.extras == {"qkv_interleave": "by_head", "head_dim": 4, "num_heads": 8, "num_kv_heads": 2}


def test_qkv_without_groups_and_channels() -> None:
    config = Config(num_query_groups=None, kv_channels=None)
    spec = one(Task("linear_qkv.weight", QKVMapping(QKV), numbered(24, 16)), config=config)
    assert (spec.extras["head_dim"], spec.extras["num_kv_heads"]) == (2, 8)


def test_gate_up() -> None:
    spec = one(Task("mlp.linear_fc1.weight", GatedMLPMapping(GATE_UP), numbered(24, 16)))
    assert facts(spec) == ("gated_mlp_column", (48, 16), "SHARD", 0, (24, 48))
    assert spec.extras == {"gated_mlp_order": "gate_then_up"}


@pytest.mark.parametrize(
    ("mapping", "module", "weight", "expected"),
    [
        (ColumnParallelMapping("hf"), None, numbered(4, 3), ("column", (8, 3), "SHARD", 0, (4, 8))),
        (ColumnParallelMapping("hf"), None, numbered(4), ("column", (8,), "SHARD", 0, (4, 8))),
        (RowParallelMapping("hf"), None, numbered(4, 3), ("row", (4, 6), "SHARD", 1, (3, 6))),
        (AutoMapping("hf"), ColumnParallelLinear(), numbered(4, 3), ("column", (8, 3), "SHARD", 0, (4, 8))),
        (AutoMapping("hf"), VocabParallelEmbedding(), numbered(4, 3), ("column", (8, 3), "SHARD", 0, (4, 8))),
        (AutoMapping("hf"), RowParallelLinear(), numbered(4, 3), ("row", (4, 6), "SHARD", 1, (3, 6))),
    ],
)
def test_sharded(mapping: Mapping, module: Any, weight: torch.Tensor, expected: tuple[Any, ...]) -> None:
    assert facts(one(Task("w.weight", mapping, weight, module))) == expected


@pytest.mark.parametrize(
    ("name", "mapping", "module"),
    [
        ("norm.weight", ReplicatedMapping("hf"), None),
        ("norm.weight", AutoMapping("hf"), RMSNorm()),
        ("linear_qkv.layer_norm_weight", AutoMapping("hf"), TELayerNormColumnParallelLinear()),
        ("linear_proj.bias", AutoMapping("hf"), RowParallelLinear()),
        ("linear_proj.bias", RowParallelMapping("hf"), None),
    ],
)
def test_replicated_tensors_are_those_of_rank_0(name: str, mapping: Mapping, module: Any) -> None:
    task = Task(name, mapping, numbered(6), module)
    assert facts(one(task, tp=(2, 0))) == ("replicated", (6,), "REPLICATE", None, None)
    assert build(task, tp=(2, 1)) == ()


def test_what_megatron_noted_on_the_parameter_counts() -> None:
    weight = numbered(4, 3)
    weight.tensor_model_parallel, weight.partition_dim = True, 1  # type: ignore[attr-defined]
    assert facts(one(Task("w", AutoMapping("hf"), weight, SimpleNamespace()))) == (
        "row",
        (4, 6),
        "SHARD",
        1,
        (3, 6),
    )


def test_experts_are_sharded_by_expert_tensor_parallelism() -> None:
    prefix = "decoder.layers.0.mlp.experts.local_experts.3."
    fc1, fc2 = build(
        Task("x", GatedMLPMapping(GATE_UP), numbered(8, 6), global_param_name=prefix + "linear_fc1.weight"),
        Task("y", AutoMapping("down"), numbered(6, 4), RowParallelLinear(), prefix + "linear_fc2.weight"),
        tp=(4, 3),
        etp=(2, 1),
    )
    assert (fc1.name, facts(fc1)) == (
        prefix + "linear_fc1.weight",
        ("expert_column", (16, 6), "SHARD", 0, (8, 16)),
    )
    assert facts(fc2) == ("expert_row", (6, 8), "SHARD", 1, (4, 8))


def test_shared_experts_are_dense() -> None:
    spec = one(Task("mlp.shared_experts.linear_fc1.weight", GatedMLPMapping(GATE_UP), numbered(8, 6)))
    assert spec.role == "gated_mlp_column"


def test_tasks_of_other_pipeline_stages_are_skipped() -> None:
    assert build(None, Task("w", AutoMapping("hf"), None)) == ()


class TestTied:
    def test_the_same_memory_is_published_once(self) -> None:
        weight = numbered(8, 3)
        tasks = (
            Task("embedding.word_embeddings.weight", AutoMapping("embed"), weight, VocabParallelEmbedding()),
            Task("output_layer.weight", AutoMapping("lm_head"), weight, ColumnParallelLinear()),
        )
        assert [s.hf_names for s in build(*tasks)] == [("embed",)]

    def test_the_copy_on_the_last_stage_is_not_published(self) -> None:
        config = SimpleNamespace(share_embeddings_and_output_weights=True)
        task = Task("output_layer.weight", AutoMapping("lm_head"), numbered(8, 3), ColumnParallelLinear())
        assert build(task, config=config) == ()
        assert len(build(task)) == 1


def test_a_padded_vocabulary_is_cut() -> None:
    config = SimpleNamespace(vocab_size=13)
    full = numbered(16, 3)
    ranks = []
    for rank in range(2):
        weight = full[8 * rank : 8 * rank + 8].clone()
        task = Task("output_layer.weight", AutoMapping("lm_head"), weight, ColumnParallelLinear())
        ranks.append(build_hf_aliases(build(task, config=config, tp=(2, rank)), "agent"))
    assert same_bytes(assemble(ranks)["lm_head"], full[:13])


def test_the_spec_holds_the_live_parameter() -> None:
    weight = torch.nn.Parameter(numbered(4, 3))
    assert one(Task("w", ColumnParallelMapping("hf"), weight)).tensor is weight


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (Task("w", RMSNorm2ZeroCenteredRMSNormMapping("hf"), numbered(4)), r"isn't known to be a plain view"),
        (Task("w", AutoMapping("hf", (1, 0)), numbered(4, 3)), r"permutes axes \(1, 0\)"),
        (Task("w", AutoMapping({"q": "hf"}), numbered(4)), r"must map to one Hugging Face name, got \{'q'"),
        (Task("w", QKVMapping("hf"), numbered(4)), r"must map to names under q, k, v, got 'hf'"),
        (Task("w", GatedMLPMapping({"gate": "g"}), numbered(4)), r"must map to names under gate, up"),
        (
            Task("w.experts.x", QKVMapping(QKV), numbered(4)),
            r"no layout is known for 3 names on shard axis 0",
        ),
        (Task("w", ColumnParallelMapping("hf"), torch.tensor(1.0)), r"can't be sharded on axis 0"),
    ],
)
def test_refusals_begin_with_the_name(task: Task, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^{task.param_name}: .*{problem}"):
        build(task)


@pytest.mark.parametrize("option", ["attention_output_gate"])
def test_layouts_without_a_view_are_refused(option: str) -> None:
    config = SimpleNamespace(num_attention_heads=8, num_query_groups=2, kv_channels=4, **{option: True})
    with pytest.raises(ValueError, match=rf"^qkv: {option}=True means"):
        build(Task("qkv", QKVMapping(QKV), numbered(24, 16)), config=config)


def test_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tensor_parallel_rank must lie in .* got rank 2 of size 2"):
        build(tp=(2, 2))
    with pytest.raises(ValueError, match=r"^expert_tensor_parallel_rank must lie in"):
        build(etp=(0, 0))
