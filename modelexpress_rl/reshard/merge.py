"""Several publishers' manifests as one table, in which replicas of a box stand side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import numpy as np

from modelexpress_rl.errors import GeometryError, UsageError
from modelexpress_rl.reshard.geometry import Bool, Int, ShardTable, Source, TensorTable, widened
from modelexpress_rl.reshard.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class SourceManifest:
    """A manifest, and who published it: `source.agent_name` is the manifest's agent."""

    source: Source
    manifest: Manifest

    @classmethod
    def of(cls, slot_id: str, worker_id: str, manifest: Manifest) -> SourceManifest:
        """Join a manifest with the slot and the worker that the control plane lists it under."""
        return cls(Source(slot_id, worker_id, manifest.agent_name), manifest)


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """What all publishers of a version hold.

    `shards` is sorted by (tensor, box, source) and leaves empty shards out. Rows
    `box_start[b]` .. `box_start[b + 1] - 1` are the replicas of box b; boxes
    `tensor_box_start[t]` .. `tensor_box_start[t + 1] - 1` are those of tensor t. `manifest_row` says
    which row of its source's own manifest a shard is.
    """

    sources: tuple[Source, ...]
    shards: ShardTable
    manifest_row: Int
    box_start: Int
    tensor_box_start: Int

    @property
    def tensors(self) -> TensorTable:
        """The tensors of the version."""
        return self.shards.tensors

    def holders(self, tensor: int) -> list[Source]:
        """Every source that holds some of a tensor."""
        first, last = self.tensor_box_start[tensor], self.tensor_box_start[tensor + 1]
        rows = self.shards.source[self.box_start[first] : self.box_start[last]]
        return [self.sources[i] for i in np.unique(rows).tolist()]

    def publishers(self, tensor: int) -> str:
        """Who holds some of a tensor, for an error message."""
        names = [str(source) for source in self.holders(tensor)]
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} others"]
        return ", ".join(names) or "nobody"

    def source_rows(self, avoid: frozenset[Source]) -> Bool:
        """Which rows may be read when `avoid` may not."""
        allowed = np.array([source not in avoid for source in self.sources], np.bool_)
        out: Bool = allowed[self.shards.source]
        return out


def merge(manifests: Sequence[SourceManifest]) -> Merged:
    """Join the manifests of one version; the order given is the order of `sources`.

    Raises:
        GeometryError: publishers disagree on a tensor's dtype or global shape, or replicas of a box
            carry different digests; the message names the tensor and both sources.
        UsageError: a source appears twice.
    """
    sources = tuple(m.source for m in manifests)
    if len(set(sources)) != len(sources):
        raise UsageError("merge: the same source appears twice")
    tensors, tensor_of = _join_tensors(manifests)
    tables = [m.manifest.table for m in manifests]
    width = tensors.width
    shards = ShardTable(
        tensors=tensors,
        tensor=_joined([of[table.tensor] for of, table in zip(tensor_of, tables, strict=True)]),
        source=np.repeat(np.arange(len(tables)), [len(table) for table in tables]),
        offset=np.concatenate(
            [np.zeros((0, width), np.int64), *(widened(t.offset, width, 0) for t in tables)]
        ),
        shape=np.concatenate([np.zeros((0, width), np.int64), *(widened(t.shape, width, 1) for t in tables)]),
        addr=np.concatenate([np.zeros(0, np.uint64), *(t.addr for t in tables)]),
        device_id=_joined([t.device_id for t in tables]),
        digest=np.concatenate([np.zeros((0, 16), np.uint8), *(t.digest for t in tables)]),
        has_digest=np.concatenate([np.zeros(0, np.bool_), *(t.has_digest for t in tables)]),
    )
    manifest_row = _joined([np.arange(len(table)) for table in tables])
    order = _by_tensor_and_box(shards)
    shards = _take(shards, order)
    fresh = _begins_a_box(shards)
    box_start = np.append(np.flatnonzero(fresh), len(shards))
    _refuse_disagreeing_replicas(shards, fresh, sources)
    return Merged(
        sources=sources,
        shards=shards,
        manifest_row=manifest_row[order],
        box_start=box_start,
        tensor_box_start=np.searchsorted(shards.tensor[box_start[:-1]], np.arange(len(tensors) + 1)),
    )


def _joined(columns: Sequence[Int]) -> Int:
    return np.concatenate([np.zeros(0, np.int64), *columns])


def _join_tensors(manifests: Sequence[SourceManifest]) -> tuple[TensorTable, list[Int]]:
    """Number the tensors of all manifests; return them and, per manifest, its numbers for its own."""
    owns = [m.manifest.table.tensors for m in manifests]
    index = _numbered(own.names for own in owns)
    tensor_of = [np.fromiter(map(index.__getitem__, own.names), np.int64, len(own)) for own in owns]
    codes = _numbered(own.dtypes for own in owns)
    dtype = _joined([_codes(own.dtypes, codes) for own in owns])
    width = max([1, *(own.width for own in owns)])
    full_shape = np.concatenate(
        [np.zeros((0, width), np.int64), *(widened(own.full_shape, width, 1) for own in owns)]
    )
    rank = _joined([own.rank for own in owns])
    number = _joined(tensor_of)
    new = np.flatnonzero(np.diff(np.maximum.accumulate(number), prepend=-1))
    spelled = np.empty(len(codes), object)
    spelled[:] = list(codes)
    joined = TensorTable(
        names=tuple(index),
        dtypes=tuple(spelled[dtype[new]].tolist()),
        elsize=_joined([own.elsize for own in owns])[new],
        rank=rank[new],
        full_shape=full_shape[new],
        index=index,
    )
    differs = (joined.full_shape[number] != full_shape).any(axis=1)
    differs |= (joined.rank[number] != rank) | (dtype[new][number] != dtype)
    if differs.any():
        _refuse_disagreement(joined, int(np.argmax(differs)), manifests, tensor_of)
    return joined, tensor_of


def _numbered(columns: Iterable[Sequence[str]]) -> dict[str, int]:
    """A number for each text, in the order of appearance."""
    distinct = dict.fromkeys(chain.from_iterable(columns))
    return dict(zip(distinct, range(len(distinct)), strict=True))


def _codes(texts: Sequence[str], codes: Mapping[str, int]) -> Int:
    if len(codes) == 1:
        return np.zeros(len(texts), np.int64)
    return np.fromiter(map(codes.__getitem__, texts), np.int64, len(texts))


def _refuse_disagreement(
    joined: TensorTable, at: int, manifests: Sequence[SourceManifest], tensor_of: Sequence[Int]
) -> NoReturn:
    """Tensor `at`, counted through all manifests, is not what the first publisher of its name says."""
    ends = np.cumsum([len(numbers) for numbers in tensor_of])
    which = int(np.searchsorted(ends, at, side="right"))
    own = manifests[which].manifest.table.tensors
    at -= int(ends[which]) - len(own)
    number = int(tensor_of[which][at])
    first = next(o for o, theirs in zip(manifests, tensor_of, strict=True) if (theirs == number).any())
    raise GeometryError(
        f"tensor {own.names[at]!r}: {first.source} says {joined.dtypes[number]} {joined.shape(number)}, "
        f"{manifests[which].source} says {own.dtypes[at]} {own.shape(at)}"
    )


def _by_tensor_and_box(shards: ShardTable) -> Int:
    """The order by (tensor, box, source), without empty shards."""
    rows = np.flatnonzero((shards.shape > 0).all(axis=1))
    order = rows[np.argsort(shards.tensor[rows], kind="stable")]
    # Most tensors of a big model lie whole at one source; only the others need sorting by box.
    several = np.bincount(shards.tensor[rows], minlength=len(shards.tensors))[shards.tensor[order]] > 1
    mixed = order[several]
    keys = [
        shards.source[mixed],
        *shards.shape[mixed].T[::-1],
        *shards.offset[mixed].T[::-1],
        shards.tensor[mixed],
    ]
    order[several] = mixed[np.lexsort(keys)]
    return order


def _begins_a_box(shards: ShardTable) -> Bool:
    fresh = np.ones(len(shards), np.bool_)
    fresh[1:] = (
        (shards.tensor[1:] != shards.tensor[:-1])
        | (shards.offset[1:] != shards.offset[:-1]).any(axis=1)
        | (shards.shape[1:] != shards.shape[:-1]).any(axis=1)
    )
    return fresh


def _refuse_disagreeing_replicas(shards: ShardTable, fresh: Bool, sources: Sequence[Source]) -> None:
    """Compare each replica's digest with the nearest earlier one of its box that has one."""
    rows = np.flatnonzero(shards.has_digest)
    box = np.cumsum(fresh)[rows]
    differs = (box[1:] == box[:-1]) & (shards.digest[rows[1:]] != shards.digest[rows[:-1]]).any(axis=1)
    if not differs.any():
        return
    at = int(np.argmax(differs))
    a, b = int(rows[at]), int(rows[at + 1])
    offset, shape = shards.box(a)
    raise GeometryError(
        f"tensor {shards.tensors.names[int(shards.tensor[a])]!r}: replicas of offset {offset} shape {shape} "
        f"have different digests, {sources[int(shards.source[a])]} and {sources[int(shards.source[b])]}"
    )


def _take(shards: ShardTable, rows: Int) -> ShardTable:
    return ShardTable(
        tensors=shards.tensors,
        tensor=shards.tensor[rows],
        source=shards.source[rows],
        offset=shards.offset[rows],
        shape=shards.shape[rows],
        addr=shards.addr[rows],
        device_id=shards.device_id[rows],
        digest=shards.digest[rows],
        has_digest=shards.has_digest[rows],
    )
