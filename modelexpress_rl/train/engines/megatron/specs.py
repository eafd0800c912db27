"""What a rank says about each of its Megatron tensors: where it lies in the global tensor, and its
Hugging Face names.

A spec is a claim about layout, nothing is copied. `validate` checks everything that can be checked
without knowing the role; `aliases` checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from modelexpress_rl.errors import UsageError

if TYPE_CHECKING:
    import torch

QKV_COLUMN = "qkv_column"
GATED_MLP_COLUMN = "gated_mlp_column"
COLUMN = "column"
ROW = "row"
REPLICATED = "replicated"
EXPERT_COLUMN = "expert_column"
EXPERT_ROW = "expert_row"
ROLES = frozenset({QKV_COLUMN, GATED_MLP_COLUMN, COLUMN, ROW, REPLICATED, EXPERT_COLUMN, EXPERT_ROW})

SHARD = "SHARD"
REPLICATE = "REPLICATE"

# Extras that name a layout, and those that carry a number.
QKV_INTERLEAVE = "qkv_interleave"
GATED_MLP_ORDER = "gated_mlp_order"
NUM_LOCAL_EXPERTS = "num_local_experts"
HF_ROWS = "hf_rows"


def fail(name: str, problem: str) -> NoReturn:
    """Raise the `UsageError` that begins with the tensor's name."""
    raise UsageError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True, eq=False)
class MegatronTensorSpec:
    """One Megatron tensor of this rank, with its place in the global tensor.

    `name` is the tensor's global Megatron name (layers and experts numbered globally). `tensor` is the
    live parameter itself, so that a storage that moves is seen. `hf_names` are
    (q, k, v) for `qkv_column`, (gate, up) for a gated MLP, one name otherwise; further names of a
    `column`, `row` or `replicated` tensor are further aliases of the same memory. `global_shape` is
    the shape of the whole *Megatron* tensor, fused ones included. With placement SHARD this rank
    holds elements `local_shard_range` = (start, stop) of axis `shard_axis`; for a fused gate/up, which
    is cut in each half, the range counts rows of the two halves together. With REPLICATE it holds
    everything.

    Extras: `qkv_interleave` ("by_head"), `head_dim`, `num_heads`, `num_kv_heads` (or the older
    `head_dim`, `num_heads_local`, `num_kv_heads_local`); `gated_mlp_order` ("gate_then_up");
    `num_local_experts` for a tensor whose axis 0 counts this rank's experts, whose `hf_names` are then
    those of expert 0, expert 1, ...; `hf_rows` where Megatron pads axis 0 (a vocabulary) beyond the
    rows that the Hugging Face tensor has.

    Nothing is checked on construction: `validate`, and `build_hf_aliases`, which calls it, do.
    """

    name: str
    tensor: torch.Tensor
    role: str
    hf_names: Sequence[str]
    global_shape: Sequence[int]
    placement_kind: str = REPLICATE
    shard_axis: int | None = None
    local_shard_range: Sequence[int] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """First element of the shard axis that this rank holds; 0 for a whole tensor."""
        return 0 if self.local_shard_range is None else self.local_shard_range[0]

    def validate(self) -> None:
        """Check names, placement and that the local shape is what the placement says.

        Raises:
            UsageError: what was expected and what came; it begins with the tensor's name.
        """
        _check_names(self)
        _check_global_shape(self)
        if self.placement_kind == REPLICATE:
            _check_replicated(self)
        elif self.placement_kind == SHARD:
            _check_sharded(self)
        else:
            fail(self.name, f"placement_kind must be {SHARD} or {REPLICATE}, got {self.placement_kind!r}")

    def int_extra(self, key: str, *, minimum: int = 1) -> int:
        """The whole number under `key` of the extras (a decimal string is accepted).

        Raises:
            UsageError: it is missing, not a whole number, or below `minimum`.
        """
        value = self.extras.get(key)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            fail(self.name, f"extra {key} must be a whole number of at least {minimum}, got {value!r}")
        return value


def _check_names(spec: MegatronTensorSpec) -> None:
    if not spec.name.strip():
        raise UsageError(f"{spec.name!r}: a Megatron tensor needs a name; its hf_names are {spec.hf_names!r}")
    if spec.role not in ROLES:
        fail(spec.name, f"role must be one of {', '.join(sorted(ROLES))}, got {spec.role!r}")
    if isinstance(spec.hf_names, str):
        fail(spec.name, f"hf_names must be a sequence of names, got the string {spec.hf_names!r}")
    if not spec.hf_names or any(not isinstance(n, str) or not n.strip() for n in spec.hf_names):
        fail(spec.name, f"hf_names must be non-blank names, got {tuple(spec.hf_names)!r}")
    if len(set(spec.hf_names)) != len(spec.hf_names):
        fail(spec.name, f"duplicate names in hf_names {tuple(spec.hf_names)!r}")


def _check_global_shape(spec: MegatronTensorSpec) -> None:
    if any(extent < 1 for extent in spec.global_shape):
        fail(spec.name, f"global_shape must be positive on every axis, got {tuple(spec.global_shape)}")
    if len(spec.global_shape) != spec.tensor.dim():
        fail(
            spec.name,
            f"global_shape {tuple(spec.global_shape)} has {len(spec.global_shape)} axes, "
            f"the local tensor {tuple(spec.tensor.shape)} has {spec.tensor.dim()}",
        )


def _check_replicated(spec: MegatronTensorSpec) -> None:
    if spec.shard_axis is not None or spec.local_shard_range is not None:
        fail(
            spec.name,
            f"placement {REPLICATE} takes no shard_axis and no local_shard_range, "
            f"got {spec.shard_axis} and {spec.local_shard_range}",
        )
    if tuple(spec.tensor.shape) != tuple(spec.global_shape):
        fail(
            spec.name,
            f"a replicated tensor must have its global_shape {tuple(spec.global_shape)}, "
            f"the local tensor is {tuple(spec.tensor.shape)}",
        )


def _check_sharded(spec: MegatronTensorSpec) -> None:
    axis, span = spec.shard_axis, spec.local_shard_range
    if axis is None or not 0 <= axis < len(spec.global_shape):
        fail(
            spec.name,
            f"placement {SHARD} needs a shard_axis from 0 to {len(spec.global_shape) - 1}, got {axis}",
        )
    if span is None or len(span) != 2:
        fail(spec.name, f"placement {SHARD} needs local_shard_range (start, stop), got {span!r}")
    start, stop = span
    extent = spec.global_shape[axis]
    if not 0 <= start < stop <= extent:
        fail(
            spec.name,
            f"local_shard_range ({start}, {stop}) lies outside the global extent {extent} of axis {axis}",
        )
    if extent % (stop - start) or start % (stop - start):
        fail(
            spec.name,
            f"uneven shard: rows ({start}, {stop}) are not one of equal shards of axis {axis}, "
            f"whose global extent is {extent}",
        )
    expected = tuple(stop - start if i == axis else extent for i, extent in enumerate(spec.global_shape))
    if tuple(spec.tensor.shape) != expected:
        fail(
            spec.name,
            f"the local tensor must be {expected} by global_shape {tuple(spec.global_shape)} and range "
            f"({start}, {stop}) of axis {axis}, got {tuple(spec.tensor.shape)}",
        )
