"""A transport inside one process, whose reads a test can hold, fail or damage."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from modelexpress_rl.errors import PeerError, TransferError, TransferTimeout
from modelexpress_rl.transport.port import ReadList, Region, Registration


class Network:
    """The agents of one test. `on_read` is called for every posted read before it moves bytes."""

    def __init__(self) -> None:
        self.agents: dict[str, MemoryAgent] = {}
        self.on_read: Callable[[MemoryRead], None] = lambda read: None

    def agent(self, name: str) -> MemoryAgent:
        self.agents[name] = MemoryAgent(name, self)
        return self.agents[name]


@dataclass(eq=False)
class Prepared:
    peer: str
    reads: ReadList
    valid: bool = True

    @property
    def total_bytes(self) -> int:
        return self.reads.total_bytes


@dataclass(eq=False)
class MemoryRead:
    """One read: held while `held` is set, then failed, or carried out and damaged by `damage`."""

    peer: str
    reads: ReadList
    network: Network
    error: str | None = None
    damage: bool = False
    held: anyio.Event | None = None
    ended: bool = field(default=False, init=False)

    @property
    def settled(self) -> bool:
        return self.ended

    def hold(self) -> anyio.Event:
        """Keep it in flight until the event that is returned is set."""
        self.held = anyio.Event()
        return self.held

    async def wait(self, deadline: float) -> None:
        with anyio.move_on_at(deadline) as scope:
            if self.held is not None:
                await self.held.wait()
        if scope.cancelled_caught:
            raise TransferTimeout(f"agent {self.peer}: the read did not end in time", peer=self.peer)
        self.carry_out()
        if self.error is not None:
            raise TransferError(f"agent {self.peer}: {self.error}", peer=self.peer)

    async def wait_settled(self, deadline: float) -> bool:
        with anyio.move_on_at(deadline):
            if self.held is not None:
                await self.held.wait()
            self.carry_out()
        return self.ended

    def carry_out(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self.peer not in self.network.agents:
            self.error = "the peer is gone"
        if self.error is not None:
            return
        columns = (self.reads.remote_addr, self.reads.local_addr, self.reads.size_bytes)
        for remote, local, size in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(local, remote, size)
        if self.damage:
            at = int(self.reads.local_addr[-1])
            ctypes.memset(at, ctypes.c_uint8.from_address(at).value ^ 0x40, 1)


class MemoryAgent:
    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.metadata_endpoint = ""
        self.registered: dict[int, tuple[Region, ...]] = {}
        self.prepares = self.posts = 0
        self._network = network
        self._peers: dict[str, list[Prepared]] = {}
        self._tokens = 0

    async def register(self, regions: Sequence[Region]) -> Registration:
        self._tokens += 1
        self.registered[self._tokens] = tuple(regions)
        return Registration(self._tokens, tuple(regions))

    async def deregister(self, registration: Registration) -> None:
        self.registered.pop(registration.token, None)

    async def metadata(self) -> bytes:
        return json.dumps({"agent": self.name, "registrations": self._tokens}).encode()

    async def add_peer(self, metadata: bytes) -> str:
        try:
            name = str(json.loads(metadata)["agent"])
        except ValueError as error:
            raise PeerError("not metadata of this transport") from error
        await self.forget_peer(name)
        self._peers[name] = []
        return name

    async def forget_peer(self, peer: str) -> None:
        for prepared in self._peers.pop(peer, []):
            prepared.valid = False

    async def prepare(self, peer: str, reads: ReadList) -> Prepared:
        other = self._network.agents.get(peer)
        if other is None:
            raise TransferError(f"agent {peer}: the peer is gone", peer=peer)
        _require_inside(other, reads.remote_addr.tolist(), reads.size_bytes.tolist(), peer)
        _require_inside(self, reads.local_addr.tolist(), reads.size_bytes.tolist(), peer)
        prepared = Prepared(peer, reads)
        self._peers[peer].append(prepared)
        self.prepares += 1
        return prepared

    async def post(self, prepared: Prepared) -> MemoryRead:
        assert prepared.valid
        self.posts += 1
        read = MemoryRead(prepared.peer, prepared.reads, self._network)
        self._network.on_read(read)
        return read

    async def aclose(self) -> None:
        self._network.agents.pop(self.name, None)


def _require_inside(agent: MemoryAgent, addrs: list[int], sizes: list[int], peer: str) -> None:
    regions = [region for regions in agent.registered.values() for region in regions]
    for addr, size in zip(addrs, sizes, strict=True):
        if not any(r.addr <= addr and addr + size <= r.addr + r.size_bytes for r in regions):
            raise TransferError(f"agent {peer}: {size} bytes at {addr} are not registered", peer=peer)
