"""What the rest of the package needs from a transport: register memory, read a peer's memory.

An agent both exposes memory (trainer) and reads a peer's (generator). Reads are one-sided: the peer
takes no part in them. Every method that may block runs off the event loop, and every read has a
deadline. Adapters: `nixl` (the real one) and `inprocess` (for tests and simulation).

What the owner of the memory keeps: registered memory stays allocated until `deregister` returned,
and the target of a read until the read is `settled`. A read that fails or times out may have written
any part of its target. After `aclose` every read of the agent is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.errors import UsageError


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
    in ours. All runs of one list lie on one kind of device on either side. Runs of no bytes are legal,
    and so is a list of no runs. Runs don't overlap in local memory.

    Raises:
        UsageError: a column isn't a uint64 vector, or the lengths differ.
    """

    remote_addr: NDArray[np.uint64]
    local_addr: NDArray[np.uint64]
    size_bytes: NDArray[np.uint64]
    remote_device_kind: str = "cpu"
    remote_device_index: int = 0
    local_device_kind: str = "cpu"
    local_device_index: int = 0

    def __post_init__(self) -> None:
        columns = {
            "remote_addr": self.remote_addr,
            "local_addr": self.local_addr,
            "size_bytes": self.size_bytes,
        }
        for name, column in columns.items():
            if column.dtype != np.uint64 or column.shape != self.size_bytes.shape or column.ndim != 1:
                raise UsageError(
                    f"ReadList.{name} is {column.dtype} of shape {column.shape}; expected a uint64 vector as "
                    f"long as size_bytes, which has shape {self.size_bytes.shape}"
                )

    @property
    def total_bytes(self) -> int:
        """The sum of all run lengths, in bytes."""
        return int(self.size_bytes.sum())

    def select(self, runs: NDArray[np.bool_]) -> ReadList:
        """The runs for which `runs` is true."""
        return replace(
            self,
            remote_addr=self.remote_addr[runs],
            local_addr=self.local_addr[runs],
            size_bytes=self.size_bytes[runs],
        )

    def writes_into(self, region: Region) -> bool:
        """Whether some run writes a byte of `region`; runs must not reach past the end of memory."""
        if (self.local_device_kind, self.local_device_index) != (region.device_kind, region.device_index):
            return False
        last = np.uint64(region.addr + region.size_bytes - 1)
        hits = (self.local_addr <= last) & (self.local_addr + self.size_bytes > np.uint64(region.addr))
        return bool((hits & (self.size_bytes > 0)).any())


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
        """True once the transport can no longer write to the local buffers of this read.

        Not the same as success: a failed read settles too.
        """
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
        """Make `regions` readable by peers and usable as read targets.

        Memory that lies inside memory registered earlier shares its registration.

        Raises:
            UsageError: a region is empty, or on a kind of device that the transport doesn't know.
            StateError: a region overlaps registered memory in part.
            TransferError: the transport refuses it.
        """
        ...

    async def deregister(self, registration: Registration) -> None:
        """Undo `register`; a second call is harmless, and so is memory that was freed before.

        Raises:
            StateError: a read into this memory isn't settled yet.
        """
        ...

    async def metadata(self) -> bytes:
        """What a peer needs to read our registered memory; changes when that memory changes."""
        ...

    async def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and return its name.

        The same metadata again changes nothing, unless the connection broke since. Newer metadata of a
        known peer replaces the older and makes its prepared reads stale; reads that are under way go on.

        Raises:
            PeerError: the bytes are not metadata of this transport.
            TransferError: the peer restarted, and reads of its former life aren't settled yet.
        """
        ...

    async def forget_peer(self, peer: str) -> None:
        """Drop a peer; its prepared reads become stale, those under way go on. Unknown names are harmless."""
        ...

    async def prepare(self, peer: str, reads: ReadList) -> PreparedRead:
        """Make the descriptors of `reads` once, for use on every version that has the same plan.

        Raises:
            TransferError: the peer isn't known, or a run lies outside what it or we have registered.
        """
        ...

    async def post(self, prepared: PreparedRead) -> Read:
        """Start a read and return at once; it progresses without being awaited.

        A prepared read may be posted again while an earlier post of it is under way.

        Raises:
            TransferError: `prepared` is stale: the peer was forgotten, restarted, registered other memory
                or lost the connection since. Add the peer and prepare again.
        """
        ...

    async def aclose(self) -> None:
        """Release everything, bounded; reads under way are waited for at most briefly, then fail."""
        ...
