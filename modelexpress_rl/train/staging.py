"""Staging: boxes become registered memory, a manifest and digests, in place or in a host arena.

What doesn't change from version to version is made once: the shard table for the same boxes, the
registration of the same memory, the manifest bytes for the same table and the same agent metadata.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from modelexpress_rl import quiet_threads
from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import StateError, TransferError, UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard import manifest_columns
from modelexpress_rl.reshard.geometry import Bytes, Shard, ShardTable
from modelexpress_rl.reshard.hashing import Memory
from modelexpress_rl.timing import RefitRecord
from modelexpress_rl.train.adapter import (
    SourceBox,
    StagedWeightVersionShardData,
    WeightVersionShardManifest,
    total_bytes,
)
from modelexpress_rl.train.arena import ArenaLayout, ArenaPool, HostArena
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.digest_job import DigestJob, DigestSource
from modelexpress_rl.train.memory import (
    Extent,
    Job,
    bytes_of,
    copies_to_host,
    extents_of,
    host_bytes,
    run_all,
    spans_of,
)
from modelexpress_rl.train.packing import PackedBox, packed
from modelexpress_rl.transport.port import Agent, Registration

_log = logging.getLogger(__name__)

THREADS = max(1, min(4, (os.cpu_count() or 2) // 2))
_Boxes = tuple[SourceBox, ...]
_NO_BLOCKS = ColumnBlocks()


@dataclass(frozen=True, slots=True)
class _Layout:
    """What boxes in their places give: made once for the same boxes."""

    boxes: _Boxes
    rows: _Boxes
    table: ShardTable
    extents: tuple[Extent, ...]
    digests: DigestSource

    @classmethod
    def of(cls, boxes: _Boxes) -> _Layout:
        # A manifest lists the boxes of a tensor together, and digests go by the manifest's rows.
        first: dict[str, int] = {}
        for box in boxes:
            first.setdefault(box.name, len(first))
        rows = tuple(sorted(boxes, key=lambda box: first[box.name]))
        table, extents = _table(rows), extents_of(rows)
        on_host = all(extent.device_kind == "cpu" for extent in extents)
        memory = _host_memory(rows, extents) if on_host else _any_memory(rows)
        return cls(boxes, rows, table, extents, DigestSource(table, memory, fixed=on_host))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where everything goes in an arena: extents as they lie, and boxes packed in blocks of columns.

    `layout` has the places of `extents`, then of `packed`, both in the order of publication.
    """

    source: _Layout
    extents: tuple[Extent, ...]
    packed: dict[int, PackedBox]
    layout: ArenaLayout

    @classmethod
    def of(cls, source: _Layout, blocks: ColumnBlocks) -> _Places:
        in_blocks = packed(source.rows, blocks)
        rest = [row for number, row in enumerate(source.rows) if number not in in_blocks]
        extents = _in_order(extents_of(rest) if in_blocks else source.extents, rest)
        sizes = [extent.size_bytes for extent in extents]
        sizes += [each.box.size_bytes for each in in_blocks.values()]
        return cls(source, extents, in_blocks, ArenaLayout.of(sizes))

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena."""
        return self.layout.size_bytes

    def moved_to(self, arena: HostArena) -> _Boxes:
        """The boxes as they lie there."""
        places = sorted(
            (extent.device_kind, extent.device_index, extent.addr, offset)
            for extent, offset in zip(self.extents, self.layout.offsets, strict=False)
        )
        starts = [place[:3] for place in places]
        of_packed = dict(zip(self.packed, self.layout.offsets[len(starts) :], strict=True))
        moved: list[SourceBox] = []
        for number, box in enumerate(self.source.rows):
            if number in self.packed:
                moved += self.packed[number].at(arena.addr + of_packed[number], arena)
                continue
            addr = arena.addr
            if box.size_bytes:
                at = _last_at_most(starts, (box.device_kind, box.device_index, box.addr))
                addr += places[at][3] + box.addr - places[at][2]
            moved.append(replace(box, addr=addr, device_kind="cpu", device_index=0, owner=arena))
        return tuple(moved)

    def copies(self, arena: HostArena) -> list[Job]:
        """What fills the arena."""
        sizes = [extent.size_bytes for extent in self.extents]
        sizes += [each.box.size_bytes for each in self.packed.values()]
        targets = [arena.memory[at : at + size] for at, size in zip(self.layout.offsets, sizes, strict=True)]
        jobs = copies_to_host(self.extents, targets[: len(self.extents)])
        for each, target in zip(self.packed.values(), targets[len(self.extents) :], strict=True):
            jobs += [partial(each.copy, target, rows) for rows in each.row_ranges()]
        return jobs


class _Lent:
    """Memory that is registered where it lies, and how many publications lend it."""

    def __init__(self, extents: tuple[Extent, ...], registration: Registration) -> None:
        self.extents = extents
        self.registration = registration
        self.loans = 0


class _Loan:
    """One publication's use of lent memory; it keeps the tensors alive."""

    def __init__(self, lent: _Lent, layout: _Layout) -> None:
        self._lent: _Lent | None = lent
        self._layout: _Layout | None = layout
        lent.loans += 1

    def release(self) -> None:
        """Nobody reads it any more; a second call is harmless."""
        lent, self._lent, self._layout = self._lent, None, None
        if lent is not None:
            lent.loans -= 1


class Stager:
    """Stages versions for one agent; it owns the arenas and the registrations of lent memory."""

    def __init__(
        self,
        agent: Agent,
        *,
        arenas: ArenaPool | None = None,
        with_digests: bool = True,
        column_blocks: ColumnBlocks = _NO_BLOCKS,
    ) -> None:
        self._agent = agent
        self._column_blocks = column_blocks
        self._places: _Places | None = None
        self._with_digests = with_digests
        self.arenas = arenas or ArenaPool(agent)
        self._source: _Layout | None = None
        self._lent: list[_Lent] = []
        self._in_arena: dict[int, tuple[_Layout, _Layout]] = {}
        self._manifests: dict[int, tuple[ShardTable, bytes, WeightVersionShardManifest]] = {}

    def layout(self, boxes: Sequence[SourceBox]) -> _Layout:
        """The layout of these boxes; the one of the last version where they are the same.

        Raises:
            UsageError: a box is impossible, or two disagree; the message names the tensor.
        """
        fixed = tuple(boxes)
        if self._source is None or self._source.boxes != fixed:
            self._source = _Layout.of(fixed)
        return self._source

    async def lend(self, boxes: Sequence[SourceBox], record: RefitRecord) -> StagedWeightVersionShardData:
        """IN_PLACE: the boxes themselves are what is read."""
        layout = self.layout(boxes)
        with record.stage("setup_registration"):
            loan = await self._borrowed(layout)
        try:
            with record.stage("transfer_planning"):
                manifest = await self._manifest(0, layout)
        except BaseException:
            loan.release()
            raise
        return StagedWeightVersionShardData(
            manifest, buffer_owner=loan, digests=self._digests(layout, manifest)
        )

    async def copy(
        self, boxes: Sequence[SourceBox], holder: str, timeout_s: float, record: RefitRecord
    ) -> StagedWeightVersionShardData:
        """COPY_TO_HOST: an arena is filled, off the event loop, and is what is read.

        Raises:
            DeadlineExceeded: every arena was held until `timeout_s` had passed.
        """
        source = self.layout(boxes)
        places = self._places_of(source)
        with record.stage("setup_registration"):
            arena = await self.arenas.acquire(places.size_bytes, holder, timeout_s)
        try:
            with record.stage("source_preparation"):
                await _fill(arena, places)
            with record.stage("transfer_planning"):
                layout = self._moved(arena, places)
                manifest = await self._manifest(arena.addr, layout)
        except BaseException:
            arena.release()
            raise
        record.count(copied_bytes=places.size_bytes)
        return StagedWeightVersionShardData(
            manifest, buffer_owner=arena, digests=self._digests(layout, manifest)
        )

    async def aclose(self) -> None:
        """Deregister everything and drop the tensors; idempotent."""
        self._source = self._places = None
        self._in_arena.clear()
        self._manifests.clear()
        await self.arenas.aclose()
        lent, self._lent = self._lent, []
        for one in lent:
            await self._agent.deregister(one.registration)

    async def _borrowed(self, layout: _Layout) -> _Loan:
        """A loan of the layout's memory, counted at once: what is lent to nobody may be deregistered."""
        for one in self._lent:
            if one.extents == layout.extents:
                return _Loan(one, layout)
        for one in [one for one in self._lent if not one.loans]:
            self._lent.remove(one)
            await self._agent.deregister(one.registration)
        made = _Lent(layout.extents, await self._register(layout.extents))
        self._lent.append(made)
        return _Loan(made, layout)

    def _places_of(self, source: _Layout) -> _Places:
        if self._places is None or self._places.source is not source:
            self._places = _Places.of(source, self._column_blocks)
        return self._places

    async def _register(self, extents: tuple[Extent, ...]) -> Registration:
        """Register few large spans, or where the transport refuses those, the extents one by one."""
        spans, pieces = spans_of(extents), [extent.region for extent in extents]
        if len(spans) < len(pieces):
            try:
                return await self._agent.register(spans)
            except (StateError, TransferError) as error:  # StateError: some of a span is registered already
                _log.info("%d regions are registered instead of %d: %s", len(pieces), len(spans), error)
        return await self._agent.register(pieces)

    def _moved(self, arena: HostArena, places: _Places) -> _Layout:
        source = places.source
        known = self._in_arena.get(arena.addr)
        if known is not None and known[0] is source:
            return known[1]
        moved = _Layout.of(places.moved_to(arena))
        # Arenas that are gone leave nothing behind here.
        alive = {one.addr for one in self.arenas.arenas}
        self._in_arena = {addr: kept for addr, kept in self._in_arena.items() if addr in alive}
        self._in_arena[arena.addr] = source, moved
        return moved

    async def _manifest(self, place: int, layout: _Layout) -> WeightVersionShardManifest:
        agent_meta = await self._agent.metadata()
        known = self._manifests.get(place)
        if known is not None and known[0] is layout.table and known[1] == agent_meta:
            return known[2]
        document = manifests.Manifest(
            self._agent.name, self._agent.metadata_endpoint, agent_meta, layout.table
        )
        data, columns = await anyio.to_thread.run_sync(manifest_columns.encodings, document)
        made = WeightVersionShardManifest(
            data, len(layout.table.tensors), total_bytes(layout.boxes), columns=columns
        )
        alive = {0, *(one.addr for one in self.arenas.arenas)}
        self._manifests = {at: kept for at, kept in self._manifests.items() if at in alive}
        self._manifests[place] = layout.table, agent_meta, made
        return made

    def _digests(self, layout: _Layout, manifest: WeightVersionShardManifest) -> DigestJob | None:
        if not self._with_digests:
            return None
        return DigestJob(layout.digests, manifest.digest, threads=quiet_threads.THREADS)


class OneStaging:
    """The `ShardStaging` that an adapter gets for one version."""

    def __init__(
        self,
        stager: Stager,
        mode: TrainerStagingMode,
        *,
        holder: str,
        timeout_s: float,
        record: RefitRecord,
    ) -> None:
        self._stager = stager
        self._mode = mode
        self._holder = holder
        self._timeout_s = timeout_s
        self._record = record

    @property
    def mode(self) -> TrainerStagingMode:
        """The staging mode."""
        return self._mode

    async def stage(self, boxes: Sequence[SourceBox]) -> StagedWeightVersionShardData:
        """See `ShardStaging`."""
        match self._mode:
            case TrainerStagingMode.IN_PLACE:
                return await self._stager.lend(boxes, self._record)
            case TrainerStagingMode.COPY_TO_HOST:
                return await self._stager.copy(boxes, self._holder, self._timeout_s, self._record)
            case _:
                raise UsageError(f"staging mode {self._mode.value} is not implemented for FULL_TENSOR")


def _table(boxes: _Boxes) -> ShardTable:
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


def _host_memory(rows: _Boxes, extents: tuple[Extent, ...]) -> Memory:
    """The bytes of each row where they lie on the host; `rows` keeps whatever owns them."""
    starts = [extent.addr for extent in extents]
    views = [host_bytes(extent.addr, extent.size_bytes) for extent in extents]

    def memory(row: int) -> Bytes:
        box = rows[row]
        at = _last_at_most(starts, box.addr)
        begin = box.addr - starts[at]
        return views[at][begin : begin + box.size_bytes]

    return memory


def _any_memory(rows: _Boxes) -> Memory:
    def memory(row: int) -> Bytes:
        box = rows[row]
        return bytes_of(box.addr, box.size_bytes, box.device_kind, box.owner)

    return memory


def _in_order(extents: tuple[Extent, ...], rows: Sequence[SourceBox]) -> tuple[Extent, ...]:
    """Extents by the first box that lies in each, so that what is read together lies together."""
    starts = [(extent.device_kind, extent.device_index, extent.addr) for extent in extents]
    first: dict[int, int] = {}
    for number, box in enumerate(rows):
        if box.size_bytes:
            at = _last_at_most(starts, (box.device_kind, box.device_index, box.addr))
            first.setdefault(at, number)
    return tuple(extents[at] for at in first)


def _last_at_most(starts: list[Any], key: Any) -> int:
    from bisect import bisect_right

    return bisect_right(starts, key) - 1


async def _fill(arena: HostArena, places: _Places) -> None:
    # Not abandoned when cancelled: the arena may be used again only once the copy has ended.
    await anyio.to_thread.run_sync(run_all, places.copies(arena), THREADS)
