"""Staging: boxes become registered memory, a manifest and digests, in place or in a generation's arena.

What doesn't change from version to version is made once: the shard table for the same boxes, the
registration of the same memory, the manifest bytes for the same table and the same agent metadata.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.to_thread

from modelexpress_rl import quiet_threads
from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.errors import StateError, TransferError, UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard import manifest_columns
from modelexpress_rl.reshard.geometry import ShardTable
from modelexpress_rl.timing import RefitRecord
from modelexpress_rl.train.adapter import (
    SourceBox,
    StagedWeightVersionShardData,
    WeightVersionShardManifest,
    total_bytes,
)
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.copying import copy_all
from modelexpress_rl.train.digest_job import DigestJob
from modelexpress_rl.train.fences import Fence
from modelexpress_rl.train.generations import GenerationPool, Use
from modelexpress_rl.train.memory import Extent, spans_of
from modelexpress_rl.train.places import Layout, Places
from modelexpress_rl.train.reader_columns import ReaderColumns
from modelexpress_rl.train.streams import NO_MARKS, Marks, SideStreams
from modelexpress_rl.train.written import Unwritten
from modelexpress_rl.transport.port import Agent, Registration

_log = logging.getLogger(__name__)

COPY_MODES = frozenset({TrainerStagingMode.COPY_TO_DEVICE, TrainerStagingMode.COPY_TO_HOST})
Spawn = Callable[[Callable[[], Awaitable[None]]], None]


class _Lent:
    """Memory that is registered where it lies, and how many publications lend it."""

    def __init__(self, extents: tuple[Extent, ...], registration: Registration) -> None:
        self.extents = extents
        self.registration = registration
        self.loans = 0


class _Loan:
    """One publication's use of lent memory; it keeps the tensors alive."""

    def __init__(self, lent: _Lent, layout: Layout) -> None:
        self._lent: _Lent | None = lent
        self._layout: Layout | None = layout
        lent.loans += 1

    def release(self) -> None:
        """Nobody reads it any more; a second call is harmless."""
        lent, self._lent, self._layout = self._lent, None, None
        if lent is not None:
            lent.loans -= 1


class Stager:
    """Stages versions for one agent; it owns the generations and the registrations of lent memory."""

    def __init__(
        self,
        agent: Agent,
        *,
        generations: GenerationPool | None = None,
        with_digests: bool = True,
        columns: ReaderColumns | None = None,
    ) -> None:
        self._agent = agent
        self._columns = columns or ReaderColumns()
        self._places: dict[bool, tuple[ColumnBlocks, Places]] = {}
        self._with_digests = with_digests
        self.generations = generations or GenerationPool(agent)
        self.streams = SideStreams()
        self._source: Layout | None = None
        self._lent: list[_Lent] = []
        self._in_arena: dict[int, tuple[int, Places, Layout]] = {}
        self._manifests: dict[int, tuple[ShardTable, bytes, WeightVersionShardManifest]] = {}

    def settled_blocks(self) -> ColumnBlocks:
        """In which blocks of columns a version is copied whose staging begins."""
        if self._source is not None:
            self._columns.settle(self._source.columns)
        return self._columns.blocks

    def layout(self, boxes: Sequence[SourceBox]) -> Layout:
        """The layout of these boxes; the one of the last version where they are the same.

        Raises:
            UsageError: a box is impossible, or two disagree; the message names the tensor.
        """
        fixed = tuple(boxes)
        if self._source is None or self._source.boxes != fixed:
            self._source = Layout.of(fixed)
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
        self,
        boxes: Sequence[SourceBox],
        use: Use,
        record: RefitRecord,
        *,
        to_host: bool = True,
        blocks: ColumnBlocks | None = None,
        after: Marks = NO_MARKS,
        spawn: Spawn | None = None,
    ) -> StagedWeightVersionShardData:
        """The copy modes: a generation is filled, off the event loop, and is what is read.

        `blocks` are the `settled_blocks` of when the staging began, which may have changed since.
        With `spawn` this returns before it is: its `publish_ready` completes when it is, or breaks. The
        use is the caller's to release where this raises.
        """
        blocks = self.settled_blocks() if blocks is None else blocks
        places = self._places_of(self.layout(boxes), blocks, to_host=to_host)
        with record.stage("setup_registration"):
            await use.fit(places.sizes, pinned=to_host and places.reads_gpus)
        with record.stage("transfer_planning"):
            layout = self._moved(use, places)
            manifest = await self._manifest(use.number, layout)
        record.count(copied_bytes=places.size_bytes, generation=use.number)
        # A trainer that waits can't write meanwhile.
        unwritten = Unwritten.now(() if spawn is None else boxes)
        fill = partial(self._fill, use, places, after, record, unwritten)
        if spawn is None:
            await fill()
        ready = None if spawn is None else _spawned(spawn, fill, f"the copy into {use}")
        return StagedWeightVersionShardData(
            manifest, publish_ready=ready, buffer_owner=use, digests=self._digests(layout, manifest)
        )

    async def aclose(self) -> None:
        """Deregister everything and drop the tensors; idempotent."""
        self._source = None
        self._places.clear()
        self._in_arena.clear()
        self._manifests.clear()
        await self.generations.aclose()
        lent, self._lent = self._lent, []
        for one in lent:
            await self._agent.deregister(one.registration)

    async def _fill(
        self, use: Use, places: Places, after: Marks, record: RefitRecord, unwritten: Unwritten
    ) -> None:
        began_s = time.perf_counter()
        with record.stage("source_preparation"), use.writing() as writing:
            copies = places.copies(writing)
            # Not abandoned when cancelled: the memory may be used again only once the copy has ended.
            whole = await anyio.to_thread.run_sync(copy_all, copies, self.streams, after, lambda: use.wanted)
            if not whole:
                raise StateError(f"{use}: the copy was stopped, its version is not wanted any more")
            unwritten.check()
        use.serve()
        record.count(copy_s=time.perf_counter() - began_s)

    async def _borrowed(self, layout: Layout) -> _Loan:
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

    def _places_of(self, source: Layout, blocks: ColumnBlocks, *, to_host: bool) -> Places:
        known = self._places.get(to_host)
        if known is None or known[0] is not blocks or known[1].source is not source:
            known = self._places[to_host] = blocks, Places.of(source, blocks, to_host=to_host)
        return known[1]

    async def _register(self, extents: tuple[Extent, ...]) -> Registration:
        """Register few large spans, or where the transport refuses those, the extents one by one."""
        spans, pieces = spans_of(extents), [extent.region for extent in extents]
        if len(spans) < len(pieces):
            try:
                return await self._agent.register(spans)
            except (StateError, TransferError) as error:  # StateError: some of a span is registered already
                _log.info("%d regions are registered instead of %d: %s", len(pieces), len(spans), error)
        return await self._agent.register(pieces)

    def _moved(self, use: Use, places: Places) -> Layout:
        known = self._in_arena.get(use.number)
        if known is not None and known[:2] == (use.fitted, places):
            return known[2]
        moved = Layout.of(places.moved_to(use))
        alive = self._alive()  # generations that are gone leave nothing behind here
        self._in_arena = {number: kept for number, kept in self._in_arena.items() if number in alive}
        self._in_arena[use.number] = use.fitted, places, moved
        return moved

    async def _manifest(self, place: int, layout: Layout) -> WeightVersionShardManifest:
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
        alive = self._alive()
        self._manifests = {at: kept for at, kept in self._manifests.items() if at in alive}
        self._manifests[place] = layout.table, agent_meta, made
        return made

    def _alive(self) -> set[int]:
        """The generations that there are, and 0 for what is lent where it lies."""
        return {0, *(one.record.number for one in self.generations.generations)}

    def _digests(self, layout: Layout, manifest: WeightVersionShardManifest) -> DigestJob | None:
        if not self._with_digests:
            return None
        return DigestJob(layout.digests, manifest.digest, threads=quiet_threads.THREADS)


class OneStaging:
    """The `ShardStaging` that an adapter gets for one version. `spawn` lets the copy go on by itself."""

    def __init__(
        self,
        stager: Stager,
        mode: TrainerStagingMode,
        *,
        version_id: str,
        timeout_s: float,
        record: RefitRecord,
        after: Marks = NO_MARKS,
        spawn: Spawn | None = None,
    ) -> None:
        self._stager = stager
        self._blocks = stager.settled_blocks()
        self._mode = mode
        self._version_id = version_id
        self._timeout_s = timeout_s
        self._record = record
        self._after = after
        self._spawn = spawn
        self._reserved: Use | None = None

    @property
    def mode(self) -> TrainerStagingMode:
        """The staging mode."""
        return self._mode

    @property
    def makes_blocks(self) -> bool:
        """See `ShardStaging`."""
        return self._mode in COPY_MODES and not self._blocks.rules

    async def reserve(self) -> None:
        """See `ShardStaging`."""
        if self._mode in COPY_MODES and self._reserved is None:
            began_s = time.perf_counter()
            try:
                self._reserved = await self._stager.generations.reserve(self._version_id, self._timeout_s)
            finally:
                waited_s = time.perf_counter() - began_s
                self._record.count(generation_wait_s=waited_s, **self._stager.generations.figures())

    async def stage(self, boxes: Sequence[SourceBox]) -> StagedWeightVersionShardData:
        """See `ShardStaging`."""
        match self._mode:
            case TrainerStagingMode.IN_PLACE:
                return await self._stager.lend(boxes, self._record)
            case TrainerStagingMode.COPY_TO_HOST | TrainerStagingMode.COPY_TO_DEVICE:
                return await self._copy(boxes)
            case _:
                raise UsageError(f"staging mode {self._mode.value} is not implemented for FULL_TENSOR")

    def end(self) -> None:
        """Give back what was reserved and not used; a second call is harmless."""
        use, self._reserved = self._reserved, None
        if use is not None:
            use.release()

    async def _copy(self, boxes: Sequence[SourceBox]) -> StagedWeightVersionShardData:
        self._stager.layout(boxes)  # what is impossible is refused before anything waits
        await self.reserve()
        assert self._reserved is not None
        data = await self._stager.copy(
            boxes,
            self._reserved,
            self._record,
            to_host=self._mode is TrainerStagingMode.COPY_TO_HOST,
            blocks=self._blocks,
            after=self._after,
            spawn=self._spawn,
        )
        self._reserved = None  # it is the publication's from now on
        return data


def _spawned(spawn: Spawn, work: Callable[[], Awaitable[None]], what: str) -> Fence:
    """Start `work`; the fence completes when it has ended, and breaks where it raises."""
    ready = Fence(what)

    async def run() -> None:
        try:
            await work()
        except BaseException as error:
            ready.break_(str(error) or repr(error))
            if not isinstance(error, Exception):
                raise
        else:
            ready.complete()

    spawn(run)
    return ready
