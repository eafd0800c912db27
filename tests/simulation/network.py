"""A faulty network between processes: calls and streams to real servicers, without a wire.

Requests and replies are lost, delayed, duplicated and overtaken by others; links are cut in one or both
directions; peers die with or without a word. What is kept is what gRPC over TCP keeps: a stream is in
order or breaks, a handler is cancelled at its caller's deadline, and nothing of a call is carried out
more than `LATEST_S` after its caller has heard that it failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from modelexpress_rl.rpc.address import Address
from tests.simulation.calls import Call, UnaryCall
from tests.simulation.log import EventLog
from tests.simulation.loop import Process, SimLoop

CONTROL = Address("control", 8001)


@dataclass
class Noise:
    """What happens to any message, by chance."""

    drops: float = 0.0
    resets: float = 0.0
    duplicates: float = 0.0
    delay_s: tuple[float, float] = (0.0003, 0.004)


@dataclass(eq=False)
class Peer:
    """What listens at an address: a process, and its handlers by method path."""

    process: Process
    handlers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    silent: bool = False
    """Dead without a word: a host that lost its power resets no connection."""


class SimNetwork:
    """All links; `cut` and `mend` them, make `noise`."""

    def __init__(self, loop: SimLoop, rng: random.Random, log: EventLog) -> None:
        self.loop = loop
        self.rng = rng
        self.log = log
        self.noise = Noise()
        self.replica_names: list[str] = []
        self.replicas: dict[str, Peer] = {}
        self.workers: dict[str, Peer] = {}
        self.without_digests: set[str] = set()
        self.lost_answers: set[tuple[str, str]] = set()
        """The next answer to this method that this process does not hear."""
        self.holds_streams = False
        """What lets calls through and nothing of streams, as some proxies do."""
        self.on_message: Callable[[str, str, str, str], None] = lambda phase, source, target, method: None
        self.on_request: Callable[[str, Any], None] = lambda method, request: None
        self.on_answer: Callable[[str, str, Any, Any], None] = lambda source, method, request, answer: None
        self.open: dict[int, Call] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._ports = iter(range(20_000, 60_000))
        self._calls = 0

    # Faults.

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from `source` to `target` any more; cuts add up."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def mend(self, source: str, target: str) -> None:
        """Take one cut back."""
        left = self._cuts.get((source, target), 0) - 1
        if left > 0:
            self._cuts[source, target] = left
        else:
            self._cuts.pop((source, target), None)

    def mend_all(self) -> None:
        self._cuts.clear()
        self.noise = Noise()
        self.holds_streams = False

    def passes(self, source: str, target: str) -> bool:
        """Whether anything gets from one to the other."""
        return (source, target) not in self._cuts

    def delay_s(self) -> float:
        return self.rng.uniform(*self.noise.delay_s)

    # Listening.

    def port(self) -> int:
        return next(self._ports)

    def forget(self, process: Process, *, silent: bool) -> None:
        """A process died: its connections are reset, or (silent) nothing more is heard of it."""
        for peers in (self.replicas, self.workers):
            for peer in peers.values():
                if peer.process is process:
                    peer.silent = silent
        for call in list(self.open.values()):
            if call.source is process:
                call.caller_died()
            elif call.peer is not None and call.peer.process is process and not silent:
                call.later(self.delay_s(), call.peer_died)

    # Calls.

    async def unary(
        self, source: Process, peer: Peer | None, method: Any, request: Any, timeout_s: float, address: str
    ) -> Any:
        """One call, as `rpc.channel.Client.call` makes it; without a `peer` nobody listens there."""
        return await UnaryCall(self, source, peer, method, request, timeout_s, address).run()

    def number(self) -> int:
        self._calls += 1
        return self._calls
