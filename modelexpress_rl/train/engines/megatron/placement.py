"""Where a rank's part of a tensor lies under tensor and expert tensor parallelism: specs from shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.megatron import specs as sp
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec, fail

if TYPE_CHECKING:
    import torch

_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """This rank's place: tensor parallelism for dense tensors, expert tensor parallelism for experts.

    Raises:
        UsageError: a rank isn't below its size.
    """

    tp_size: int
    tp_rank: int
    etp_size: int = 1
    etp_rank: int = 0

    def __post_init__(self) -> None:
        _check_rank("tensor_parallel", self.tp_size, self.tp_rank)
        _check_rank("expert_tensor_parallel", self.etp_size, self.etp_rank)

    def of(self, name: str) -> tuple[int, int]:
        """Size and rank of the group that shards the tensor of this Megatron name."""
        return (self.etp_size, self.etp_rank) if is_expert(name) else (self.tp_size, self.tp_rank)


def _check_rank(what: str, size: int, rank: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise UsageError(f"{what}_rank must lie in 0 to {what}_size - 1, got rank {rank} of size {size}")


def is_expert(name: str) -> bool:
    """Whether the tensor belongs to a routed expert, which expert parallelism places."""
    return ".experts." in name


def spec_of(
    name: str,
    tensor: torch.Tensor,
    axis: int | None,
    hf_names: Sequence[str],
    ranks: ParallelRanks,
    config: Any,
) -> MegatronTensorSpec | None:
    """The spec of a tensor that is sharded on `axis`, or replicated where `axis` is None.

    The number of names says whether it is fused. None where this rank isn't the one that publishes it:
    replicated tensors are rank 0's.

    Raises:
        UsageError: the count of names fits no layout of such a tensor; it begins with the name.
    """
    size, rank = ranks.of(name)
    if axis is None:
        if rank != 0:
            return None
        return MegatronTensorSpec(name, tensor, sp.REPLICATED, tuple(hf_names), tuple(tensor.shape))
    if axis >= tensor.dim():
        fail(name, f"can't be sharded on axis {axis}, the local tensor is {tuple(tensor.shape)}")
    role, extras = _role_and_extras(name, axis, hf_names, config)
    extent = tensor.shape[axis]
    global_shape = tuple(n * size if i == axis else n for i, n in enumerate(tensor.shape))
    if _VOCABULARY.search(name):
        extras |= _unpadded(global_shape[0], config)
    return MegatronTensorSpec(
        name=name,
        tensor=tensor,
        role=role,
        hf_names=tuple(hf_names),
        global_shape=global_shape,
        placement_kind=sp.SHARD,
        shard_axis=axis,
        local_shard_range=(rank * extent, (rank + 1) * extent),
        extras=extras,
    )


def _role_and_extras(
    name: str, axis: int, hf_names: Sequence[str], config: Any
) -> tuple[str, dict[str, object]]:
    expert = is_expert(name)
    if axis == 1 and len(hf_names) == 1:
        return (sp.EXPERT_ROW if expert else sp.ROW), {}
    if axis == 0 and len(hf_names) == 1:
        return (sp.EXPERT_COLUMN if expert else sp.COLUMN), {}
    if axis == 0 and len(hf_names) == 2:
        _refuse(name, config, "moe_mlp_glu_interleave_size", "interleaved gate/up rows")
        return (sp.EXPERT_COLUMN if expert else sp.GATED_MLP_COLUMN), {sp.GATED_MLP_ORDER: "gate_then_up"}
    if axis == 0 and len(hf_names) == 3 and not expert:
        return sp.QKV_COLUMN, dict(qkv_extras(name, config))
    return fail(name, f"no layout is known for {len(hf_names)} names on shard axis {axis}: {tuple(hf_names)}")


def qkv_extras(name: str, config: Any) -> Mapping[str, object]:
    """The global head counts of a Megatron `TransformerConfig`, as the extras of a fused QKV tensor.

    Raises:
        UsageError: the config's attention has a fused layout that isn't q, k, v by KV group.
    """
    _refuse(name, config, "attention_output_gate", "an output gate inside the fused QKV")
    heads = config.num_attention_heads
    return {
        sp.QKV_INTERLEAVE: "by_head",
        "head_dim": config.kv_channels or config.hidden_size // heads,
        "num_heads": heads,
        "num_kv_heads": config.num_query_groups or heads,
    }


def _refuse(name: str, config: Any, option: str, meaning: str) -> None:
    value = getattr(config, option, None)
    if isinstance(value, bool | int) and value:
        fail(name, f"{option}={value} means {meaning}, which has no zero-copy Hugging Face view")


def _unpadded(global_rows: int, config: Any) -> dict[str, object]:
    """Megatron pads the vocabulary so that ranks divide it; Hugging Face has the true size."""
    vocab_size = getattr(config, "vocab_size", None)
    if isinstance(vocab_size, int) and 0 < vocab_size < global_rows:
        return {sp.HF_ROWS: vocab_size}
    return {}
