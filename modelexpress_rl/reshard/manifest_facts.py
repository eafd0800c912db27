"""What a manifest's table says, each thing once: few kinds of tensors and few boxes make up a model.

Both encodings of a manifest are written from this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from modelexpress_rl.reshard.columns import distinct_rows
from modelexpress_rl.reshard.geometry import Int, ShardTable


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Kinds (dtype, rank and global shape of tensors) and boxes (of one kind), and who has which.

    `kind` is of each tensor, `shards` how many it has; `box` is of each shard, tensor by tensor: shard i
    is row `order[i]` of the table. Coordinates have as many columns as the highest rank, at least one,
    and are padded in front.
    """

    dtypes: tuple[str, ...]
    kind_dtype: Int
    kind_rank: Int
    kind_shape: Int
    kind: Int
    shards: Int
    box_kind: Int
    box_offset: Int
    box_shape: Int
    box: Int
    order: Int

    @property
    def width(self) -> int:
        """How many columns coordinates have."""
        return int(self.kind_shape.shape[1])

    @property
    def tensor(self) -> Int:
        """The tensor of each shard."""
        return np.repeat(np.arange(len(self.shards)), self.shards)

    @classmethod
    def of(cls, table: ShardTable) -> Self:
        """Look through a table."""
        tensors = table.tensors
        order = np.argsort(table.tensor, kind="stable")
        tensor = table.tensor[order]
        width = max(1, int(tensors.rank.max(initial=1)))
        skipped = tensors.width - width
        numbers = {dtype: number for number, dtype in enumerate(dict.fromkeys(tensors.dtypes))}
        dtype = np.fromiter(map(numbers.__getitem__, tensors.dtypes), np.int64, len(tensors))
        kinds = np.column_stack([dtype, tensors.rank, tensors.full_shape[:, skipped:]])
        first, kind = distinct_rows(kinds)
        kinds = kinds[first]
        boxes = np.column_stack([kind[tensor], table.offset[order, skipped:], table.shape[order, skipped:]])
        first, box = distinct_rows(boxes)
        boxes = boxes[first]
        return cls(
            dtypes=tuple(numbers),
            kind_dtype=kinds[:, 0],
            kind_rank=kinds[:, 1],
            kind_shape=kinds[:, 2:],
            kind=kind,
            shards=np.bincount(tensor, minlength=len(tensors)),
            box_kind=boxes[:, 0],
            box_offset=boxes[:, 1 : 1 + width],
            box_shape=boxes[:, 1 + width :],
            box=box,
            order=order,
        )
