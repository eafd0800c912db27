"""What an agent's thread keeps about peers, prepared reads and reads under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.transport.port import ReadList
from modelexpress_rl.transport.reads import PostedRead


@dataclass(slots=True)
class Peer:
    """A peer under one loaded metadata; `valid` until other metadata, forgetting, or a disconnect."""

    name: str
    metadata: bytes
    valid: bool = True


@dataclass(slots=True)
class Plan:
    """A prepared read: NIXL's lists, and the transfer handles that no read uses at the moment."""

    peer: Peer
    reads: ReadList
    local: int = 0
    remote: int = 0
    indices: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    idle: list[int] = field(default_factory=list)
    running: int = 0
    dropped: bool = False

    @property
    def empty(self) -> bool:
        return not len(self.indices)


@dataclass(frozen=True, slots=True)
class Running:
    """A read under way."""

    plan: Plan
    handle: int
    read: PostedRead
    started: float
