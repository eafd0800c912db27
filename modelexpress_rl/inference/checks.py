"""Checking what landed against its publishers' digests, which are fetched while the reads run.

Of each source the digests come in a few answers, in the order in which the pieces are read, so that
the first reads are verified while later ones run and later digests are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
import numpy as np

from modelexpress_rl.errors import ModelExpressError
from modelexpress_rl.inference.planning import Chunk, ReadPlan
from modelexpress_rl.inference.sources import Fetched, SourceFetcher, VersionSources
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.quiet_threads import run_quietly
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, Bytes
from modelexpress_rl.reshard.hash_beside import do_all
from modelexpress_rl.reshard.verify import Verified, Verifier

T = TypeVar("T")

_INLINE_BYTES = 256 << 10  # below this, verifying takes less than handing it to a thread
_INLINE_PIECES = 512  # the same for making a verifier


class _Pending:
    """The digests of one source, as far as they came."""

    def __init__(self) -> None:
        self.verifier: Verifier | None = None
        self.digests: Bytes = np.zeros((0, DIGEST_BYTES), np.uint8)
        self.answered = 0
        self.made_none = False
        self.failure: ModelExpressError | None = None
        self._changed = anyio.Event()

    def tell(self) -> None:
        """Something came."""
        self._changed.set()
        self._changed = anyio.Event()

    async def enough_for(self, chunk: Chunk) -> None:
        """Wait until a chunk can be checked, or never can; whoever fetches has the deadline.

        Raises:
            ModelExpressError: the digests could not be had.
        """
        while not self._is_enough(chunk):
            await self._changed.wait()
        if self.failure is not None:
            raise self.failure

    def _is_enough(self, chunk: Chunk) -> bool:
        if self.made_none or self.failure is not None:
            return True
        return self.verifier is not None and self.verifier.asks_for(chunk.rows) <= self.answered


class Checks:
    """The checks of one round of reads; `fetch` runs beside them."""

    def __init__(
        self, reads: ReadPlan, sources: VersionSources, fetcher: SourceFetcher, stall_timeout_s: float
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._reads = reads
        self._sources = sources
        self._fetcher = fetcher
        self._pending = {source: _Pending() for source in reads.plan.source_bytes}

    async def fetch(self, deadline: float) -> None:
        """Fetch the digests of every source side by side; a failure is raised by its chunks' checks."""
        async with anyio.create_task_group() as group:
            for source, pending in self._pending.items():
                group.start_soon(self._fetch_one, self._sources.of(source), pending, deadline)

    async def verify(self, chunk: Chunk, arena: Arena) -> Verified:
        """Check what a read brought, off the event loop where it is big, and copy it out of scratch.

        It is hashed as soon as it has landed, and compared when the digests have come.

        Raises:
            DigestMismatch: it is not what was published; the message names tensor, source and box. What
                was copied meanwhile counts as not there.
            ModelExpressError: the source's digests could not be had.
        """
        pending = self._pending[chunk.source]
        copies = self._reads.copies(chunk, arena)
        hasher = pending.verifier
        if hasher is None:  # nobody knows yet how, or nobody ever will
            await self._run(chunk, partial(do_all, copies))
        else:
            hashed = await self._run(chunk, partial(hasher.hash, arena.memory, chunk.rows, copies))
        await pending.enough_for(chunk)
        verifier = pending.verifier
        if verifier is None:
            return Verified(0, chunk.total_bytes)
        if verifier is not hasher:
            hashed = await self._run(chunk, partial(verifier.hash, arena.memory, chunk.rows))
        return verifier.compare(hashed, pending.digests)

    async def _run(self, chunk: Chunk, work: Callable[[], T]) -> T:
        return work() if chunk.total_bytes < _INLINE_BYTES else await run_quietly(work)

    async def _fetch_one(self, fetched: Fetched, pending: _Pending, deadline: float) -> None:
        source, table = fetched.manifest.source, fetched.manifest.manifest.table
        verifiers = self._reads.verifiers
        made = verifiers.known(source)
        if made is None:
            made = await self._made(partial(verifiers.selective, source, table))
        grid, verifier = made
        digests = np.zeros((verifier.digest_count, DIGEST_BYTES), np.uint8)
        pending.verifier, pending.digests = verifier, digests
        pending.tell()
        for number, ask in enumerate(verifier.asks):
            found = await self._fetcher.digests(
                self._sources.version_id,
                fetched,
                ask,
                grid,
                deadline,
                self._reads.columns,
                self._stall_timeout_s,
            )
            if found is None:
                pending.verifier, pending.made_none = None, True
            elif isinstance(found, ModelExpressError):
                pending.failure = found
            elif found.whole is not None:
                # Before the first check: a publisher that knows no selection answers the first ask so.
                pending.verifier = await self._made(partial(verifiers.whole, source, found.whole))
                pending.digests, pending.answered = found.digests, 1
            else:
                digests[verifier.ask_start[number] : verifier.ask_start[number + 1]] = found.digests
                pending.answered = number + 1
                pending.tell()
                continue
            pending.tell()
            return

    async def _made(self, make: partial[T]) -> T:
        if len(self._reads.plan.pieces) < _INLINE_PIECES:
            return make()
        return await anyio.to_thread.run_sync(make)
