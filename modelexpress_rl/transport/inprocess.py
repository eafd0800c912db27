"""The transport port within one process: reads are memory copies, and every fault can be ordered.

For tests and simulation. A `Hub` is the network; its agents find each other by the metadata they hand
out. It keeps the rules of the real adapter: bounds are checked against what is registered, newer
metadata makes prepared reads stale, a read that isn't settled may still land.

    hub = Hub()
    trainer, generator = hub.agent("trainer"), hub.agent("generator")
    hub.hold("trainer")        # like SIGSTOP: reads from it stay under way
    hub.resume("trainer")      # like SIGCONT: they land now
    hub.kill("trainer")        # like SIGKILL: they fail, and so do later ones
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import numpy as np

from modelexpress_rl.errors import PeerError, StateError, TransferError, UsageError
from modelexpress_rl.transport.port import PreparedRead, ReadList, Region, Registration
from modelexpress_rl.transport.reads import PostedRead
from modelexpress_rl.transport.regions import RegionTable

_FORMAT = "modelexpress_rl.inprocess"


@dataclass(slots=True)
class _Faults:
    """What happens to reads from one peer."""

    held: bool = False
    delay_s: float = 0.0
    failures: int = 0
    corruptions: int = 0
    waiting: list[_Transfer] = field(default_factory=list)


class Hub:
    """The network of one process; safe to use from several threads and event loops."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lives = count(1)
        self._agents: dict[str, InprocessAgent] = {}
        self._faults: dict[str, _Faults] = {}

    def agent(self, name: str) -> InprocessAgent:
        """Make an agent; one that has this name already dies, as a process that is restarted does."""
        with self.lock:
            if name in self._agents:
                self.kill(name)
            self._agents[name] = agent = InprocessAgent(self, name)
            return agent

    def hold(self, peer: str) -> None:
        """Reads from `peer` stay under way until `resume`; nothing of them lands."""
        self._faults_of(peer).held = True

    def resume(self, peer: str) -> None:
        """End `hold`: what was held lands now, also what its reader has abandoned."""
        with self.lock:
            faults = self._faults_of(peer)
            faults.held = False
            waiting, faults.waiting = faults.waiting, []
            for transfer in waiting:
                self._complete(transfer)

    def delay(self, peer: str, delay_s: float) -> None:
        """Reads from `peer` land that much later, on the clock of the reader's event loop."""
        self._faults_of(peer).delay_s = delay_s

    def fail_next(self, peer: str, reads: int = 1) -> None:
        """The next `reads` reads from `peer` fail, each after half of its runs has landed."""
        self._faults_of(peer).failures += reads

    def corrupt_next(self, peer: str, reads: int = 1) -> None:
        """In each of the next `reads` reads from `peer` one bit of the last byte arrives flipped."""
        self._faults_of(peer).corruptions += reads

    def kill(self, peer: str) -> None:
        """The agent dies: reads from it that are under way fail, and so do later ones."""
        with self.lock:
            agent = self._agents.pop(peer, None)
            if agent is not None:
                agent.alive = False
            faults = self._faults_of(peer)
            faults.held = False
            waiting, faults.waiting = faults.waiting, []
            for transfer in waiting:
                self._complete(transfer)

    def _begin(self, transfer: _Transfer) -> None:
        delay_s = self._faults_of(transfer.peer.name).delay_s
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._complete, transfer)
        else:
            self._complete(transfer)

    def _complete(self, transfer: _Transfer) -> None:
        with self.lock:
            peer, read = transfer.peer, transfer.read
            faults = self._faults_of(peer.name)
            if read.settled:
                return
            if faults.held:
                faults.waiting.append(transfer)
                return
            target = self._agents.get(peer.name)
            if target is None or target.life != peer.life:
                peer.valid = False
                read.finish("the peer is gone")
                return
            reads = transfer.reads
            device = (reads.remote_device_kind, reads.remote_device_index)
            if target.table.uncovered(device, reads.remote_addr, reads.size_bytes) is not None:
                read.finish("the peer deregistered this memory")
            elif faults.failures:
                faults.failures -= 1
                _copy(reads, len(reads.size_bytes) // 2)
                read.finish("the hub was told to fail it")
            else:
                _copy(reads, len(reads.size_bytes))
                if faults.corruptions and reads.total_bytes:
                    faults.corruptions -= 1
                    _flip_last_bit(reads)
                read.finish()

    def _withdraw(self, agent: InprocessAgent) -> None:
        """`agent` closes: what it reads ends and never lands."""
        with self.lock:
            for faults in self._faults.values():
                mine = [each for each in faults.waiting if each.reader is agent]
                faults.waiting = [each for each in faults.waiting if each.reader is not agent]
                for transfer in mine:
                    transfer.read.finish("the agent was closed while the read was under way")
            if self._agents.get(agent.name) is agent:
                self.kill(agent.name)

    def _faults_of(self, peer: str) -> _Faults:
        return self._faults.setdefault(peer, _Faults())


@dataclass(slots=True)
class _Peer:
    """A peer as one metadata described it."""

    name: str
    life: int
    metadata: bytes
    table: RegionTable
    valid: bool = True


@dataclass(frozen=True, slots=True)
class InprocessPreparedRead:
    """A read list that was checked against what its peer had registered."""

    reader: InprocessAgent
    source: _Peer
    reads: ReadList

    @property
    def peer(self) -> str:
        return self.source.name

    @property
    def total_bytes(self) -> int:
        return self.reads.total_bytes


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A posted read on its way."""

    reader: InprocessAgent
    peer: _Peer
    reads: ReadList
    read: PostedRead


class InprocessAgent:
    """One end of a hub; implements `port.Agent`. Made by `Hub.agent`."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.life = next(hub.lives)
        self.alive = True
        self.table = RegionTable()
        self._hub = hub
        self._name = name
        self._peers: dict[str, _Peer] = {}
        self._under_way: list[tuple[ReadList, PostedRead]] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def name(self) -> str:
        return self._name

    @property
    def metadata_endpoint(self) -> str:
        return ""

    async def register(self, regions: Sequence[Region]) -> Registration:
        self._check_open()
        with self._hub.lock:
            self.table.missing(regions)
            return self.table.add(regions)

    async def deregister(self, registration: Registration) -> None:
        with self._hub.lock:
            unused = self.table.last_uses(registration)
            for reads, read in self._reads_under_way():
                if any(reads.writes_into(region) for region in unused):
                    raise StateError(
                        f"a read from {read.peer!r} into this memory isn't settled yet; wait for it before "
                        "the memory is deregistered"
                    )
            self.table.remove(registration)

    async def metadata(self) -> bytes:
        self._check_open()
        rows = [[r.addr, r.size_bytes, r.device_kind, r.device_index] for r in self.table.all()]
        return json.dumps([_FORMAT, self._name, self.life, rows]).encode()

    async def add_peer(self, metadata: bytes) -> str:
        self._check_open()
        peer = _parse(metadata)
        if peer.name == self._name:
            raise PeerError(f"{peer.name!r} is this agent's own name; every agent of a job needs its own")
        known = self._peers.get(peer.name)
        if known and known.valid and known.metadata == metadata:
            return peer.name
        if known and known.life != peer.life:
            under_way = sum(read.peer == peer.name for _, read in self._reads_under_way())
            if under_way:
                raise TransferError(
                    f"{peer.name!r} restarted, and {under_way} reads from its former life haven't ended yet",
                    peer=peer.name,
                )
        await self.forget_peer(peer.name)
        self._peers[peer.name] = peer
        return peer.name

    async def forget_peer(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            known.valid = False

    async def prepare(self, peer: str, reads: ReadList) -> InprocessPreparedRead:
        self._check_open()
        known = self._peers.get(peer)
        if known is None or not known.valid:
            raise TransferError(f"peer {peer!r} isn't loaded; add it with its current metadata", peer=peer)
        ours = (reads.local_device_kind, reads.local_device_index)
        theirs = (reads.remote_device_kind, reads.remote_device_index)
        sides = (
            (self.table, ours, reads.local_addr, self._name),
            (known.table, theirs, reads.remote_addr, peer),
        )
        for table, device, addr, owner in sides:
            outside = table.uncovered(device, addr, reads.size_bytes)
            if outside is not None:
                raise TransferError(
                    f"run {outside}, {reads.size_bytes[outside]} bytes at {addr[outside]:#x}, isn't "
                    f"memory that {owner!r} has registered",
                    peer=peer,
                )
        return InprocessPreparedRead(self, known, reads)

    async def post(self, prepared: PreparedRead) -> PostedRead:
        self._check_open()
        if not isinstance(prepared, InprocessPreparedRead) or prepared.reader is not self:
            raise UsageError(f"{prepared!r} was not prepared by the agent {self._name!r}")
        if not prepared.source.valid:
            raise TransferError(
                f"peer {prepared.peer!r} was forgotten, changed or lost the connection after this read was "
                "prepared; add it with its current metadata and prepare again",
                peer=prepared.peer,
            )
        read = PostedRead(prepared.peer, prepared.total_bytes)
        self._under_way = [*self._reads_under_way(), (prepared.reads, read)]
        self._hub._begin(_Transfer(self, prepared.source, prepared.reads, read))
        return read

    async def aclose(self) -> None:
        self._closed = True
        self._hub._withdraw(self)
        for _, read in self._reads_under_way():
            read.finish("the agent was closed while the read was under way")

    def _reads_under_way(self) -> list[tuple[ReadList, PostedRead]]:
        return [each for each in self._under_way if not each[1].settled]

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"in-process agent {self._name!r} is closed")


def _parse(metadata: bytes) -> _Peer:
    try:
        kind, name, life, rows = json.loads(metadata)
        regions = [Region(*row) for row in rows]
        if kind != _FORMAT or not isinstance(name, str) or not isinstance(life, int):
            raise ValueError(f"unexpected contents of type {kind!r}")
        table = RegionTable()
        table.missing(regions)
        table.add(regions)
    except (ValueError, TypeError, StateError) as error:
        raise PeerError(
            f"these {len(metadata)} bytes are not metadata of the in-process transport"
        ) from error
    return _Peer(name, life, metadata, table)


def _copy(reads: ReadList, runs: int) -> None:
    columns = (reads.local_addr[:runs], reads.remote_addr[:runs], reads.size_bytes[:runs])
    for local, remote, size in zip(*(column.tolist() for column in columns), strict=True):
        ctypes.memmove(local, remote, size)


def _flip_last_bit(reads: ReadList) -> None:
    last = int(np.flatnonzero(reads.size_bytes)[-1])
    byte = ctypes.c_ubyte.from_address(int(reads.local_addr[last]) + int(reads.size_bytes[last]) - 1)
    byte.value ^= 1
