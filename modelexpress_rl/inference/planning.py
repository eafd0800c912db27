"""From verified manifests to a proven plan, kept for as long as the manifests stay the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio.to_thread
import numpy as np
import xxhash

from modelexpress_rl.column_blocks import ColumnBlocks
from modelexpress_rl.inference import explanations
from modelexpress_rl.inference.adapter import (
    GeneratorEngineAdapter,
    PublishedTensor,
    StagedTensor,
    WeightLoader,
)
from modelexpress_rl.inference.nearness import Nearness
from modelexpress_rl.inference.recent import Recent
from modelexpress_rl.inference.sources import VersionSources
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.reshard.arena_order import in_source_order
from modelexpress_rl.reshard.cost import DEFAULT_COST, TransportCost
from modelexpress_rl.reshard.cost_plan import PlanCost
from modelexpress_rl.reshard.digests import DigestTable, GridRule
from modelexpress_rl.reshard.explain import PlanSummary
from modelexpress_rl.reshard.geometry import Bool, ShardTable, Source
from modelexpress_rl.reshard.grid import DigestGrid, digest_grid, grid_of_table
from modelexpress_rl.reshard.hash_beside import Beside
from modelexpress_rl.reshard.merge import Merged, merge
from modelexpress_rl.reshard.needs import NeedTable
from modelexpress_rl.reshard.plan import PieceTable, Plan, SourceReads
from modelexpress_rl.reshard.planner import plan as plan_reads
from modelexpress_rl.reshard.proof import prove_plan
from modelexpress_rl.reshard.row_staging import MAX_SCRATCH_BYTES, Choice, choose, exactly
from modelexpress_rl.reshard.row_staging_wire import Scratch, Wire, wire
from modelexpress_rl.reshard.split import split
from modelexpress_rl.reshard.verify import Verifier
from modelexpress_rl.reshard.wanted_columns import wanted_columns
from statemachines.ids import WorkerId

CHUNK_BYTES = 32 << 20
CHUNK_PIECES = 2048  # the digests of so many small ones keep the GIL from others for a millisecond
_SMALL_TABLE = 512  # shards; below this, planning takes less than handing it to a thread


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Pieces `first` .. `last - 1` of a plan: what one read brings, and what is verified when it landed.

    A staged one goes to `part` of the scratch region; `copies` then bring it to where it is needed.
    """

    source: Source
    first: int
    last: int
    total_bytes: int
    runs_key: bytes
    part: int | None = None
    copies: range = range(0)

    @property
    def rows(self) -> slice:
        """The rows of its pieces in the plan's piece table."""
        return slice(self.first, self.last)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """A plan, cut into reads, and the checks of what they bring.

    `plan` is what is read, `wanted` what it is read for, cut alike: a piece of `wanted` that is read by
    whole rows is a part of a piece of `plan`. `cost` is what the reads are expected to take on `machine`,
    `columns` what trainers are told that would make them cheaper.
    """

    wanted: Plan
    plan: Plan
    chunks: tuple[Chunk, ...]
    verifiers: Verifiers
    wire: Wire
    machine: TransportCost
    cost: PlanCost
    columns: ColumnBlocks
    _copied_in: list[tuple[Arena, dict[int, list[Beside]]]] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls, plan: Plan, needs: NeedTable, merged: Merged, cost: TransportCost, scratch: Scratch | None = None
    ) -> ReadPlan:
        """Choose how to read every piece, and cut every source's pieces into reads of about `CHUNK_BYTES`.

        `scratch`: the only scratch region that there is room for.
        """
        most_bytes = MAX_SCRATCH_BYTES if scratch is None else scratch.part_bytes
        choice = choose(split(plan, merged, CHUNK_BYTES), merged, cost, max_read_bytes=most_bytes)
        return cls._read(choice, needs, merged, cost, scratch)

    @classmethod
    def again(cls, plan: Plan, needs: NeedTable, merged: Merged, before: ReadPlan) -> ReadPlan:
        """As `of`, for what is left of `before`, into an arena that was made for it."""
        scratch = before.wire.scratch
        if scratch is None:
            return cls._read(exactly(split(plan, merged, CHUNK_BYTES)), needs, merged, before.machine, None)
        return cls.of(plan, needs, merged, before.machine, scratch)

    @classmethod
    def _read(
        cls, choice: Choice, needs: NeedTable, merged: Merged, cost: TransportCost, scratch: Scratch | None
    ) -> ReadPlan:
        made = wire(choice, needs, merged, scratch)
        chunks = tuple(chunk for reads in made.plan.reads for chunk in _chunks(made, reads))
        return cls(
            wanted=choice.plan,
            plan=made.plan,
            chunks=chunks,
            verifiers=Verifiers(made.plan, made.needs, merged, chunks),
            wire=made,
            machine=cost,
            cost=PlanCost.of(made, cost, reads=len(chunks)),
            columns=wanted_columns(choice.plan, needs, merged),
        )

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Who is read."""
        return frozenset(WorkerId(chunk.source.worker_id) for chunk in self.chunks)

    @property
    def summary(self) -> PlanSummary:
        """What is read from whom, for people."""
        return PlanSummary.of(self.plan, self.cost)

    def landed(self, landed: Bool) -> Bool:
        """Which pieces of `wanted` are there, of those of `plan` that are."""
        out: Bool = landed[self.wire.brought_by]
        return out

    def copies(self, chunk: Chunk, arena: Arena) -> Sequence[Beside]:
        """What brings a staged chunk from scratch to where it is needed; nothing for another one."""
        if chunk.part is None:
            return ()
        if not self._copied_in or self._copied_in[0][0] is not arena:
            self._copied_in[:] = [(arena, {})]
        known = self._copied_in[0][1]
        if chunk.first not in known:
            known[chunk.first] = self.wire.copies.views(arena.memory, chunk.copies)
        return known[chunk.first]


class Verifiers:
    """The checks of a plan, source by source; each is made once, when it is first wanted.

    Making one is long where a plan is big: do it in a thread.
    """

    def __init__(self, plan: Plan, needs: NeedTable, merged: Merged, chunks: Sequence[Chunk]) -> None:
        self._reads = np.sort(np.array([chunk.first for chunk in chunks], np.int64))
        self._plan = plan
        self._needs = needs
        self._merged = merged
        self._selective: dict[Source, tuple[DigestGrid, Verifier]] = {}
        self._whole: dict[Source, tuple[GridRule, Verifier]] = {}

    def known(self, source: Source) -> tuple[DigestGrid, Verifier] | None:
        """As `selective`, where it was made before."""
        return self._selective.get(source)

    def selective(self, source: Source, table: ShardTable) -> tuple[DigestGrid, Verifier]:
        """The checks of what is read from a source whose manifest's table is given."""
        if source not in self._selective:
            grid = digest_grid(table)
            self._selective[source] = grid, self._of(source, grid)
        return self._selective[source]

    def whole(self, source: Source, digests: DigestTable) -> Verifier:
        """The checks against a whole table, of a publisher that knows no selection."""
        known = self._whole.get(source)
        if known is None or known[0] != digests.rule or known[1].digest_count != len(digests.digests):
            made = self._of(source, grid_of_table(digests), at_once=True)
            known = self._whole[source] = digests.rule, made
        return known[1]

    def _of(self, source: Source, grid: DigestGrid, *, at_once: bool = False) -> Verifier:
        own = [reads for reads in self._plan.reads if reads.source == source]
        pieces = slice(own[0].first, own[-1].last)
        return Verifier.of(
            self._plan, self._needs, self._merged, pieces, grid, reads=self._reads, at_once=at_once
        )


@dataclass(slots=True, eq=False)
class PlannedVersion:
    """All that follows from the manifests and the engine alone; nothing in it belongs to one version."""

    key: tuple[tuple[str, str, str], ...]
    merged: Merged
    loader: WeightLoader
    needs: NeedTable
    reads: ReadPlan
    distance: Mapping[Source, int]
    _staged: tuple[Arena, tuple[StagedTensor, ...]] | None = field(default=None, repr=False)

    @property
    def arena_bytes(self) -> int:
        """Bytes of an arena to pull into: the needs, and the scratch region."""
        return self.reads.wire.arena_bytes

    def staged(self, arena: Arena) -> tuple[StagedTensor, ...]:
        """The needs as views of an arena."""
        if self._staged is None or self._staged[0] is not arena:
            begins = self.needs.local_offset.astype(np.int64)
            ends = begins + self.needs.size_bytes
            views = tuple(
                StagedTensor(need, arena.memory[begin:end])
                for need, begin, end in zip(self.loader.needs, begins.tolist(), ends.tolist(), strict=True)
            )
            self._staged = (arena, views)
        return self._staged[1]


class Planning:
    """Plans versions for one rank; `owner` names it in errors, and spreads it over replicas equally near."""

    def __init__(
        self,
        adapter: GeneratorEngineAdapter,
        owner: str,
        nearness: Nearness,
        cost: TransportCost = DEFAULT_COST,
    ) -> None:
        self.spread = int.from_bytes(hashlib.sha256(owner.encode()).digest()[:4])
        self.plans_made = 0
        self.cost = cost
        self._adapter = adapter
        self._owner = owner
        self._nearness = nearness
        self._published: dict[str, PublishedTensor] | None = None
        self._loader: WeightLoader | None = None
        self._planned: Recent[tuple[tuple[str, str, str], ...], PlannedVersion] = Recent()

    async def planned(self, sources: VersionSources) -> PlannedVersion:
        """The plan for these manifests, with its proof of coverage.

        Raises:
            IncompleteVersionError: something that the engine loads is published by nobody.
            GeometryError: publishers disagree, or a tensor does not fit the engine.
        """
        planned = self._planned.get(sources.key)
        if planned is None:
            shards = sum(len(each.manifest.table) for each in sources.manifests)
            if shards < _SMALL_TABLE:
                planned = self._plan(sources)
            else:
                planned = await anyio.to_thread.run_sync(self._plan, sources)
            self._planned.put(sources.key, planned)
        self._planned.end_turn()
        return planned

    def _plan(self, sources: VersionSources) -> PlannedVersion:
        merged = merge(sources.manifests)
        loader = self._loader_for(merged)
        needs = NeedTable.build(loader.needs, owner=self._owner)
        distance = self._nearness.distances(sources.fetched)
        plan = plan_reads(needs, merged, spread=self.spread, distance=distance)
        needs, plan = in_source_order(needs, plan)
        prove_plan(plan, needs, merged)
        self.plans_made += 1
        reads = ReadPlan.of(plan, needs, merged, self.cost)
        explanations.write(reads.summary, self._owner)
        return PlannedVersion(sources.key, merged, loader, needs, reads, distance)

    def _loader_for(self, merged: Merged) -> WeightLoader:
        tensors = merged.tensors
        published = {
            name: PublishedTensor(dtype, tensors.shape(number))
            for number, (name, dtype) in enumerate(zip(tensors.names, tensors.dtypes, strict=True))
        }
        if self._loader is None or published != self._published:
            self._loader = self._adapter.loader(published)
            self._published = published
        return self._loader


def _chunks(made: Wire, reads: SourceReads) -> list[Chunk]:
    """Consecutive pieces until they are `CHUNK_BYTES`; one that can't be cut is a read of its own.

    Towards the end they become smaller: nothing runs any more while the last one is verified. Staged
    reads are a chunk for each batch.
    """
    plan = made.plan
    staged = [
        Chunk(
            reads.source,
            batch.first,
            batch.last,
            int(plan.pieces.size_bytes[batch.first : batch.last].sum()),
            _runs_key(plan.pieces, slice(batch.first, batch.last)),
            batch.part,
            batch.copies,
        )
        for batch in made.batches
        if reads.first <= batch.first < reads.last
    ]
    exact_end = staged[0].first if staged else reads.last
    ends = np.cumsum(plan.pieces.size_bytes[reads.first : exact_end])
    chunks, begin, done = [], 0, 0
    while begin < len(ends):
        limit = min(CHUNK_BYTES, max((int(ends[-1]) - done) // 4, CHUNK_BYTES // 4))
        end = max(int(np.searchsorted(ends, done + limit, side="right")), begin + 1)
        end = min(end, begin + CHUNK_PIECES)
        first, last = reads.first + begin, reads.first + end
        key = _runs_key(plan.pieces, slice(first, last))
        chunks.append(Chunk(reads.source, first, last, int(ends[end - 1]) - done, key))
        begin, done = end, int(ends[end - 1])
    return chunks + staged


def _runs_key(pieces: PieceTable, rows: slice) -> bytes:
    """Names the byte runs of some pieces without making them."""
    key = xxhash.xxh3_128()
    for column in (
        pieces.device_id,
        pieces.remote_addr,
        pieces.local_offset,
        pieces.run_bytes,
        pieces.count,
        pieces.remote_stride,
        pieces.local_stride,
    ):
        key.update(column[rows].tobytes())
    return key.digest()
