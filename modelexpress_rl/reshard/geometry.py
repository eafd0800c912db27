"""Shard tables: who holds which box of which tensor, as numpy columns.

A box is (offset, shape) in a tensor's global coordinates. Tables of one table share one column
width, `width`: the largest rank in it, at least 1. A tensor of lower rank is padded *in front*, with
offset 0 and extent 1, so that row-major strides, intersections and volumes need no case for rank;
a 0-d tensor is a padded vector of one element.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import index

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import UsageError

Int = NDArray[np.int64]
UInt = NDArray[np.uint64]
Bool = NDArray[np.bool_]
Bytes = NDArray[np.uint8]

MAX_NAME_CHARS = 1024
MAX_RANK = 16
MAX_EXTENT = 1 << 48
MAX_TENSOR_BYTES = 1 << 62
ADDRESS_SPACE_BYTES = 1 << 64
DIGEST_BYTES = 16

DTYPE_SIZE_BYTES: Mapping[str, int] = {
    "torch.float64": 8,
    "torch.float32": 4,
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.float8_e4m3fn": 1,
    "torch.float8_e4m3fnuz": 1,
    "torch.float8_e5m2": 1,
    "torch.float8_e5m2fnuz": 1,
    "torch.float8_e8m0fnu": 1,
    "torch.float4_e2m1fn_x2": 1,
    "torch.int64": 8,
    "torch.int32": 4,
    "torch.int16": 2,
    "torch.int8": 1,
    "torch.uint64": 8,
    "torch.uint32": 4,
    "torch.uint16": 2,
    "torch.uint8": 1,
    "torch.bool": 1,
    "torch.complex32": 4,
    "torch.complex64": 8,
    "torch.complex128": 16,
}


MIN_DEVICE, MAX_DEVICE = -1, 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """One publication that can be read: a slot of the version, held by one worker's agent."""

    slot_id: str
    worker_id: str
    agent_name: str

    def __str__(self) -> str:
        return f"worker {self.worker_id!r} (slot {self.slot_id!r}, agent {self.agent_name!r})"


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of one tensor at an address: what a trainer rank publishes; bytes lie row-major."""

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    addr: int
    device_id: int = 0
    digest: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TensorTable:
    """Tensors by index. `full_shape` is (tensors, width), padded in front; `rank` is unpadded."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    elsize: Int
    rank: Int
    full_shape: Int
    index: Mapping[str, int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def width(self) -> int:
        """The column width of every box of this table."""
        return int(self.full_shape.shape[1])

    def shape(self, tensor: int) -> tuple[int, ...]:
        """The global shape of one tensor, unpadded."""
        return unpadded(self.full_shape[tensor], int(self.rank[tensor]))


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Shards by row: columns of equal length, grouped in any order.

    `tensor` indexes `tensors`, `source` the sources of whoever made the table (0 in a manifest).
    `offset` and `shape` are (rows, width) in elements; `addr` is where the box's bytes begin.
    `digest` is (rows, 16) and means something only where `has_digest`.
    """

    tensors: TensorTable
    tensor: Int
    source: Int
    offset: Int
    shape: Int
    addr: UInt
    device_id: Int
    digest: Bytes
    has_digest: Bool

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def size_bytes(self) -> Int:
        """Bytes of each shard."""
        return volumes(self.shape) * self.tensors.elsize[self.tensor]

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards together."""
        return int(self.size_bytes.sum())

    def box(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of one shard, unpadded."""
        rank = int(self.tensors.rank[self.tensor[row]])
        return unpadded(self.offset[row], rank), unpadded(self.shape[row], rank)

    @classmethod
    def build(cls, shards: Iterable[Shard]) -> ShardTable:
        """Make the table of one publisher; tensors keep the order in which they first appear.

        Raises:
            UsageError: a shard is not possible, or disagrees with an earlier one of its tensor; the
                message names the tensor and the field.
        """
        rows = list(shards)
        first: dict[str, Shard] = {}
        for row in rows:
            seen = first.setdefault(row.name, row)
            if (seen.dtype, seen.full_shape) != (row.dtype, row.full_shape):
                raise UsageError(
                    f"tensor {row.name!r}: {row.dtype} {row.full_shape} disagrees with an earlier shard's "
                    f"{seen.dtype} {seen.full_shape}"
                )
            if not len(row.offset) == len(row.shape) == len(row.full_shape):
                raise UsageError(
                    f"tensor {row.name!r}: offset {row.offset} and shape {row.shape} do not have the rank "
                    f"of the global shape {row.full_shape}"
                )
            if not MIN_DEVICE <= row.device_id <= MAX_DEVICE:
                raise UsageError(
                    f"tensor {row.name!r}: device {row.device_id} is not in {MIN_DEVICE} .. {MAX_DEVICE}"
                )
            if row.digest is not None and len(row.digest) != DIGEST_BYTES:
                raise UsageError(
                    f"tensor {row.name!r}: a digest has {DIGEST_BYTES} bytes, got {row.digest!r}"
                )
        tensors = tensor_table([(t.name, t.dtype, t.full_shape) for t in first.values()])
        try:
            table = cls(
                tensors=tensors,
                tensor=np.array([tensors.index[row.name] for row in rows], np.int64),
                source=np.zeros(len(rows), np.int64),
                offset=padded([row.offset for row in rows], tensors.width, 0),
                shape=padded([row.shape for row in rows], tensors.width, 1),
                addr=np.array([row.addr for row in rows], np.uint64),
                device_id=np.array([row.device_id for row in rows], np.int64),
                digest=np.frombuffer(
                    b"".join(row.digest or bytes(DIGEST_BYTES) for row in rows), np.uint8
                ).reshape(len(rows), DIGEST_BYTES),
                has_digest=np.array([row.digest is not None for row in rows], np.bool_),
            )
        except (OverflowError, TypeError) as error:
            raise UsageError(f"an offset, shape or address does not fit its column: {error}") from error
        fault = shard_fault(table)
        if fault is not None:
            raise UsageError(fault)
        return table


def tensor_table(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> TensorTable:
    """Make a tensor table of (name, dtype, global shape).

    Raises:
        UsageError: a name appears twice or is none, a dtype is unknown or a shape is out of range.
    """
    names = tuple(name for name, _, _ in tensors)
    index_of = {name: i for i, name in enumerate(names)}
    if len(index_of) != len(names):
        raise UsageError(f"tensor {next(n for n in names if names.count(n) > 1)!r} appears twice")
    for name, dtype, shape in tensors:
        # What a reader of the manifest would refuse is refused where it can still be mended.
        if type(name) is not str or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise UsageError(
                f"tensor {name!r}: a name must be a printable string of 1 to {MAX_NAME_CHARS} characters"
            )
        if dtype not in DTYPE_SIZE_BYTES:
            raise UsageError(f"tensor {name!r}: unknown dtype {dtype!r}, expected one like 'torch.bfloat16'")
        if len(shape) > MAX_RANK or any(not is_extent(extent) for extent in shape):
            raise UsageError(f"tensor {name!r}: global shape {shape} is out of range")
    table = TensorTable(
        names=names,
        dtypes=tuple(dtype for _, dtype, _ in tensors),
        elsize=np.array([DTYPE_SIZE_BYTES[dtype] for _, dtype, _ in tensors], np.int64),
        rank=np.array([len(shape) for _, _, shape in tensors], np.int64),
        full_shape=padded([t[2] for t in tensors], max([1, *(len(t[2]) for t in tensors)]), 1),
        index=index_of,
    )
    fault = tensor_fault(table)
    if fault is not None:
        raise UsageError(fault)
    return table


def tensor_fault(table: TensorTable) -> str | None:
    """Say what is wrong with the first tensor that is too big to address, or None."""
    # An extent of 0 does not excuse the others: strides are products of them.
    too_big = volume_estimates(np.maximum(table.full_shape, 1)) * table.elsize > MAX_TENSOR_BYTES
    if not too_big.any():
        return None
    at = int(np.argmax(too_big))
    return f"tensor {table.names[at]!r}: full_shape {table.shape(at)} is more than {MAX_TENSOR_BYTES} bytes"


def shard_fault(table: ShardTable) -> str | None:
    """Say what is wrong with the first impossible shard (outside its tensor, past the end), or None."""
    full = table.tensors.full_shape[table.tensor]
    outside = (
        (table.offset < 0) | (table.shape < 0) | (table.offset > full) | (table.shape > full - table.offset)
    )
    bad = outside.any(axis=1)
    if bad.any():
        at = int(np.argmax(bad))
        tensor = int(table.tensor[at])
        offset, shape = table.box(at)
        return (
            f"tensor {table.tensors.names[tensor]!r}: shard_offset {offset} with shape {shape} lies outside "
            f"the global shape {table.tensors.shape(tensor)}"
        )
    over = table.addr > np.uint64(ADDRESS_SPACE_BYTES - 1) - table.size_bytes.astype(np.uint64)
    if over.any():
        at = int(np.argmax(over))
        name = table.tensors.names[int(table.tensor[at])]
        size = int(table.size_bytes[at])
        return f"tensor {name!r}: addr {int(table.addr[at])} plus {size} bytes is past the end of memory"
    return None


def is_extent(value: object) -> bool:
    """Whether it can be an offset, or an extent of a shape."""
    return hasattr(value, "__index__") and 0 <= index(value) <= MAX_EXTENT


def padded(boxes: Sequence[Sequence[int]], width: int, fill: int) -> Int:
    """Put ragged coordinates into (len(boxes), width), right-aligned, the front filled with `fill`.

    Raises:
        OverflowError: a coordinate does not fit int64.
        TypeError: a coordinate is no integer.
    """
    count = len(boxes)
    lengths = np.fromiter(map(len, boxes), np.int64, count)
    flat = np.array(array("q", chain.from_iterable(boxes)), np.int64)
    out = np.full((count, width), fill, np.int64)
    out[np.arange(width) >= width - lengths[:, None]] = flat
    return out


def widened(columns: Int, width: int, fill: int) -> Int:
    """The same boxes in wider columns."""
    more = width - columns.shape[1]
    if more == 0:
        return columns
    return np.concatenate([np.full((len(columns), more), fill, np.int64), columns], axis=1)


def unpadded(row: Int, rank: int) -> tuple[int, ...]:
    """One row of coordinates as a tuple of `rank` integers."""
    return tuple(row[len(row) - rank :].tolist())


def volumes(shape: Int) -> Int:
    """Elements of each box."""
    out: Int = np.multiply.reduce(shape, axis=1)
    return out


def volume_estimates(shape: Int) -> NDArray[np.float64]:
    """Elements of each box in floating point, which can't wrap around."""
    out: NDArray[np.float64] = np.multiply.reduce(shape.astype(np.float64), axis=1)
    return out


def row_major_strides(shape: Int) -> Int:
    """Strides, in elements, of row-major boxes of these shapes."""
    strides = np.ones_like(shape)
    if shape.shape[1] > 1:
        strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides
