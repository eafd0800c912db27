"""Specs from a model's own parameters: names, layer and expert numbers, wrappers. The model is a stand-in
with Megatron's attributes; `test_real.py` has real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from modelexpress_rl.train.engines.megatron import (
    build_hf_aliases,
    build_megatron_tensor_specs_from_model,
)
from modelexpress_rl.train.engines.megatron.hf_naming import llama_names, resolve_naming

CONFIG = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 2,
    "hidden_size": 8,
    "gated_linear_unit": True,
}


def leaf(axis: int | None, *shape: int, name: str = "weight") -> nn.Module:
    module = nn.Module()
    add(module, name, axis, *shape)
    return module


def add(module: nn.Module, name: str, axis: int | None, *shape: int) -> None:
    parameter = nn.Parameter(torch.rand(shape))
    if axis is not None:
        parameter.tensor_model_parallel, parameter.partition_dim = True, axis  # type: ignore[attr-defined]
    module.register_parameter(name, parameter)


def tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def layer(number: int, mlp: nn.Module | None = None) -> nn.Module:
    attention = tree(linear_qkv=leaf(0, 8, 8), linear_proj=leaf(1, 8, 4), q_layernorm=leaf(None, 2))
    dense = tree(linear_fc1=leaf(0, 12, 8), linear_fc2=leaf(1, 8, 6))
    module = tree(input_layernorm=leaf(None, 8), self_attention=attention, mlp=mlp or dense)
    module.layer_number = number  # type: ignore[assignment]
    return module


def model(*layers: nn.Module, config: dict[str, Any] | None = None, **top: nn.Module) -> Any:
    decoder = tree(layers=nn.ModuleList(layers))
    whole: Any = tree(decoder=decoder, **top)
    whole.config = SimpleNamespace(**(CONFIG | (config or {})))
    return whole


def specs_of(source: Any, tp: tuple[int, int] = (2, 0), etp: tuple[int, int] = (1, 0), **options: Any):
    specs = build_megatron_tensor_specs_from_model(
        source,
        tensor_parallel_size=tp[0],
        tensor_parallel_rank=tp[1],
        expert_tensor_parallel_size=etp[0],
        expert_tensor_parallel_rank=etp[1],
        **options,
    )
    build_hf_aliases(specs, "agent")
    return {spec.name: spec for spec in specs}


def test_layers_of_a_later_stage_are_numbered_globally() -> None:
    specs = specs_of(model(layer(5)))
    assert set(specs) == {
        f"decoder.layers.4.{name}.weight"
        for name in (
            "input_layernorm",
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "self_attention.q_layernorm",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    }
    assert specs["decoder.layers.4.self_attention.linear_qkv.weight"].hf_names == (
        "model.layers.4.self_attn.q_proj.weight",
        "model.layers.4.self_attn.k_proj.weight",
        "model.layers.4.self_attn.v_proj.weight",
    )


def test_virtual_stages_and_wrappers() -> None:
    wrapped = SimpleNamespace(module=SimpleNamespace(module=model(layer(1))))
    names = specs_of([wrapped, model(layer(3))], tp=(2, 1))
    assert {n.split(".")[2] for n in names} == {"0", "2"}
    assert not any("norm" in n for n in names)


def test_fused_norms_of_transformer_engine() -> None:
    one = layer(1)
    add(one.self_attention.linear_qkv, "layer_norm_weight", None, 8)
    add(one.mlp.linear_fc1, "layer_norm_weight", None, 8)
    del one.input_layernorm
    specs = specs_of(model(one))
    assert specs["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"].hf_names == (
        "model.layers.0.input_layernorm.weight",
    )
    assert specs["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"].hf_names == (
        "model.layers.0.post_attention_layernorm.weight",
    )


def moe(experts: nn.Module) -> nn.Module:
    shared = tree(linear_fc1=leaf(0, 12, 8), linear_fc2=leaf(1, 8, 6))
    add(shared, "gate_weight", None, 1, 8)
    module = tree(router=leaf(None, 4, 8), experts=experts, shared_experts=shared)
    module.local_expert_indices = [2, 3]  # type: ignore[assignment]
    return module


def test_sequential_experts() -> None:
    local = nn.ModuleList(tree(linear_fc1=leaf(0, 4, 8), linear_fc2=leaf(1, 8, 2)) for _ in range(2))
    specs = specs_of(model(layer(1, moe(tree(local_experts=local)))), tp=(2, 0), etp=(2, 1))
    fc1 = specs["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert (fc1.role, fc1.global_shape, fc1.local_shard_range) == ("expert_column", (8, 8), (4, 8))
    assert fc1.hf_names == tuple(f"model.layers.0.mlp.experts.3.{p}_proj.weight" for p in ("gate", "up"))
    fc2 = specs["decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"]
    assert (fc2.role, fc2.global_shape, fc2.shard_axis) == ("expert_row", (8, 4), 1)
    assert specs["decoder.layers.0.mlp.router.weight"].hf_names == ("model.layers.0.mlp.gate.weight",)
    assert specs["decoder.layers.0.mlp.shared_experts.gate_weight"].hf_names == (
        "model.layers.0.mlp.shared_expert_gate.weight",
    )
    assert specs["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"].role == "gated_mlp_column"


def test_grouped_experts_of_transformer_engine() -> None:
    fc1, fc2 = nn.Module(), nn.Module()
    for expert in range(2):
        add(fc1, f"weight{expert}", None, 4, 8)
        add(fc2, f"weight{expert}", None, 8, 2)
    specs = specs_of(model(layer(1, moe(tree(linear_fc1=fc1, linear_fc2=fc2)))))
    fc1_of_3 = specs["decoder.layers.0.mlp.experts.linear_fc1.weight3"]
    assert (fc1_of_3.role, fc1_of_3.global_shape) == ("expert_column", (4, 8))
    assert fc1_of_3.hf_names[1] == "model.layers.0.mlp.experts.3.up_proj.weight"
    assert specs["decoder.layers.0.mlp.experts.linear_fc2.weight2"].role == "expert_row"


def test_legacy_grouped_experts_are_refused_by_name() -> None:
    experts = leaf(None, 8, 16, name="weight1")
    with pytest.raises(ValueError, match=r"^decoder\.layers\.0\.mlp\.experts\.weight1: the legacy grouped"):
        specs_of(model(layer(1, moe(experts))))


class TestTied:
    def test_a_shared_parameter_is_published_once(self) -> None:
        embedding = tree(word_embeddings=leaf(0, 8, 8))
        tied: Any = model(embedding=embedding, output_layer=nn.Module())
        tied.output_layer.weight = embedding.word_embeddings.weight
        assert list(specs_of(tied)) == ["embedding.word_embeddings.weight"]

    def test_the_copy_on_the_last_stage_is_left_out(self) -> None:
        last = model(output_layer=leaf(0, 8, 8))
        assert list(specs_of(last)) == ["output_layer.weight"]
        last.share_embeddings_and_output_weights = True
        assert specs_of(last) == {}


def test_the_spec_holds_the_live_parameter() -> None:
    one = model(layer(1))
    specs = specs_of(one)
    assert (
        specs["decoder.layers.0.mlp.linear_fc2.weight"].tensor is one.decoder.layers[0].mlp.linear_fc2.weight
    )


def test_an_own_naming() -> None:
    specs = specs_of(model(layer(1)), hf_naming=lambda name: tuple(f"my/{n}" for n in llama_names(name)))
    assert specs["decoder.layers.0.mlp.linear_fc2.weight"].hf_names == (
        "my/model.layers.0.mlp.down_proj.weight",
    )


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hf_naming must be one of llama, qwen or a function, got 'gpt2'"):
        resolve_naming("gpt2")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"gated_linear_unit": False}, r"linear_fc1.weight: is named as a fused gate/up .* isn't gated"),
        ({"layernorm_zero_centered_gamma": True}, r"input_layernorm.weight: layernorm_zero_centered_gamma"),
        ({"moe_mlp_glu_interleave_size": 32}, r"linear_fc1.weight: moe_mlp_glu_interleave_size=32 means"),
    ],
)
def test_configurations_without_a_view_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        specs_of(model(layer(1), config=change))


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^mtp\.weight: no Hugging Face name in the llama style"):
        specs_of(model(mtp=leaf(None, 2)))


def test_one_name_for_a_fused_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"linear_fc1.weight: is a fused gate/up and needs two"):
        specs_of(model(layer(1)), hf_naming=lambda name: llama_names(name)[:1])


def test_a_parameter_that_megatron_did_not_shard_as_its_name_says_is_refused() -> None:
    odd = model(output_layer=leaf(None, 8, 8))
    with pytest.raises(
        ValueError, match=r"^output_layer\.weight: expected tensor-parallel axis 0 .* says None"
    ):
        specs_of(odd)
    assert list(specs_of(odd, tp=(1, 0))) == ["output_layer.weight"]
