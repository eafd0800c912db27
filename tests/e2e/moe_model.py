"""A mixture-of-experts Megatron GPT, trained in four processes: TP 4 for what is dense, EP 4 for experts.

The experts are Megatron's SequentialMLP: of the grouped ones, TEGroupedMLP needs Transformer Engine, and
the legacy GroupedMLP needs CUDA kernels, and keeps weights transposed, which has no zero-copy view.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron, quiet

RANKS = 4
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, EXPERTS, VOCAB, SEQ = 2, 64, 8, 4, 32, 8, 64, 16
HEAD_DIM = HIDDEN // HEADS
COLLECTIVE_TIMEOUT_S = 60


def _run_on_a_cpu() -> None:
    """Two lines of Megatron's router ask for CUDA although they don't need it."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    import_megatron("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    # Its dispatcher calls collectives by names that torch has newer ones for.
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use", category=FutureWarning)


def initialize(store: Path, rank: int) -> None:
    """Join the others through a file, and make Megatron's parallel state."""
    torch.set_num_threads(1)
    demo._silence_training_advice()
    _run_on_a_cpu()
    parallel_state = import_megatron("megatron.core.parallel_state")
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    with quiet():
        dist.init_process_group("gloo", f"file://{store}", timeout, RANKS, rank)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=RANKS, expert_model_parallel_size=RANKS, expert_tensor_parallel_size=1
        )


def build() -> Any:
    """This rank's part of the model.

    In evaluation mode, which changes nothing here but that Megatron would demand sequence parallelism for
    training, which its norm for CPUs lacks.
    """
    transformer = import_megatron("megatron.core.transformer")
    gpt = import_megatron("megatron.core.models.gpt")
    layer_specs = import_megatron("megatron.core.models.gpt.gpt_layer_specs")
    torch.manual_seed(17)
    with quiet():
        spec = layer_specs.get_gpt_layer_local_spec(
            num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm"
        )
        spec.submodules.self_attention.submodules.core_attention = demo.TorchCoreAttention
        config = transformer.TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_query_groups=KV_HEADS,
            ffn_hidden_size=FFN,
            moe_ffn_hidden_size=FFN,
            num_moe_experts=EXPERTS,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            tensor_model_parallel_size=RANKS,
            expert_model_parallel_size=RANKS,
            expert_tensor_parallel_size=1,
            sequence_parallel=False,
            gated_linear_unit=True,
            add_bias_linear=False,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            cuda_graph_scope=[],
        )
        model = gpt.GPTModel(config, spec, VOCAB, SEQ, position_embedding_type="learned_absolute")
    return model.eval()
