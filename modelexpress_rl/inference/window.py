"""Which read is posted next: every source's first ones first, bounded by the bytes in flight.

A landed read makes room for the next of the source that has the fewest bytes in flight. So sources share
the window evenly, and one that hangs keeps no more than its share of it from the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from modelexpress_rl.inference.planning import Chunk
from modelexpress_rl.reshard.geometry import Source

# Enough to keep any wire busy while a read is verified; more would only hide how far a source has come.
SOURCE_BYTES = 128 << 20


class Window:
    """The chunks of one round that are yet to be posted, and how much of each source is in flight.

    A read of more than a limit is posted alone.
    """

    def __init__(self, chunks: Iterable[Chunk], max_in_flight_bytes: int) -> None:
        self.in_flight: Counter[Source] = Counter()
        self._limit_bytes = max_in_flight_bytes
        self._total_bytes = 0
        self._queued: dict[Source, deque[Chunk]] = {}
        for chunk in chunks:
            self._queued.setdefault(chunk.source, deque()).append(chunk)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to be posted."""
        return not self._queued

    def next(self) -> Chunk | None:
        """The chunk to post now, which counts as in flight; None where one has to land first."""
        if not self._queued:
            return None
        source = min(self._queued, key=self.in_flight.__getitem__)
        chunk = self._queued[source][0]
        of_source = self.in_flight[source]
        if of_source and of_source + chunk.total_bytes > SOURCE_BYTES:
            return None
        if self._total_bytes and self._total_bytes + chunk.total_bytes > self._limit_bytes:
            return None
        self._queued[source].popleft()
        if not self._queued[source]:
            del self._queued[source]
        self.in_flight[source] += chunk.total_bytes
        self._total_bytes += chunk.total_bytes
        return chunk

    def post_also(self, chunk: Chunk) -> None:
        """Count a chunk as in flight that was not queued here; whoever posts it bounds it in its own way."""
        self.in_flight[chunk.source] += chunk.total_bytes
        self._total_bytes += chunk.total_bytes

    def landed(self, chunk: Chunk) -> None:
        """A read ended; unless its source was given up, there is room for another."""
        if chunk.source in self.in_flight:
            self.in_flight[chunk.source] -= chunk.total_bytes
            self._total_bytes -= chunk.total_bytes

    def give_up(self, source: Source) -> None:
        """Post no more from this source; what is in flight of it is not waited for."""
        self._queued.pop(source, None)
        self._total_bytes -= self.in_flight.pop(source, 0)
