"""The rows of a fused QKV tensor, and what a rank's row interval of it means for q, k and v.

Megatron lays the rows per KV group: that group's q rows, then its k head, then its v head. A rank
holds an interval of rows that knows nothing of groups or heads: with fewer KV heads than ranks it
cuts through a group, and even through a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modelexpress_rl.train.engines.megatron.specs import QKV_INTERLEAVE, SHARD, MegatronTensorSpec, fail

_GLOBAL_EXTRAS = (QKV_INTERLEAVE, "head_dim", "num_heads", "num_kv_heads")
_LOCAL_EXTRAS = ("head_dim", "num_heads_local", "num_kv_heads_local")

Q, K, V = 0, 1, 2


@dataclass(frozen=True, slots=True)
class QkvLayout:
    """Head counts of the whole model, and rows per head."""

    head_dim: int
    num_heads: int
    num_kv_heads: int

    @property
    def rows_per_group(self) -> tuple[int, int, int]:
        """Rows of q, k and v in one KV group."""
        return (self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim, self.head_dim)

    @property
    def fused_rows(self) -> int:
        """Rows of the whole fused tensor."""
        return self.num_kv_heads * sum(self.rows_per_group)

    def hf_rows(self, part: int) -> int:
        """Rows of the whole q, k or v tensor."""
        return self.num_kv_heads * self.rows_per_group[part]


@dataclass(frozen=True, slots=True)
class QkvPiece:
    """`row_count` rows that are contiguous both in the fused tensor and in q, k or v (`part`)."""

    part: int
    hf_row: int
    fused_row: int
    row_count: int


def qkv_pieces(layout: QkvLayout, start: int, stop: int) -> Iterator[QkvPiece]:
    """The pieces of q, k and v inside rows [start, stop) of the fused tensor, in row order."""
    group_rows = sum(layout.rows_per_group)
    for group in range(start // group_rows, -(-stop // group_rows)):
        part_start = group * group_rows
        for part, part_rows in enumerate(layout.rows_per_group):
            first, last = max(start, part_start), min(stop, part_start + part_rows)
            if first < last:
                yield QkvPiece(part, group * part_rows + first - part_start, first, last - first)
            part_start += part_rows


def qkv_layout(spec: MegatronTensorSpec) -> QkvLayout:
    """Read the head counts from the extras, global ones if there are any, else the older local ones.

    Raises:
        UsageError: extras are missing (the message lists them), don't divide, or don't give the rows
            of `global_shape`.
    """
    interleave = spec.extras.get(QKV_INTERLEAVE)
    if interleave not in (None, "by_head"):
        fail(spec.name, f"extra {QKV_INTERLEAVE} must be by_head, got {interleave!r}")
    if "num_heads" not in spec.extras and "num_kv_heads" not in spec.extras:
        older = [key for key in _LOCAL_EXTRAS if key not in spec.extras]
        if not older:
            return _from_local(spec)
    missing = [key for key in _GLOBAL_EXTRAS if key not in spec.extras]
    if missing:
        fail(
            spec.name,
            f"missing QKV extras {', '.join(missing)}: expected {', '.join(_GLOBAL_EXTRAS)}, "
            f"or the older {', '.join(_LOCAL_EXTRAS)}; got {', '.join(sorted(spec.extras)) or 'none'}",
        )
    layout = QkvLayout(
        spec.int_extra("head_dim"), spec.int_extra("num_heads"), spec.int_extra("num_kv_heads")
    )
    _check_rows(spec, layout)
    return layout


def _from_local(spec: MegatronTensorSpec) -> QkvLayout:
    """The older extras count this rank's heads: it holds whole groups, as every other rank does."""
    shards = spec.global_shape[0] // spec.tensor.shape[0] if spec.placement_kind == SHARD else 1
    layout = QkvLayout(
        spec.int_extra("head_dim"),
        spec.int_extra("num_heads_local") * shards,
        spec.int_extra("num_kv_heads_local") * shards,
    )
    _check_rows(spec, layout)
    return layout


def _check_rows(spec: MegatronTensorSpec, layout: QkvLayout) -> None:
    if layout.num_heads % layout.num_kv_heads:
        fail(
            spec.name,
            f"{layout.num_heads} query heads can't be divided among {layout.num_kv_heads} KV heads",
        )
    if layout.fused_rows != spec.global_shape[0]:
        fail(
            spec.name,
            f"{layout.num_heads} query and {layout.num_kv_heads} KV heads of {layout.head_dim} rows make "
            f"{layout.fused_rows} fused rows, global_shape is {tuple(spec.global_shape)}",
        )
