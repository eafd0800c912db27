"""The digests of one staged version: slabs from the capture on, finer parts when a reader asks.

Slabs are hashed in the background as soon as the version is captured, in the order of the manifest:
what is served is so bound to the bytes of that moment, and hardly any reader waits. Each finer part is
hashed once, when the first reader asks for it; all readers share it. All state lives in the event
loop, only the hashing itself runs in threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import numpy as np

from modelexpress_rl.errors import StateError
from modelexpress_rl.quiet_threads import run_quietly
from modelexpress_rl.reshard.digests import digest_table, encode_digests
from modelexpress_rl.reshard.geometry import DIGEST_BYTES, ShardTable
from modelexpress_rl.reshard.grid import FINER, Selection
from modelexpress_rl.reshard.hashing import Memory, ShardDigests, ShardHasher, encode_answer


class _Part:
    """Something that is hashed once: whoever wants it waits for `done`, and then looks at `error`."""

    def __init__(self, hash_it: Callable[[], None]) -> None:
        self.hash_it = hash_it
        self.begun = False
        self.done = anyio.Event()
        self.error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """It is hashed, or never will be; only the first call counts."""
        if not self.done.is_set():
            self.error = error
            self.done.set()

    async def wait(self) -> None:
        """Wait for it.

        Raises:
            StateError: it was not hashed: why.
        """
        await self.done.wait()
        if self.error is not None:
            raise self.error


class DigestSource:
    """What digests are made of, and what is kept of it from version to version; see `ShardHasher`."""

    def __init__(self, table: ShardTable, memory: Memory, *, fixed: bool) -> None:
        self.table = table
        self.memory = memory
        self._fixed = fixed
        self._hasher: ShardHasher | None = None

    def hasher(self) -> ShardHasher:
        """Made at first use; long, so not in an event loop."""
        if self._hasher is None:
            self._hasher = ShardHasher(self.table, self.memory, fixed=self._fixed)
        return self._hasher


class _Made:
    """What there is of one version's digests, once the structure has been looked at."""

    def __init__(self, hasher: ShardHasher, stopped: Callable[[], bool]) -> None:
        self.hasher = hasher
        self.digests = ShardDigests(hasher)
        self.slabs = [
            _Part(partial(hasher.hash_slabs, unit, self.digests, stopped))
            for unit in range(len(hasher.units))
        ]
        self.unit_of = np.repeat(np.arange(len(hasher.units)), [len(rows) for rows in hasher.units])
        self.finer: dict[tuple[int, int], _Part] = {}
        self._stopped = stopped

    def slabs_of(self, selection: Selection) -> list[_Part]:
        """The slabs of every row of a selection; finer parts are checked against them."""
        rows = selection.first_row + np.flatnonzero(selection.wanted.any(axis=0))
        return [self.slabs[unit] for unit in np.unique(self.unit_of[rows]).tolist()]

    def finer_of(self, selection: Selection) -> tuple[list[_Part], list[_Part]]:
        """The parts that hold the finer levels of a selection: (asked for before, asked for first)."""
        known: dict[_Part, None] = {}
        fresh: list[_Part] = []
        for level in FINER:
            there = selection.wanted[level] & (self.hasher.grid.count[level, selection.rows] > 0)
            lacking: dict[int, list[int]] = {}
            for row in (selection.first_row + np.flatnonzero(there)).tolist():
                if (level, row) in self.finer:
                    known[self.finer[level, row]] = None
                else:
                    lacking.setdefault(int(self.unit_of[row]), []).append(row)
            for rows in lacking.values():
                part = _Part(partial(self.hasher.hash_parts, level, rows, self.digests, self._stopped))
                self.finer.update(((level, row), part) for row in rows)
                fresh.append(part)
        return list(known), fresh


class DigestJob:
    """The digests of one staged version; `start` does the work, at most `threads` things at a time."""

    def __init__(self, source: DigestSource, manifest_digest: str, *, threads: int) -> None:
        self._source: DigestSource | None = source
        self._manifest_digest = manifest_digest
        self._threads = threads
        self._rows = len(source.table)
        self._made: _Made | None = None
        self._looked = anyio.Event()
        self._failure: Exception | None = None
        self._asked: deque[_Part] = deque()
        self._more = anyio.Event()
        self._whole: _Part | None = None
        self._whole_table = b""

    @property
    def rows(self) -> int:
        """Rows of the manifest that it is about."""
        return self._rows

    async def start(self) -> None:
        """Hash, until `cancel`; failures are kept for whoever asks."""
        source = self._source
        if source is None or self._looked.is_set():
            return
        limiter = anyio.CapacityLimiter(self._threads)
        try:
            hasher = await run_quietly(source.hasher, limiter)
            if self._ended():
                return
            made = self._made = _Made(hasher, self._ended)
            self._looked.set()
            async with anyio.create_task_group() as group:
                for _ in range(self._threads):
                    group.start_soon(self._work, made, limiter)
        except Exception as error:  # noqa: BLE001 (raised to those who ask)
            self._failure = self._failure or error
        finally:
            self.cancel()

    async def answer(self, selection: Selection) -> bytes:
        """The encoded digests of a selection, once they are made.

        Raises:
            StateError: the publication has ended, or the bytes changed after they were captured; the
                message names the tensor.
        """
        if not selection.wanted.any():  # somebody wants to know whether this process lives
            return encode_answer(np.zeros((0, DIGEST_BYTES), np.uint8), selection, self._manifest_digest)
        made = await self._ready()
        slabs = made.slabs_of(selection)
        self._ask([part for part in slabs if not part.begun])  # before those that nobody waits for
        for part in slabs:
            await part.wait()
        known, fresh = made.finer_of(selection)
        self._ask(fresh)
        for part in (*known, *fresh):
            await part.wait()
        return encode_answer(made.digests.gather(selection), selection, self._manifest_digest)

    async def table(self) -> bytes:
        """The encoded table of all bands and tiles, for readers that select nothing.

        Raises:
            StateError: the publication has ended.
        """
        await self._ready()
        if self._whole is None:
            self._whole = _Part(self._make_table)
            self._ask([self._whole])
        await self._whole.wait()
        return self._whole_table

    def cancel(self) -> None:
        """Nobody will ask any more; what is hashed just now ends at its next shard."""
        if self._source is None:
            return
        made, self._made, self._source = self._made, None, None
        self._failure = self._failure or StateError("the publication has ended")
        parts = [] if made is None else [*made.slabs, *made.finer.values()]
        for part in (*parts, *self._asked):
            part.end(self._failure)
        self._asked.clear()
        self._looked.set()
        self._more.set()

    def _ended(self) -> bool:
        return self._source is None

    async def _ready(self) -> _Made:
        await self._looked.wait()
        if self._made is None:
            raise self._failure or StateError("the publication has ended")
        return self._made

    def _ask(self, parts: Sequence[_Part]) -> None:
        if self._source is None:
            for part in parts:
                part.end(self._failure)
        self._asked.extend(parts)
        self._more.set()

    async def _work(self, made: _Made, limiter: anyio.CapacityLimiter) -> None:
        slabs = iter(made.slabs)
        while not self._ended():
            # Somebody waits for what is asked for.
            part = self._asked.popleft() if self._asked else next(slabs, None)
            if part is None:
                if self._more.is_set():
                    self._more = anyio.Event()
                await self._more.wait()
            elif not part.begun:
                part.begun = True
                try:
                    await run_quietly(part.hash_it, limiter)
                except Exception as error:  # noqa: BLE001 (raised to those who ask)
                    part.end(error)
                else:
                    part.end(None)

    def _make_table(self) -> None:
        source = self._source
        if source is None:
            raise StateError("the publication has ended")
        made = digest_table(source.table, source.memory, threads=self._threads)
        self._whole_table = encode_digests(made, self._manifest_digest)
