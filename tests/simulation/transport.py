"""The in-process transport on the simulated network: reads take time, are torn, and stall when cut off."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

from modelexpress_rl.transport import inprocess
from modelexpress_rl.transport.inprocess import Hub
from tests.simulation.loop import SimLoop

_ASK_AGAIN_S = 0.1
STALLED_S = 4.0


@dataclass
class Wire:
    """How reads fare at present: how long they take, and by what chance they fail or are damaged."""

    takes_s: tuple[float, float] = (0.001, 0.05)
    fails: float = 0.0
    damaged: float = 0.0


class SimHub(Hub):
    """A read brings the first half of each run half-way through its time, and the other half at its end.

    Memory is read when the bytes land, so an owner that overwrites it too early is seen. `passes` says
    whether two agents reach each other; a read that can't go on waits, and fails after `STALLED_S`.
    `on_landed` is told (reader, peer) of each read that was completed.
    """

    def __init__(
        self,
        loop: SimLoop,
        rng: random.Random,
        passes: Callable[[str, str], bool],
        on_landed: Callable[[str, str], None],
    ) -> None:
        super().__init__()
        self.wire = Wire()
        self.verifying: set[str] = set()
        """Readers that would notice a damaged byte: of a part of a tile nobody can say."""
        self._loop = loop
        self._rng = rng
        self._passes = passes
        self._on_landed = on_landed

    def _begin(self, transfer: inprocess._Transfer) -> None:
        takes_s = self._rng.uniform(*self.wire.takes_s)
        self._loop.in_world(takes_s / 2, self._half, transfer, takes_s / 2, self._loop.time() + STALLED_S)

    def kill(self, peer: str) -> None:
        Context().run(super().kill, peer)

    def _half(self, transfer: inprocess._Transfer, rest_s: float, until_s: float) -> None:
        if not self._may_land(transfer, self._half, rest_s, until_s):
            return
        _copy(transfer, first_half=True)
        if self._rng.random() < self.wire.fails:
            transfer.read.finish("the simulation had it fail half-way")
            return
        self._loop.in_world(rest_s, self._rest, transfer, 0.0, self._loop.time() + STALLED_S)

    def _rest(self, transfer: inprocess._Transfer, rest_s: float, until_s: float) -> None:
        if not self._may_land(transfer, self._rest, rest_s, until_s):
            return
        _copy(transfer, first_half=False)
        if self._rng.random() < self.wire.damaged and transfer.reader.name.split("-")[0] in self.verifying:
            inprocess._flip_last_bit(transfer.reads)
        self._on_landed(transfer.reader.name, transfer.peer.name)
        transfer.read.finish()

    def _may_land(
        self, transfer: inprocess._Transfer, again: Callable[..., None], rest_s: float, until_s: float
    ) -> bool:
        reader, peer, read = transfer.reader, transfer.peer, transfer.read
        if read.settled or self._agents.get(reader.name) is not reader:
            return False
        target = self._agents.get(peer.name)
        if target is None or target.life != peer.life:
            peer.valid = False
            read.finish("the peer is gone")
            return False
        reads = transfer.reads
        device = (reads.remote_device_kind, reads.remote_device_index)
        if target.table.uncovered(device, reads.remote_addr, reads.size_bytes) is not None:
            read.finish("the peer deregistered this memory")
            return False
        if self._passes(reader.name, peer.name) and self._passes(peer.name, reader.name):
            return True
        if self._loop.time() >= until_s:
            peer.valid = False
            read.finish("the connection broke")
            return False
        self._loop.in_world(_ASK_AGAIN_S, again, transfer, rest_s, until_s)
        return False

    def _complete(self, transfer: inprocess._Transfer) -> None:
        transfer.read.finish("the peer is gone")


def _copy(transfer: inprocess._Transfer, *, first_half: bool) -> None:
    reads = transfer.reads
    columns = (reads.local_addr, reads.remote_addr, reads.size_bytes)
    for local, remote, size in zip(*(column.tolist() for column in columns), strict=True):
        begin, end = (0, size // 2) if first_half else (size // 2, size)
        ctypes.memmove(local + begin, remote + begin, end - begin)
