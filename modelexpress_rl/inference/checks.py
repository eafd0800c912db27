"""Checking what landed against its publishers' digests, which are fetched while the reads run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import anyio
import anyio.to_thread

from modelexpress_rl.inference.planning import Chunk
from modelexpress_rl.inference.sources import Digests
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.reshard.digests import DigestTable
from modelexpress_rl.reshard.geometry import Source
from modelexpress_rl.reshard.verify import Verified, Verifier

_INLINE_BYTES = 256 << 10  # below this, verifying takes less than handing it to a thread
_THREADS = min(4, os.cpu_count() or 1)


class PendingDigests:
    """The digests of a version, from when they are asked for."""

    def __init__(self) -> None:
        self._came = anyio.Event()
        self._digests = Digests({}, {})

    def set(self, digests: Digests) -> None:
        """They came."""
        self._digests = digests
        self._came.set()

    async def wait(self) -> Digests:
        """Return them when they have come; whoever fetches them has the deadline."""
        await self._came.wait()
        return self._digests


class Checks:
    """The checks of one plan; `make` builds its verifier from the digests that came."""

    def __init__(
        self, pending: PendingDigests, make: Callable[[Mapping[Source, DigestTable]], Verifier]
    ) -> None:
        self._pending = pending
        self._make = make
        self._verifier: Verifier | None = None
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def verify(self, chunk: Chunk, arena: Arena) -> Verified:
        """Check what a read brought, off the event loop where it is big.

        Raises:
            DigestMismatch: it is not what was published; the message names tensor, source and box.
            ModelExpressError: the source's digests could not be had.
        """
        digests = await self._pending.wait()
        if chunk.source in digests.failures:
            raise digests.failures[chunk.source]
        if self._verifier is None:
            self._verifier = self._make(digests.tables)
        if chunk.total_bytes < _INLINE_BYTES:
            return self._verifier.verify(arena.memory, chunk.rows)
        return await anyio.to_thread.run_sync(
            self._verifier.verify, arena.memory, chunk.rows, limiter=self._threads
        )
