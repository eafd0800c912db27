"""Staging memory: page-aligned, registered once with the transport, used again from version to version.

An arena is in one hand at a time: free, taken by a pull or by a staged version, or quarantined, while
a read that was given up may still write into it. A pull that comes meanwhile gets another arena.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence

import anyio
import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.background import Background
from modelexpress_rl.errors import StateError
from modelexpress_rl.transport.port import Agent, Read, Region, Registration

_log = logging.getLogger(__name__)

_PAGE_BYTES = mmap.PAGESIZE
_ASK_AGAIN_S = 60.0
MAX_QUARANTINED = 2


class Arena:
    """A piece of registered host memory."""

    def __init__(self, memory: NDArray[np.uint8], registration: Registration) -> None:
        self.memory = memory
        self.registration = registration

    @property
    def addr(self) -> int:
        """Where it begins."""
        return int(self.memory.ctypes.data)

    @property
    def capacity_bytes(self) -> int:
        """How much it holds."""
        return int(self.memory.size)


class StagingPool:
    """The arenas of one generator rank: one in the steady state, more only while some are quarantined."""

    def __init__(self, agent: Agent, background: Background) -> None:
        self._agent = agent
        self._background = background
        self._free: list[Arena] = []
        self._quarantined: list[Arena] = []
        self.allocations = 0

    @property
    def quarantined_bytes(self) -> int:
        """Memory that reads given up may still write to."""
        return sum(arena.capacity_bytes for arena in self._quarantined)

    async def take(self, size_bytes: int) -> Arena:
        """Hand out an arena of at least `size_bytes`: the free one where it is big enough.

        A free one that is too small is given up first, so that never two are held for one pull.

        Raises:
            StateError: too much is quarantined to allocate more.
        """
        while self._free:
            arena = self._free.pop()
            if arena.capacity_bytes >= size_bytes:
                return arena
            await self._agent.deregister(arena.registration)
        if len(self._quarantined) >= MAX_QUARANTINED:
            raise StateError(
                f"{self.quarantined_bytes} bytes of staging are quarantined: {len(self._quarantined)} "
                f"pulls were given up whose reads have not ended; no more is allocated until one has"
            )
        return await self._allocate(size_bytes)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back that no read writes to any more."""
        self._free.append(arena)

    def quarantine(
        self, arena: Arena, reads: Sequence[Read], on_settled: Callable[[], None] = lambda: None
    ) -> None:
        """Keep `arena` untouched and registered until all `reads` have settled; then it is free again."""
        self._quarantined.append(arena)
        unsettled = [read for read in reads if not read.settled]
        peers = sorted({read.peer for read in unsettled})
        _log.warning(
            "staging of %d bytes is quarantined: %d reads from %s have not ended",
            arena.capacity_bytes,
            len(unsettled),
            ", ".join(peers),
        )
        self._background.spawn(self._await_settled, arena, unsettled, on_settled, name="quarantine")

    async def aclose(self) -> None:
        """Unregister what no read can write to. Quarantined arenas stay: the transport outlives us."""
        for arena in self._free:
            await self._agent.deregister(arena.registration)
        self._free.clear()
        _LEFT_TO_THE_TRANSPORT.extend(self._quarantined)

    async def _allocate(self, size_bytes: int) -> Arena:
        size_bytes = max(-(-size_bytes // _PAGE_BYTES), 1) * _PAGE_BYTES
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
        registration = await self._agent.register([Region(int(memory.ctypes.data), size_bytes)])
        self.allocations += 1
        return Arena(memory, registration)

    async def _await_settled(
        self, arena: Arena, reads: Sequence[Read], on_settled: Callable[[], None]
    ) -> None:
        for read in reads:
            while not await read.wait_settled(anyio.current_time() + _ASK_AGAIN_S):
                _log.warning("a read from %s that was given up has still not ended", read.peer)
        self._quarantined.remove(arena)
        self._free.append(arena)
        _log.info("staging of %d bytes is free again", arena.capacity_bytes)
        on_settled()


# Memory that a transport may still write to must outlive every object of ours.
_LEFT_TO_THE_TRANSPORT: list[Arena] = []
