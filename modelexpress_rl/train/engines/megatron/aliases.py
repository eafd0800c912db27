"""Specs to zero-copy shards under Hugging Face names.

Every shard is a contiguous view of the rank's own tensor, so what is registered and read is the
training memory itself. A fused tensor gives one shard per piece that is contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelexpress_rl.train.engines.megatron import specs as sp
from modelexpress_rl.train.engines.megatron.qkv import qkv_layout, qkv_pieces
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec, fail

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class HfShard:
    """A box of one Hugging Face tensor in this rank's memory.

    `view` is contiguous, starts at address `addr` and keeps the memory alive; `shard_offset` and
    `shape` are in elements of the Hugging Face tensor. `device_id` is 0 on a CPU.
    """

    agent_name: str
    device_id: int
    addr: int
    shard_offset: tuple[int, ...]
    shape: tuple[int, ...]
    view: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HfTensor:
    """A Hugging Face tensor and the boxes of it that this rank holds, `elsize` bytes per element."""

    name: str
    dtype: str
    elsize: int
    full_shape: tuple[int, ...]
    shards: tuple[HfShard, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A view of a local tensor with the Hugging Face name, shape and offset that it has there."""

    hf_name: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: torch.Tensor


def build_hf_aliases(specs: Iterable[MegatronTensorSpec], agent_name: str) -> tuple[HfTensor, ...]:
    """Give the Hugging Face view of this rank's tensors, without a copy, in the order of the specs.

    Only names of which this rank holds elements appear: a rank with no rows of a K projection doesn't
    mention it. Replicated tensors are published as given, so that a caller passes them on
    tensor-parallel rank 0 only (`build_megatron_tensor_specs` does).

    Raises:
        UsageError: a spec is inconsistent, two specs have one name, or two claim one Hugging Face
            name; the message begins with the name of the Megatron tensor.
    """
    tensors: list[HfTensor] = []
    spec_names: set[str] = set()
    owner_of: dict[str, str] = {}
    for spec in specs:
        spec.validate()
        if spec.name in spec_names:
            fail(spec.name, "duplicate names: two specs have this name")
        spec_names.add(spec.name)
        for hf_name in spec.hf_names:
            if hf_name in owner_of:
                fail(spec.name, f"duplicate names: {hf_name} is already that of {owner_of[hf_name]}")
            owner_of[hf_name] = spec.name
        tensors.extend(_tensors_of(spec, agent_name))
    return tuple(tensors)


def _tensors_of(spec: MegatronTensorSpec, agent_name: str) -> Iterator[HfTensor]:
    by_name: dict[str, list[_Piece]] = {}
    for piece in _pieces_of(spec):
        by_name.setdefault(piece.hf_name, []).append(piece)
    for hf_name, pieces in by_name.items():
        yield HfTensor(
            name=hf_name,
            dtype=str(spec.tensor.dtype),
            elsize=spec.tensor.element_size(),
            full_shape=pieces[0].full_shape,
            shards=tuple(_shard(spec, piece, agent_name) for piece in pieces),
        )


def _shard(spec: MegatronTensorSpec, piece: _Piece, agent_name: str) -> HfShard:
    if not piece.view.is_contiguous():
        fail(
            spec.name,
            f"the view for {piece.hf_name} is not contiguous: shape {tuple(piece.view.shape)}, "
            f"strides {tuple(piece.view.stride())}",
        )
    return HfShard(
        agent_name=agent_name,
        device_id=piece.view.device.index or 0,
        addr=piece.view.data_ptr(),
        shard_offset=piece.offset,
        shape=tuple(piece.view.shape),
        view=piece.view,
    )


def _pieces_of(spec: MegatronTensorSpec) -> Iterator[_Piece]:
    if spec.role == sp.QKV_COLUMN:
        return _qkv(spec)
    if spec.role in (sp.EXPERT_COLUMN, sp.EXPERT_ROW) and sp.NUM_LOCAL_EXPERTS in spec.extras:
        return _grouped_experts(spec)
    if spec.role == sp.GATED_MLP_COLUMN:
        return _gated(spec)
    if spec.role == sp.EXPERT_COLUMN and (len(spec.hf_names) > 1 or sp.GATED_MLP_ORDER in spec.extras):
        return _gated(spec)
    return _plain(spec)


def _plain(spec: MegatronTensorSpec) -> Iterator[_Piece]:
    """The whole local tensor is one box, under each of its names."""
    if spec.role == sp.REPLICATED and spec.placement_kind != sp.REPLICATE:
        fail(spec.name, f"role {sp.REPLICATED} needs placement {sp.REPLICATE}, got {spec.placement_kind}")
    axis = spec.shard_axis
    offset = tuple(spec.start if i == axis else 0 for i in range(spec.tensor.dim()))
    full_shape, view = tuple(spec.global_shape), spec.tensor.detach()
    if sp.HF_ROWS in spec.extras:
        hf_rows = _hf_rows(spec)
        full_shape = (hf_rows, *full_shape[1:])
        view = view[: max(0, hf_rows - offset[0])]
    if view.numel():
        for hf_name in spec.hf_names:
            yield _Piece(hf_name, full_shape, offset, view)


def _hf_rows(spec: MegatronTensorSpec) -> int:
    hf_rows = spec.int_extra(sp.HF_ROWS)
    if not spec.global_shape or hf_rows > spec.global_shape[0]:
        fail(spec.name, f"extra {sp.HF_ROWS} {hf_rows} exceeds global_shape {tuple(spec.global_shape)}")
    return hf_rows


def _qkv(spec: MegatronTensorSpec) -> Iterator[_Piece]:
    if len(spec.hf_names) != 3:
        fail(spec.name, f"a fused QKV tensor needs the hf_names of q, k and v, got {tuple(spec.hf_names)}")
    _check_fused(spec, "QKV")
    layout = qkv_layout(spec)
    tail = tuple(spec.global_shape[1:])
    local = spec.tensor.detach()
    pieces = sorted(qkv_pieces(layout, spec.start, spec.start + local.shape[0]), key=lambda p: p.part)
    for piece in pieces:
        rows = layout.hf_rows(piece.part)
        view = local.narrow(0, piece.fused_row - spec.start, piece.row_count)
        offset = (piece.hf_row,) + (0,) * len(tail)
        yield _Piece(spec.hf_names[piece.part], (rows, *tail), offset, view)


def _check_fused(spec: MegatronTensorSpec, what: str) -> None:
    if not spec.global_shape:
        fail(spec.name, f"a fused {what} tensor has rows, this one has no axis")
    if spec.shard_axis not in (None, 0):
        fail(spec.name, f"a fused {what} tensor is sharded on axis 0, got shard_axis {spec.shard_axis}")


def _gated(spec: MegatronTensorSpec) -> Iterator[_Piece]:
    """A fused [gate; up] tensor: under tensor parallelism each rank holds [its gate; its up]."""
    _check_fused(spec, "gate/up")
    yield from _halves(spec, spec.hf_names, spec.tensor.detach(), tuple(spec.global_shape), spec.start)


def _halves(
    spec: MegatronTensorSpec,
    hf_names: Iterable[str],
    local: torch.Tensor,
    fused_shape: tuple[int, ...],
    start: int,
) -> Iterator[_Piece]:
    names = tuple(hf_names)
    if len(names) != 2:
        fail(spec.name, f"a fused gate/up tensor needs the hf_names of gate and up, got {names}")
    order = spec.extras.get(sp.GATED_MLP_ORDER)
    if order != "gate_then_up":
        fail(spec.name, f"extra {sp.GATED_MLP_ORDER} must be gate_then_up, got {order!r}")
    if fused_shape[0] % 2 or local.shape[0] % 2 or start % 2:
        fail(
            spec.name,
            f"a fused gate/up tensor halves on axis 0: global {fused_shape[0]}, local {local.shape[0]} "
            f"and start {start} must be even",
        )
    half = local.shape[0] // 2
    full_shape = (fused_shape[0] // 2, *fused_shape[1:])
    offset = (start // 2,) + (0,) * (local.dim() - 1)
    for index, hf_name in enumerate(names):
        yield _Piece(hf_name, full_shape, offset, local.narrow(0, index * half, half))


def _grouped_experts(spec: MegatronTensorSpec) -> Iterator[_Piece]:
    """A tensor whose axis 0 counts this rank's experts: each expert is a tensor of its own."""
    experts = spec.int_extra(sp.NUM_LOCAL_EXPERTS)
    if spec.tensor.dim() < 2 or spec.tensor.shape[0] != experts:
        fail(
            spec.name,
            f"extra {sp.NUM_LOCAL_EXPERTS} {experts} must be the extent of axis 0, "
            f"the local tensor is {tuple(spec.tensor.shape)}",
        )
    if spec.shard_axis == 0:
        fail(spec.name, "grouped experts are named one by one and can't be sharded on axis 0 as well")
    gated = sp.GATED_MLP_ORDER in spec.extras
    if gated and spec.role != sp.EXPERT_COLUMN:
        fail(spec.name, f"extra {sp.GATED_MLP_ORDER} belongs to {sp.EXPERT_COLUMN}, the role is {spec.role}")
    per_expert = 2 if gated else 1
    if len(spec.hf_names) != per_expert * experts:
        fail(
            spec.name,
            f"{experts} experts need {per_expert * experts} hf_names ({per_expert} each), "
            f"got {len(spec.hf_names)}",
        )
    if gated and spec.shard_axis not in (None, 1):
        fail(spec.name, f"grouped gate/up experts are sharded on axis 1, got shard_axis {spec.shard_axis}")
    one_shape = tuple(spec.global_shape[1:])
    for expert in range(experts):
        names = spec.hf_names[expert * per_expert : (expert + 1) * per_expert]
        local = spec.tensor.detach()[expert]
        if gated:
            yield from _halves(spec, names, local, one_shape, spec.start)
        else:
            offset = tuple(spec.start if i + 1 == spec.shard_axis else 0 for i in range(local.dim()))
            yield _Piece(names[0], one_shape, offset, local)
