"""Where boxes go: as they lie, or moved into the memory of a generation, with what copies them there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import UsageError
from modelexpress_rl.reshard.geometry import Bytes, Shard, ShardTable
from modelexpress_rl.reshard.hashing import Memory
from modelexpress_rl.train.adapter import MadeBlock, SourceBox
from modelexpress_rl.train.arena import HOST, ArenaLayout, Device
from modelexpress_rl.train.digest_job import DigestSource
from modelexpress_rl.train.generations import Use, Writing
from modelexpress_rl.train.memory import (
    Extent,
    Job,
    bytes_of,
    copies_to_host,
    copy_on_stream,
    extents_of,
    host_bytes,
)
from modelexpress_rl.train.packing import PackedBox, packed

Boxes = tuple[SourceBox, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What boxes in their places give: made once for the same boxes."""

    boxes: Boxes
    rows: Boxes
    table: ShardTable
    extents: tuple[Extent, ...]
    digests: DigestSource

    @classmethod
    def of(cls, boxes: Boxes) -> Layout:
        """The layout of these boxes.

        Raises:
            UsageError: a box is impossible, or two disagree; the message names the tensor.
        """
        # A manifest lists the boxes of a tensor together, and digests go by the manifest's rows.
        first: dict[str, int] = {}
        for box in boxes:
            first.setdefault(box.name, len(first))
        rows = tuple(sorted(boxes, key=lambda box: first[box.name]))
        table, extents = _table(rows), extents_of(rows)
        on_host = all(extent.device_kind == "cpu" for extent in extents)
        memory = _host_memory(rows, extents) if on_host else _any_memory(rows)
        return cls(boxes, rows, table, extents, DigestSource(table, memory, fixed=on_host))

    def columns(self) -> dict[str, int]:
        """The extent of each tensor's last axis, where it has one."""
        return {box.name: box.full_shape[-1] for box in self.rows if box.full_shape}


@dataclass(frozen=True, slots=True)
class Copies:
    """What fills a generation: jobs for threads of the host, and jobs to queue on a stream of each GPU."""

    host: tuple[Job, ...]
    on_streams: dict[int, list[Job]]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything goes in a generation: extents as they lie, boxes in blocks of columns, made blocks.

    `of_extents`, `of_packed` and `of_made` say on which device, and how far from the start of its memory.
    """

    source: Layout
    extents: tuple[Extent, ...]
    packed: dict[int, PackedBox]
    of_extents: tuple[tuple[Device, int], ...]
    of_packed: dict[int, tuple[Device, int]]
    of_made: dict[MadeBlock, tuple[Device, int]]
    sizes: dict[Device, int]

    @classmethod
    def of(cls, source: Layout, blocks: ColumnBlocks, *, to_host: bool) -> Places:
        """One allocation per device: the host's alone, or that of each device that tensors lie on."""
        in_blocks = packed(source.rows, blocks)
        rest = [row for number, row in enumerate(source.rows) if number not in in_blocks]
        extents = _in_order(extents_of(rest) if in_blocks else source.extents, rest)
        things = [(_device_of(one, to_host), one.size_bytes) for one in extents]
        things += [(_device_of(one.box, to_host), one.box.size_bytes) for one in in_blocks.values()]
        made = tuple(dict.fromkeys(row.block for row in source.rows if row.block is not None))
        things += [(_device_of(one, to_host), one.size_bytes) for one in made]
        offsets: dict[Device, Iterator[int]] = {}
        sizes: dict[Device, int] = {}
        for device in dict.fromkeys(device for device, _ in things) or [HOST]:
            layout = ArenaLayout.of(size for of, size in things if of == device)
            offsets[device], sizes[device] = iter(layout.offsets), layout.size_bytes
        places = [(device, next(offsets[device])) for device, _ in things]
        return cls(
            source,
            extents,
            in_blocks,
            tuple(places[: len(extents)]),
            dict(zip(in_blocks, places[len(extents) :], strict=False)),
            dict(zip(made, places[len(extents) + len(in_blocks) :], strict=True)),
            sizes,
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of it on all devices."""
        return sum(self.sizes.values())

    @property
    def reads_gpus(self) -> bool:
        """Whether some tensor lies on a GPU."""
        return any(box.device_kind != "cpu" for box in self.source.rows if box.size_bytes)

    def moved_to(self, use: Use) -> Boxes:
        """The boxes as they lie there."""
        found = sorted(
            ((extent.device_kind, extent.device_index, extent.addr), place)
            for extent, place in zip(self.extents, self.of_extents, strict=True)
        )
        starts = [start for start, _ in found]
        moved: list[SourceBox] = []
        for number, box in enumerate(self.source.rows):
            device, at = HOST if HOST in self.sizes else next(iter(self.sizes)), 0
            if number in self.packed:
                device, at = self.of_packed[number]
                inside = self.packed[number].at(use.addr(device) + at, use.owner(device))
                moved += [replace(one, device_kind=device[0], device_index=device[1]) for one in inside]
                continue
            if box.block is not None:
                device, begin = self.of_made[box.block]
                at = begin + box.addr
            elif box.size_bytes:
                start, (device, begin) = found[_last_at_most(starts, _key(box))]
                at = begin + box.addr - start[2]
            moved.append(
                replace(
                    box,
                    addr=use.addr(device) + at,
                    device_kind=device[0],
                    device_index=device[1],
                    owner=use.owner(device),
                    block=None,
                )
            )
        return tuple(moved)

    def copies(self, writing: Writing) -> Copies:
        """What fills the generation."""
        host: list[Job] = []
        on_streams: dict[int, list[Job]] = {}
        for extent, (device, at) in zip(self.extents, self.of_extents, strict=True):
            target = writing.part(device, at, extent.size_bytes)
            if extent.device_kind == "cpu":
                host += copies_to_host([extent], [target])
            else:
                on_streams.setdefault(extent.device_index, []).append(partial(copy_on_stream, extent, target))
        for number, one in self.packed.items():
            device, at = self.of_packed[number]
            target = writing.part(device, at, one.box.size_bytes)
            jobs = [partial(one.copy, target, rows) for rows in one.row_ranges()]
            if one.box.device_kind == "cpu":
                host += jobs
            else:
                on_streams.setdefault(one.box.device_index, []).extend(jobs)
        for block, (device, at) in self.of_made.items():
            job = partial(block.write, writing.part(device, at, block.size_bytes))
            if block.device_kind == "cpu":
                host.append(job)
            else:
                on_streams.setdefault(block.device_index, []).append(job)
        return Copies(tuple(host), on_streams, self.size_bytes)


def _device_of(thing: Extent | SourceBox | MadeBlock, to_host: bool) -> Device:
    return HOST if to_host else (thing.device_kind, thing.device_index)


def _key(box: SourceBox) -> tuple[str, int, int]:
    return box.device_kind, box.device_index, box.addr


def _table(boxes: Boxes) -> ShardTable:
    if not boxes:
        raise UsageError("tensors: expected at least one box of a tensor, got none")
    table = ShardTable.build(
        Shard(box.name, box.dtype, box.full_shape, box.offset, box.shape, box.addr, box.device_index)
        for box in boxes
    )
    for box, size_bytes in zip(boxes, table.size_bytes.tolist(), strict=True):
        if box.size_bytes != size_bytes:
            raise UsageError(
                f"tensor {box.name!r}: {box.dtype} {box.shape} has {size_bytes} bytes, got {box.size_bytes}"
            )
    return table


def _host_memory(rows: Boxes, extents: tuple[Extent, ...]) -> Memory:
    """The bytes of each row where they lie on the host; `rows` keeps whatever owns them."""
    starts = [extent.addr for extent in extents]
    views = [host_bytes(extent.addr, extent.size_bytes) for extent in extents]

    def memory(row: int) -> Bytes:
        box = rows[row]
        at = _last_at_most(starts, box.addr)
        begin = box.addr - starts[at]
        return views[at][begin : begin + box.size_bytes]

    return memory


def _any_memory(rows: Boxes) -> Memory:
    def memory(row: int) -> Bytes:
        box = rows[row]
        return bytes_of(box.addr, box.size_bytes, box.device_kind, box.owner)

    return memory


def _in_order(extents: tuple[Extent, ...], rows: Sequence[SourceBox]) -> tuple[Extent, ...]:
    """Extents by the first box that lies in each, so that what is read together lies together."""
    starts = [(extent.device_kind, extent.device_index, extent.addr) for extent in extents]
    first: dict[int, int] = {}
    for number, box in enumerate(rows):
        if box.size_bytes and box.block is None:
            first.setdefault(_last_at_most(starts, _key(box)), number)
    return tuple(extents[at] for at in first)


def _last_at_most(starts: list[Any], key: Any) -> int:
    return bisect_right(starts, key) - 1
