"""One of two real Megatron ranks: trains, and dumps what its aliases show after every step.

Run by torchrun from `test_real.py`; writes `rank<N>.pt` into the folder that it is given.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.cli.demo.reference import reference_state_dict
from modelexpress_rl.train.engines.megatron import MegatronTrainerContext
from modelexpress_rl.train.engines.megatron.adapter import capture, resolve_specs, verify_unmoved
from modelexpress_rl.train.engines.megatron.aliases import HfTensor
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron, quiet
from tests.train.megatron.cases import CASES, MOE, SEED, STEPS, TOKENS, can_run


def dump(tensors: tuple[HfTensor, ...]) -> dict[str, Any]:
    return {
        tensor.name: {
            "full_shape": tensor.full_shape,
            "dtype": tensor.dtype,
            "boxes": [(shard.shard_offset, shard.view.clone()) for shard in tensor.shards],
        }
        for tensor in tensors
    }


def train(sizes: dict[str, Any]) -> dict[str, Any]:
    """Capture once, train, and look through the same views after every step."""
    model = demo.build_gpt(**sizes, seed=SEED)
    optimizer = demo.build_optimizer(model)
    captured = capture(resolve_specs(MegatronTrainerContext(model=model)), "agent")
    steps = []
    runs = can_run(sizes)
    for step in range(STEPS):
        loss = step_of(model, optimizer, step, runs)
        verify_unmoved(captured, resolve_specs(MegatronTrainerContext(), model))
        steps.append(
            {
                "loss": loss,
                "aliases": dump(captured.tensors),
                "reference": reference_state_dict(model),
                "logits": demo.logits(model, torch.tensor(TOKENS)) if runs else None,
            }
        )
    return {"slot": captured.source_slot_id, "steps": steps}


def step_of(model: Any, optimizer: torch.optim.Optimizer, step: int, runs: bool) -> float:
    if runs:
        return demo.train_step(model, optimizer, step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1 + step)
    return 0.0


def mixture_of_experts() -> dict[str, Any]:
    """A model with routed experts, TP 2 for what is dense and EP 2 for experts; built, not trained."""
    parallel_state = import_megatron("megatron.core.parallel_state")
    parallel_state.destroy_model_parallel()
    with quiet():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
        )
    transformer = import_megatron("megatron.core.transformer")
    gpt = import_megatron("megatron.core.models.gpt")
    layer_specs = import_megatron("megatron.core.models.gpt.gpt_layer_specs")
    torch.manual_seed(SEED + int(os.environ["RANK"]))
    with quiet():
        spec = layer_specs.get_gpt_layer_local_spec(
            num_experts=MOE["experts"], moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=True
        )
        spec.submodules.self_attention.submodules.core_attention = demo.TorchCoreAttention
        config = transformer.TransformerConfig(
            num_layers=1,
            hidden_size=MOE["hidden"],
            num_attention_heads=MOE["heads"],
            num_query_groups=MOE["kv_groups"],
            ffn_hidden_size=MOE["ffn"],
            moe_ffn_hidden_size=MOE["ffn"],
            num_moe_experts=MOE["experts"],
            moe_token_dispatcher_type="allgather",
            tensor_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
            sequence_parallel=False,
            gated_linear_unit=True,
            add_bias_linear=False,
            add_qkv_bias=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            cuda_graph_scope=[],
        )
        model = gpt.GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
    with torch.no_grad():
        for parameter in model.parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                continue
            parameter.copy_(torch.rand_like(parameter))
    captured = capture(resolve_specs(MegatronTrainerContext(model=model)), "agent")
    raw = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"aliases": dump(captured.tensors), "raw": raw}


def main() -> None:
    demo.initialize_parallel(tp_size=2)
    results: dict[str, Any] = {name: train(sizes) for name, sizes in CASES.items()}
    results["moe"] = mixture_of_experts()
    torch.save(results, Path(sys.argv[1]) / f"rank{os.environ['RANK']}.pt")
    demo.shutdown_parallel()


if __name__ == "__main__":
    main()
