"""What the rest of the package needs from a transport: register memory, read a peer's memory.

An agent both exposes memory (trainer) and reads a peer's (generator). Reads are one-sided: the peer
takes no part in them. Every method that may block runs off the event loop, and every read has a
deadline. Adapters: `nixl` (the real one) and `inprocess` (for tests and simulation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous piece of memory: `addr`, `size_bytes`, and the device it lies on.

    `device_kind` is "cpu" or "cuda"; `device_index` is 0 on a CPU.
    """

    addr: int
    size_bytes: int
    device_kind: str = "cpu"
    device_index: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """Memory that an agent has registered; hand it back to `deregister`."""

    token: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class ReadList:
    """Byte runs to read from one peer, as columns of equal length (dtype uint64).

    Run i copies `size_bytes[i]` bytes from `remote_addr[i]` in the peer's memory to `local_addr[i]`
    in ours. All runs of one list lie on one kind of device on either side.
    """

    remote_addr: NDArray[np.uint64]
    local_addr: NDArray[np.uint64]
    size_bytes: NDArray[np.uint64]
    remote_device_kind: str = "cpu"
    remote_device_index: int = 0
    local_device_kind: str = "cpu"
    local_device_index: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all run lengths, in bytes."""
        return int(self.size_bytes.sum())


class PreparedRead(Protocol):
    """A read list whose descriptors are made; it can be posted any number of times."""

    @property
    def peer(self) -> str: ...

    @property
    def total_bytes(self) -> int: ...


class Read(Protocol):
    """One posted read."""

    @property
    def peer(self) -> str: ...

    @property
    def settled(self) -> bool:
        """True once the transport can no longer write to the local buffers of this read."""
        ...

    async def wait(self, deadline: float) -> None:
        """Return when every byte has landed.

        `deadline` is on the clock of `anyio.current_time()`.

        Raises:
            TransferTimeout: the deadline passed; the read is abandoned and not `settled` until the
                transport says that it ended.
            TransferError: the transport reported a failure; the message names the peer.
        """
        ...

    async def wait_settled(self, deadline: float) -> bool:
        """Wait until `settled`, at most until `deadline`; return whether it is.

        Never raises for a failed read: this is how the owner of a quarantined buffer learns that
        the buffer is its own again.
        """
        ...


class Agent(Protocol):
    """One end of the transport in this process."""

    @property
    def name(self) -> str:
        """The agent's name, unique in the job."""
        ...

    @property
    def metadata_endpoint(self) -> str:
        """`host:port` of the metadata listener, or "" where the agent runs none."""
        ...

    async def register(self, regions: Sequence[Region]) -> Registration:
        """Make `regions` readable by peers and usable as read targets."""
        ...

    async def deregister(self, registration: Registration) -> None:
        """Undo `register`; a second call is harmless."""
        ...

    async def metadata(self) -> bytes:
        """What a peer needs to read our registered memory; changes with every registration."""
        ...

    async def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and return its name.

        Newer metadata of a known peer replaces the older and invalidates its prepared reads.

        Raises:
            PeerError: the bytes are not metadata of this transport.
        """
        ...

    async def forget_peer(self, peer: str) -> None:
        """Drop a peer and its prepared reads; unknown names are harmless."""
        ...

    async def prepare(self, peer: str, reads: ReadList) -> PreparedRead:
        """Make the descriptors of `reads` once, for use on every version that has the same plan.

        Raises:
            TransferError: a run lies outside what the peer or we have registered.
        """
        ...

    async def post(self, prepared: PreparedRead) -> Read:
        """Start a read and return at once; it progresses without being awaited."""
        ...

    async def aclose(self) -> None:
        """Release everything, bounded; abandoned reads are waited for at most briefly."""
        ...
