"""Two real Megatron-core ranks on gloo: what their aliases show, put together, is the reference.

The aliases are made once, before training, so that equality after every step also proves that they are
views of the memory that trains.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexpress_rl.cli.demo.generator_model import GeneratorModel, GeneratorShape, expected_parameters
from tests.train.megatron.cases import CASES, MOE, STEPS, TOKENS, can_run
from tests.train.megatron.support import same_bytes

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core isn't installed"),
]

ROOT = Path(__file__).parents[3]
RUN_TIMEOUT_S = 150


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The dumps of both ranks, which ended well and gave no warning."""
    folder = tmp_path_factory.mktemp("megatron")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.train.megatron.real_rank", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assemble(dumps: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    full: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for aliases in dumps:
        for name, tensor in aliases.items():
            for offset, view in tensor["boxes"]:
                box = tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))
                full.setdefault(name, torch.zeros(tensor["full_shape"], dtype=view.dtype))[box] = view
                seen.setdefault(name, torch.zeros(tensor["full_shape"]))[box] += 1
    assert all(bool((count == 1).all()) for count in seen.values())
    return full


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("case", CASES)
def test_aliases_of_both_ranks_are_the_reference(ranks: list[dict[str, Any]], case: str, step: int) -> None:
    reference = ranks[0][case]["steps"][step]["reference"]
    full = assemble([rank[case]["steps"][step]["aliases"] for rank in ranks])
    assert set(full) == set(reference)
    assert all(same_bytes(full[name], reference[name]) for name in reference)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_changes_in_a_step(ranks: list[dict[str, Any]], case: str) -> None:
    before, after = (step["reference"] for step in ranks[0][case]["steps"])
    assert [name for name in before if same_bytes(before[name], after[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_different_partitions_and_agree_on_the_loss(
    ranks: list[dict[str, Any]], case: str
) -> None:
    assert ranks[0][case]["slot"] != ranks[1][case]["slot"]
    assert [s["loss"] for s in ranks[0][case]["steps"]] == [s["loss"] for s in ranks[1][case]["steps"]]


def test_tied_embeddings_are_published_under_one_name(ranks: list[dict[str, Any]]) -> None:
    names = set(ranks[0]["tied-bf16"]["steps"][0]["aliases"])
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in ranks[0]["grouped"]["steps"][0]["aliases"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", [name for name, sizes in CASES.items() if can_run(sizes)])
def test_a_generator_with_these_weights_computes_the_same_logits(
    ranks: list[dict[str, Any]], case: str, fused: bool
) -> None:
    sizes = {key: value for key, value in CASES[case].items() if key not in ("kv_groups", "dtype")}
    shape = GeneratorShape(**sizes, kv_heads=CASES[case]["kv_groups"], fused=fused)
    reference = ranks[0][case]["steps"][-1]["reference"]
    generator = GeneratorModel(shape, dtype=CASES[case].get("dtype", torch.float32))
    generator.load_state_dict(expected_parameters(shape, reference), strict=not shape.tie)
    trainer = torch.cat([rank[case]["steps"][-1]["logits"] for rank in ranks], dim=-1)
    tolerance = 3e-2 if trainer.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(generator(torch.tensor(TOKENS)), trainer, rtol=tolerance, atol=tolerance)


def test_experts_are_named_over_expert_ranks(ranks: list[dict[str, Any]]) -> None:
    """TP 2 for dense tensors, EP 2 for experts: fc1 halves are whole, attention is cut by rank."""
    full = assemble([rank["moe"]["aliases"] for rank in ranks])
    raw = [rank["moe"]["raw"] for rank in ranks]
    layer, hf = "decoder.layers.0.", "model.layers.0."
    for expert in range(MOE["experts"]):
        local = f"{layer}mlp.experts.local_experts.{expert % 2}."
        gate, up = raw[expert // 2][f"{local}linear_fc1.weight"].chunk(2)
        down = raw[expert // 2][f"{local}linear_fc2.weight"]
        prefix = f"{hf}mlp.experts.{expert}."
        assert same_bytes(full[f"{prefix}gate_proj.weight"], gate)
        assert same_bytes(full[f"{prefix}up_proj.weight"], up)
        assert same_bytes(full[f"{prefix}down_proj.weight"], down)
    assert same_bytes(full[f"{hf}mlp.gate.weight"], raw[0][f"{layer}mlp.router.weight"])
    assert same_bytes(
        full[f"{hf}self_attn.q_norm.weight"], raw[0][f"{layer}self_attention.q_layernorm.weight"]
    )
    fused_bias = torch.cat([r[f"{layer}self_attention.linear_qkv.bias"] for r in raw])
    by_group = fused_bias.view(MOE["kv_groups"], MOE["heads"] // MOE["kv_groups"] + 2, -1)
    assert same_bytes(full[f"{hf}self_attn.q_proj.bias"], by_group[:, :-2].flatten())
    assert same_bytes(full[f"{hf}self_attn.k_proj.bias"], by_group[:, -2].flatten())
    assert same_bytes(full[f"{hf}self_attn.v_proj.bias"], by_group[:, -1].flatten())
