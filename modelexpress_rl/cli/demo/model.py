"""A small Megatron-core GPT that really trains on a CPU, with tensor parallelism over gloo.

Grouped-query attention, gated MLP, RMSNorm, no biases, learned positions. Megatron's own attention core
and rotary embedding ask for a CUDA device, so that the attention core is torch's and positions are
learned. Megatron is imported when a function is called, not with this module.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron, quiet

BATCH_SIZE = 2
COLLECTIVE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GptShape:
    """The sizes of the model: `kv_groups` divides `heads`, `heads` divides `hidden`.

    Raises:
        UsageError: sizes that don't divide.
    """

    hidden: int = 64
    layers: int = 2
    heads: int = 8
    kv_groups: int = 2
    ffn: int = 128
    vocab: int = 256
    seq: int = 32

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise UsageError(f"hidden: {self.hidden} can't be divided among {self.heads} heads")
        if self.heads % self.kv_groups:
            raise UsageError(
                f"kv_groups: {self.heads} heads can't be divided among {self.kv_groups} KV groups"
            )

    @property
    def head_dim(self) -> int:
        """Rows of one head."""
        return self.hidden // self.heads


def initialize_parallel(tp_size: int | None = None, *, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
    """Join the gloo process group of torchrun's environment and make Megatron's parallel state.

    Also silences, in this process, two warnings that Megatron gives in every step on a CPU.

    `tp_size` is the world size by default; a smaller one leaves the rest to data parallelism. A
    collective that a rank misses fails after `timeout_s`.

    Raises:
        UsageError: megatron-core isn't installed.
    """
    parallel_state = import_megatron("megatron.core.parallel_state")
    _silence_training_advice()
    with quiet():
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp_size or dist.get_world_size(),
            distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        )


def shutdown_parallel() -> None:
    """Leave Megatron's parallel state and the process group, as far as they exist."""
    import_megatron("megatron.core.parallel_state").destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def build_gpt(
    hidden: int,
    layers: int,
    heads: int,
    kv_groups: int,
    ffn: int,
    vocab: int,
    seq: int,
    seed: int,
    tie: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """This rank's part of a `megatron.core` GPTModel on the CPU; parallel state must exist.

    The same seed gives the same global weights whatever the tensor-parallel size. With `tie` the output
    layer is the word embedding. With fewer `kv_groups` than ranks the model can be built but not run:
    Megatron's forward then gathers on a CUDA device.

    Raises:
        UsageError: megatron-core isn't installed, or sizes don't divide.
    """
    shape = GptShape(hidden, layers, heads, kv_groups, ffn, vocab, seq)
    gpt = import_megatron("megatron.core.models.gpt")
    torch.manual_seed(seed)
    with quiet():
        model = gpt.GPTModel(
            config=_transformer_config(shape, dtype),
            transformer_layer_spec=_layer_spec(),
            vocab_size=vocab,
            max_sequence_length=seq,
            share_embeddings_and_output_weights=tie,
            position_embedding_type="learned_absolute",
        )
    return model.to(dtype)


def _transformer_config(shape: GptShape, dtype: torch.dtype) -> Any:
    parallel_state = import_megatron("megatron.core.parallel_state")
    transformer = import_megatron("megatron.core.transformer")
    return transformer.TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        cuda_graph_scope=[],
    )


def _layer_spec() -> Any:
    layer_specs = import_megatron("megatron.core.models.gpt.gpt_layer_specs")
    spec = layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TorchCoreAttention
    return spec


class TorchCoreAttention(torch.nn.Module):
    """Causal attention of this rank's heads by torch's scaled_dot_product_attention.

    Queries, keys and values are (sequence, batch, heads, head_dim), with fewer heads in keys and values
    under grouped-query attention; the result is (sequence, batch, heads * head_dim).
    """

    def __init__(self, **_options: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _attention_mask: torch.Tensor | None,
        **_options: Any,
    ) -> torch.Tensor:
        """Attend; the mask is causal whatever is passed."""
        length, batch, heads, head_dim = query.shape
        repeat = heads // key.shape[2]
        out = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.repeat_interleave(repeat, dim=2).permute(1, 2, 0, 3),
            value.repeat_interleave(repeat, dim=2).permute(1, 2, 0, 3),
            is_causal=True,
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, heads * head_dim)


def build_optimizer(model: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW over the rank's parameters; by its weight decay every element changes in every step."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def tokens_of_step(vocab: int, seq: int, step: int) -> torch.Tensor:
    """The batch of a step, the same on every rank: (BATCH_SIZE, seq + 1) token ids.

    Every batch holds a pattern that can be learned: each token is its predecessor plus a constant.
    """
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocab, (BATCH_SIZE, 1), generator=generator)
    return (first + 3 * torch.arange(seq + 1)) % vocab


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Forward, backward and optimizer step on the batch of `step`; returns the mean loss.

    Collective over the tensor-parallel ranks. Replicated parameters stay equal on all of them, since
    their gradients are made of activations that the ranks have reduced.
    """
    tokens = tokens_of_step(model.vocab_size, model.max_sequence_length, step)
    optimizer.zero_grad(set_to_none=True)
    losses = model(tokens[:, :-1], _positions(tokens[:, :-1]), None, labels=tokens[:, 1:])
    loss = losses.float().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The model's logits for (batch, sequence) tokens, this rank's part of the vocabulary."""
    with torch.no_grad():
        out: torch.Tensor = model(tokens, _positions(tokens), None)
    return out


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def _silence_training_advice() -> None:
    """Hold back what Megatron says in every process that trains: nothing that the demo could change.

    For good, and not around each step: a step runs in a worker thread, and filters belong to the process.
    """
    for message in (r".*tp_group is None, using default tp group", r".*CUDA_DEVICE_MAX_CONNECTIONS to 1"):
        warnings.filterwarnings("ignore", message=message, module=r"megatron\.")
