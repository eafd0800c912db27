"""Whether the replicas that are read agree: a version must not become a mixture of two contents.

Each byte is verified against the digests of the publisher it came from. Where several publishers hold one
box and more than one of them is read, their digests are compared, too: those of the slabs, which every
publisher makes anyway. Publishers that are not read are not asked.
"""

from __future__ import annotations

import anyio
import anyio.abc
import anyio.to_thread

from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.inference.planning import PlannedVersion, ReadPlan
from modelexpress_rl.inference.sources import SourceFetcher, VersionSources
from modelexpress_rl.reshard.geometry import Int, Source
from modelexpress_rl.reshard.replicas import (
    SlabDigests,
    refuse_disagreeing_replicas,
    shared_rows,
    slabs_of,
)

# The reads are verified by then, so that whoever can answer has hashed everything.
ANSWER_GRACE_S = 1.0


class Agreement:
    """The comparison for one pull; what was told by a source that has failed since still counts."""

    def __init__(self, planned: PlannedVersion, sources: VersionSources, fetcher: SourceFetcher) -> None:
        self._planned = planned
        self._sources = sources
        self._fetcher = fetcher
        self._read_in: dict[Source, ReadPlan] = {}
        self._asked: dict[Source, anyio.Event] = {}
        self._told: dict[Source, SlabDigests] = {}

    @property
    def has_replicas(self) -> bool:
        """Whether any box has several holders."""
        merged = self._planned.merged
        return len(merged.shards) > len(merged.box_start) - 1

    def ask(self, reads: ReadPlan, group: anyio.abc.TaskGroup, deadline: float) -> None:
        """Ask what these reads bring in common with those before, in `group`, while they run."""
        self._read_in |= dict.fromkeys(reads.plan.source_bytes, reads)
        wanted = self._planned.reads.wanted.pieces.row
        for source, rows in shared_rows(self._planned.merged, wanted, self._read_in.keys()).items():
            if source not in self._asked:
                self._asked[source] = anyio.Event()
                group.start_soon(self._ask, source, rows, self._read_in[source], deadline)

    async def require(self) -> None:
        """Compare what was told; who has not answered soon after the reads is left out.

        Raises:
            GeometryError: two replicas differ; the message names the tensor and both.
        """
        with anyio.move_on_after(ANSWER_GRACE_S):
            for answered in self._asked.values():
                await answered.wait()
        if len(self._told) > 1:
            refuse_disagreeing_replicas(self._planned.merged, self._told)

    async def _ask(self, source: Source, rows: Int, reads: ReadPlan, deadline: float) -> None:
        fetched = self._sources.of(source)
        grid, _ = await anyio.to_thread.run_sync(
            reads.verifiers.selective, source, fetched.manifest.manifest.table
        )
        ask = slabs_of(rows)
        found = await self._fetcher.digests(self._sources.version_id, fetched, ask, grid, deadline)
        # A publisher without digests, or of another kind, has nothing to compare; a failure is told by its
        # reads.
        if found is not None and not isinstance(found, ModelExpressError) and found.whole is None:
            self._told[source] = SlabDigests.of(ask, grid, found.digests)
        self._asked[source].set()
