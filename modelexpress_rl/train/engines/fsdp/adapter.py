"""What an FSDP rank publishes: its boxes in its own memory, or in buffers into which they are cast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import anyio.to_thread
import torch

from modelexpress_rl import envs
from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.adapter import (
    BoxAdapter,
    BoxContent,
    Fence,
    MadeBlock,
    ShardStaging,
    SourceBox,
    StagedWeightVersionShardData,
)
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.engines.fsdp.casting import CastBuffers, CastKey, WireDtypes, cast_into
from modelexpress_rl.train.engines.fsdp.context import FSDPTrainerContext
from modelexpress_rl.train.engines.fsdp.pieces import Piece, contiguous, contiguous_count
from modelexpress_rl.train.engines.fsdp.tensors import (
    Fingerprint,
    HeldTensor,
    Source,
    held_tensors,
    source_of,
)
from modelexpress_rl.train.engines.fsdp.trace import (
    Native,
    Published,
    View,
    as_they_are,
    natives_of,
    pieces_of,
    trace,
)
from modelexpress_rl.version import WeightVersionRef

SLOT_PREFIX = "publisher:global-rank:"
MAX_BOXES = 1 << 16
"""Boxes of one tensor on one rank: more are a manifest that is bigger than it is worth."""


@dataclass(frozen=True, slots=True)
class CastBox:
    """A box that travels in another dtype than it lies in: `piece` says where in the row-major copy."""

    name: str
    full_shape: tuple[int, ...]
    key: CastKey
    piece: Piece
    was: torch.dtype


@dataclass(frozen=True, slots=True)
class Capture:
    """What this rank publishes, in the memory that its tensors have now."""

    marks: tuple[Fingerprint, ...]
    boxes: tuple[SourceBox, ...]
    casts: tuple[CastBox, ...]
    held: Mapping[str, HeldTensor] = field(compare=False, repr=False)
    made: tuple[SourceBox, ...] = field(compare=False, repr=False)

    @property
    def cast_keys(self) -> tuple[CastKey, ...]:
        """What must be cast, each once."""
        return tuple(dict.fromkeys(cast.key for cast in self.casts))

    def __str__(self) -> str:
        names = {box.name for box in self.boxes} | {cast.name for cast in self.casts}
        return (
            f"{len(names)} tensors, {len(self.cast_keys)} of them cast; as they lie: {BoxContent(self.boxes)}"
        )


class FSDPAdapter(BoxAdapter):
    """The adapter of `FSDPTrainerContext`; one slot per rank, whatever it holds."""

    def __init__(self, context: FSDPTrainerContext) -> None:
        self._context = context
        self._wire = WireDtypes.of(context.wire_dtype, context.wire_dtype_overrides)
        self._source: Source | None = None if context.tensors is None else source_of(context.tensors)
        self._capture: Capture | None = None

    @property
    def source_slot_id(self) -> str:
        """The slot of this global rank."""
        self._bound()
        return f"{SLOT_PREFIX}{_global_rank()}"

    def bind_tensors(self, tensors: Any) -> str:
        """Fix a model, a state dict, pairs of name and tensor, or a function that makes one of these."""
        self._source = source_of(tensors)
        self._capture = None
        self._now()
        return self.source_slot_id

    def boxes(self) -> tuple[SourceBox, ...]:
        """The rank's own memory, which follows tensors that moved.

        Raises:
            UsageError: a tensor's wire dtype is not the one that it lies in.
        """
        capture = self._now()
        if capture.casts:
            cast = capture.casts[0]
            raise UsageError(
                f"tensor {cast.name!r}: is {cast.was} and its wire dtype is {cast.key.wire}, but IN_PLACE "
                "lends memory as it is: use COPY_TO_HOST, which casts while it captures, or publish it as it "
                f"is with FSDPTrainerContext(wire_dtype=None) or wire_dtype_overrides={{{cast.name!r}: None}}"
            )
        return capture.boxes

    async def stage_shard(
        self, version: WeightVersionRef, staging: ShardStaging
    ) -> StagedWeightVersionShardData:
        """Lend the memory, or cast what travels in another dtype and have all copied."""
        capture = self._now()
        if staging.mode is TrainerStagingMode.IN_PLACE or not capture.casts:
            return await staging.stage(self.boxes())
        if staging.makes_blocks:
            return await staging.stage((*capture.boxes, *capture.made))
        await staging.reserve()  # a cast that has nowhere to go is in vain
        buffers = self._take_buffers(capture.cast_keys)
        # Not abandoned when cancelled: the buffers may be used again only once the casts have ended.
        await anyio.to_thread.run_sync(buffers.fill, capture.held)
        casts = tuple(_in_buffer(cast, buffers) for cast in capture.casts)
        data = await staging.stage((*capture.boxes, *casts))
        if data.publish_ready is None:
            self._context.kept.spare.append(buffers)
        elif isinstance(data.publish_ready, Fence):  # the copy goes on, and reads them until then
            data.publish_ready.on_end(lambda: self._context.kept.spare.append(buffers))
        return data

    def content(self) -> object:
        """See `TrainerEngineAdapter`."""
        return self._now()

    def _bound(self) -> Source:
        if self._source is None:
            raise StateError(
                "no tensors are bound: call bind_tensors, or give FSDPTrainerContext its tensors"
            )
        return self._source

    def _now(self) -> Capture:
        """The capture of what is there now; the last one, where no tensor moved or changed."""
        held = held_tensors(self._bound())
        marks = tuple(one.mark for one in held.values())
        if self._capture is None or self._capture.marks != marks:
            boxes, casts = self._found(held)
            self._capture = Capture(marks, boxes, casts, held, _made(casts, held))
        return self._capture

    def _found(self, held: Mapping[str, HeldTensor]) -> tuple[tuple[SourceBox, ...], tuple[CastBox, ...]]:
        published = self._published(held)
        self._wire.check([*held, *published])
        first = _first_names(held)
        boxes: list[SourceBox] = []
        casts: list[CastBox] = []
        for name, view in published.items():
            for one in _boxes_of(name, view, held, self._wire, first):
                if isinstance(one, SourceBox):
                    boxes.append(one)
                else:
                    casts.append(one)
        if not boxes and not casts:
            boxes.append(_nothing_of(published, self._wire))
        return tuple(boxes), tuple(casts)

    def _published(self, held: Mapping[str, HeldTensor]) -> Published:
        signature = tuple((one.mark.name, one.mark.shape, one.mark.dtype) for one in held.values())
        convert, kept = self._context.convert_native_to_hf, self._context.kept
        if convert is None:
            return as_they_are(signature)
        if kept.traced is None or kept.traced[0] != signature:
            kept.traced = signature, trace(convert, signature)
        return kept.traced[1]

    def _take_buffers(self, keys: Sequence[CastKey]) -> CastBuffers:
        with contextlib.suppress(IndexError):
            spare = self._context.kept.spare.pop()
            if spare.keys == tuple(keys):
                return spare
        return CastBuffers(keys)


def _global_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return envs.rank() or 0


def _first_names(held: Mapping[str, HeldTensor]) -> dict[str, str]:
    """For each name the first one of the same memory: what is tied is cast once."""
    first: dict[Fingerprint, str] = {}
    return {name: first.setdefault(replace(one.mark, name=""), name) for name, one in held.items()}


def _boxes_of(
    name: str, view: View, held: Mapping[str, HeldTensor], wires: WireDtypes, first: Mapping[str, str]
) -> Iterator[SourceBox | CastBox]:
    natives = natives_of(view)
    wire = wires.wire(name, {native: one.dtype for native, one in natives.items()}, view.dtype)

    def pieces(native: Native) -> list[Piece]:
        return held[native.name].pieces(packed=native.dtype != wire)

    found = pieces_of(name, view, pieces)
    if not all(view.sizes):
        yield _empty(name, wire, view.sizes, (0,) * len(view.sizes), view.sizes)
        return
    count = sum(contiguous_count(piece) for piece in found)
    if count > MAX_BOXES:
        raise UsageError(
            f"tensor {name!r}: lies in {count} pieces of memory, as {view.made_by} leaves it, expected at "
            f"most {MAX_BOXES}; publish it in the layout that it has in memory"
        )
    for piece in found:
        for box in contiguous(piece):
            yield _box(name, view, wire, box, held[first[box.native]])


def _box(name: str, view: View, wire: torch.dtype, piece: Piece, held: HeldTensor) -> SourceBox | CastBox:
    mark = held.mark
    if mark.dtype != wire:
        key = CastKey(mark.name, wire, mark.extents, mark.device)
        return CastBox(name, view.sizes, key, piece, mark.dtype)
    return SourceBox(
        name=name,
        dtype=str(wire),
        full_shape=view.sizes,
        offset=piece.offset,
        shape=piece.shape,
        addr=mark.addr + piece.start * wire.itemsize,
        size_bytes=prod(piece.shape) * wire.itemsize,
        device_kind=mark.device.type,
        device_index=mark.device.index or 0,
        owner=held.local,
    )


def _made(casts: Sequence[CastBox], held: Mapping[str, HeldTensor]) -> tuple[SourceBox, ...]:
    """The casts as boxes of blocks that are cast while they are captured."""
    blocks: dict[CastKey, MadeBlock] = {}
    boxes = []
    for cast in casts:
        key, itemsize = cast.key, cast.key.wire.itemsize
        if key not in blocks:
            native = held[key.native]
            size_bytes = prod(key.extents) * itemsize
            write = partial(cast_into, key, native)
            device = key.device
            blocks[key] = MadeBlock(
                (key, native.mark.addr), size_bytes, write, device.type, device.index or 0
            )
        boxes.append(
            SourceBox(
                name=cast.name,
                dtype=str(key.wire),
                full_shape=cast.full_shape,
                offset=cast.piece.offset,
                shape=cast.piece.shape,
                addr=cast.piece.start * itemsize,
                size_bytes=prod(cast.piece.shape) * itemsize,
                device_kind=key.device.type,
                device_index=key.device.index or 0,
                owner=held[key.native].local,
                block=blocks[key],
            )
        )
    return tuple(boxes)


def _in_buffer(cast: CastBox, buffers: CastBuffers) -> SourceBox:
    buffer, itemsize = buffers[cast.key], cast.key.wire.itemsize
    return SourceBox(
        name=cast.name,
        dtype=str(cast.key.wire),
        full_shape=cast.full_shape,
        offset=cast.piece.offset,
        shape=cast.piece.shape,
        addr=buffer.data_ptr() + cast.piece.start * itemsize,
        size_bytes=prod(cast.piece.shape) * itemsize,
        device_kind=buffer.device.type,
        device_index=buffer.device.index or 0,
        owner=buffer,
    )


def _nothing_of(published: Published, wires: WireDtypes) -> SourceBox:
    """A rank that holds nothing publishes that: its slot is expected, and READY waits for it."""
    for name, view in published.items():
        if view.sizes:
            natives = {native: one.dtype for native, one in natives_of(view).items()}
            wire = wires.wire(name, natives, view.dtype)
            shape = (0, *view.sizes[1:])
            return _empty(name, wire, view.sizes, (view.sizes[0], *(0 for _ in shape[1:])), shape)
    raise UsageError("tensors: this rank holds nothing, and no published tensor has a dimension")


def _empty(
    name: str, wire: torch.dtype, full_shape: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
) -> SourceBox:
    return SourceBox(name, str(wire), full_shape, offset, shape, addr=0, size_bytes=0)
