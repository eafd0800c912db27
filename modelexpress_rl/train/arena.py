"""Host arenas: where the copy modes put a version, registered once and used for many versions."""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import anyio
import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import DeadlineExceeded, StateError
from modelexpress_rl.transport.port import Agent, Region, Registration

_log = logging.getLogger(__name__)

ARENAS = 2
ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where each of several things goes, in bytes from the start of an arena of `size_bytes`."""

    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, sizes_bytes: Iterable[int]) -> ArenaLayout:
        """One after another, each at a multiple of `ALIGN_BYTES`."""
        offsets, end = [], 0
        for size_bytes in sizes_bytes:
            offsets.append(end)
            end += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return cls(tuple(offsets), end)


class HostArena:
    """Page-aligned host memory that the agent has registered; `release` gives it back to its pool."""

    def __init__(self, pool: ArenaPool, size_bytes: int) -> None:
        self.size_bytes = max(mmap.PAGESIZE, size_bytes)
        self.held_by: str | None = None
        self._pool = pool
        self._map = mmap.mmap(-1, self.size_bytes)
        with contextlib.suppress(AttributeError, OSError):  # only where the kernel has huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.registration: Registration | None = None

    @property
    def addr(self) -> int:
        """Where the memory begins."""
        return self.memory.ctypes.data

    @property
    def region(self) -> Region:
        """The whole arena."""
        return Region(self.addr, self.size_bytes)

    def release(self) -> None:
        """Nobody reads it any more; a second call is harmless."""
        self._pool.take_back(self)


class ArenaPool:
    """At most `count` arenas: with two, version n + 1 is captured while n is read."""

    def __init__(self, agent: Agent, *, count: int = ARENAS) -> None:
        self._agent = agent
        self._count = count
        self._arenas: list[HostArena] = []
        self._making = 0
        self._freed = anyio.Event()
        self._closed = False

    @property
    def arenas(self) -> tuple[HostArena, ...]:
        """Those that exist, free or held."""
        return tuple(self._arenas)

    async def acquire(self, size_bytes: int, holder: str, timeout_s: float) -> HostArena:
        """An arena of at least `size_bytes`, held by `holder` (for messages) until its `release`.

        Raises:
            DeadlineExceeded: all are held until the deadline; the message says by whom.
        """
        with anyio.move_on_after(timeout_s):
            while True:
                if (arena := self._take_free(size_bytes, holder)) is not None:
                    return arena
                await self._drop_too_small()
                if len(self._arenas) + self._making < self._count:
                    return await self._make(size_bytes, holder)
                await self._freed.wait()
        holders = ", ".join(arena.held_by or "a capture that begins" for arena in self._arenas)
        raise DeadlineExceeded(
            f"{holder}: no free arena after {timeout_s:g} s: {len(self._arenas)} of {self._count} are held "
            f"by {holders}; release a version, or wait for its source_reuse_ready"
        )

    def take_back(self, arena: HostArena) -> None:
        """As `HostArena.release`."""
        arena.held_by = None
        self._freed.set()
        self._freed = anyio.Event()

    async def aclose(self) -> None:
        """Deregister all arenas; idempotent. Their memory goes when nobody refers to it any more."""
        self._closed = True
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            await self._deregister(arena)

    def _take_free(self, size_bytes: int, holder: str) -> HostArena | None:
        if self._closed:
            raise StateError(f"{holder}: the trainer client is closed")
        fitting = [a for a in self._arenas if a.held_by is None and a.size_bytes >= size_bytes]
        if not fitting:
            return None
        arena = min(fitting, key=lambda one: one.size_bytes)
        arena.held_by = holder
        return arena

    async def _drop_too_small(self) -> None:
        """None of the free ones fits: they make room for one that does."""
        for arena in [one for one in self._arenas if one.held_by is None]:
            self._arenas.remove(arena)
            await self._deregister(arena)

    async def _make(self, size_bytes: int, holder: str) -> HostArena:
        self._making += 1
        try:
            arena = HostArena(self, size_bytes)
            arena.held_by = holder
            arena.registration = await self._agent.register([arena.region])
            self._arenas.append(arena)
        finally:
            self._making -= 1
        return arena

    async def _deregister(self, arena: HostArena) -> None:
        registration, arena.registration = arena.registration, None
        if registration is not None:
            await self._agent.deregister(registration)
