"""Whose turn it is to read into a part of the scratch region."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from modelexpress_rl.inference.planning import Chunk


class Turns:
    """The staged chunks of one round: each part is written by one after the other, in their order."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self.staged: list[Chunk] = []
        self._before: dict[int, int] = {}
        self._ended: dict[int, anyio.Event] = {}
        self._blocked: set[int] = set()
        last: dict[int, int] = {}
        for chunk in chunks:
            if chunk.part is None:
                continue
            self.staged.append(chunk)
            self._ended[chunk.first] = anyio.Event()
            if chunk.part in last:
                self._before[chunk.first] = last[chunk.part]
            last[chunk.part] = chunk.first

    async def turn(self, chunk: Chunk) -> bool:
        """Wait until the one before it has ended; whether its part is free then."""
        before = self._before.get(chunk.first)
        if before is None:
            return True
        await self._ended[before].wait()
        return before not in self._blocked

    def end(self, chunk: Chunk, *, free: bool) -> None:
        """It was copied out, or given up; `free`: nothing writes to its part any more."""
        if chunk.part is None:
            return
        if not free:
            self._blocked.add(chunk.first)
        self._ended[chunk.first].set()
