"""Asking the store: each call goes to the node that has it, and is asked again until there is an answer.

Whatever passes by itself (a connection that broke, a primary that moved, a node that loads or is busy)
is waited for, with jitter, for some seconds, and never past the caller's deadline; what doesn't, or
lasts, becomes `StoreUnavailable` with what is wrong.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from modelexpress_rl.server.stores.port import StoreUnavailable
from modelexpress_rl.server.stores.redis import scripts, trouble
from modelexpress_rl.server.stores.redis.address import Endpoint, RedisAddress
from modelexpress_rl.server.stores.redis.clock import StoreTime
from modelexpress_rl.server.stores.redis.keys import Buckets
from modelexpress_rl.server.stores.redis.node import Node, Outcome, Words
from modelexpress_rl.server.stores.redis.scripts import Script
from modelexpress_rl.server.stores.redis.topology import Topology, endpoint_of
from modelexpress_rl.server.stores.redis.trouble import Cure, Trouble

_LOG = logging.getLogger(__name__)

# How long a call is asked again; a caller that waits for less is told a moment before it gives up.
PATIENCE_S = 6.0
BEFORE_DEADLINE_S = 0.25
SHORTEST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5
QUICK_CURES = (Cure.LOAD, Cure.ROUTE, Cure.ASK)


@dataclass(frozen=True, slots=True)
class Call:
    """A script over keys of one bucket, which may be carried out more than once.

    `confirmed`: as many replicas as the address asks for must have it.
    """

    bucket: int
    script: Script
    keys: Sequence[str]
    arguments: Sequence[str | bytes | int] = ()
    confirmed: bool = False


def command(bucket: int, name: str, key: str, *words: str | bytes | int) -> Call:
    """A command on one key of a bucket."""
    return Call(bucket, scripts.COMMAND, [key], (name, *words))


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call; `repeated` where an earlier attempt may have been carried out, too."""

    value: Any
    repeated: bool


@dataclass(slots=True)
class _Asking:
    """A call that has no answer yet."""

    call: Call
    reply: Reply | None = None
    in_full: bool = False
    asking_at: Endpoint | None = None
    repeated: bool = False
    trouble: Trouble | None = None
    node: Endpoint | None = None


class Link:
    """The way to one store."""

    def __init__(self, address: RedisAddress, buckets: Buckets, time: StoreTime) -> None:
        self.address = address
        self._time = time
        self._nodes: dict[Endpoint, Node] = {}
        self.topology = Topology(address, buckets, self.node)
        self._ailing = False
        self.calls = 0
        self.exchanges = 0

    def node(self, endpoint: Endpoint) -> Node:
        """The node at an endpoint."""
        if endpoint not in self._nodes:
            self._nodes[endpoint] = Node(self.address, endpoint)
        return self._nodes[endpoint]

    async def close(self) -> None:
        """Close every connection."""
        for node in list(self._nodes.values()):
            await node.close()

    async def one(self, call: Call) -> Reply:
        """The answer to a call.

        Raises:
            StoreUnavailable: there is none; the call may have been carried out.
        """
        return (await self.all([call]))[0]

    async def all(self, calls: Sequence[Call]) -> list[Reply]:
        """The answers to calls, which are sent together and carried out in any order.

        Raises:
            StoreUnavailable: one has none; any may have been carried out.
        """
        asked = [_Asking(call) for call in calls]
        self.calls += len(calls)
        now_s = anyio.current_time()
        left_s = anyio.current_effective_deadline() - now_s
        told_by = now_s + left_s - min(BEFORE_DEADLINE_S, left_s / 10) if left_s < math.inf else math.inf
        until = min(now_s + PATIENCE_S, told_by)
        attempt = 0
        while open_ := [one for one in asked if one.reply is None]:
            if attempt:
                await self._pause(open_, attempt, until)
            attempt += 1
            with anyio.CancelScope(deadline=told_by) as attempting:
                await self._attempt(open_)
            if attempting.cancelled_caught:
                raise self._unavailable(self._latest(open_, told_by - now_s), open_)
        if self._ailing:
            self._ailing = False
            _LOG.info("the store %s answers again", self.address.shown)
        return [one.reply for one in asked if one.reply is not None]

    async def _attempt(self, open_: Sequence[_Asking]) -> None:
        """Send each call to its node, all nodes at once, and note what came of it."""
        by_node: dict[Endpoint, list[_Asking]] = {}
        for one in open_:
            where = one.asking_at or await self.topology.locate(one.call.bucket)
            if isinstance(where, Trouble):
                one.trouble, one.node = where, None
            else:
                one.node = where
                by_node.setdefault(where, []).append(one)
        if len(by_node) == 1:
            for endpoint, some in by_node.items():
                await self._send(endpoint, some)
            return
        async with anyio.create_task_group() as tasks:
            for endpoint, some in by_node.items():
                tasks.start_soon(self._send, endpoint, some)

    async def _send(self, endpoint: Endpoint, some: Sequence[_Asking]) -> None:
        commands: list[Words] = []
        for one in some:
            if one.asking_at is not None:
                commands.append(("ASKING",))
            commands.append(self._words(one))
        self.exchanges += 1
        outcomes = await self.node(endpoint).exchange(
            commands, confirmed=any(one.call.confirmed for one in some)
        )
        at = 0
        for one in some:
            at += one.asking_at is not None
            self._note(one, outcomes[at])
            at += 1
        if any(one.trouble and one.trouble.cure in (Cure.RECONNECT, Cure.UNKNOWN) for one in some):
            self.topology.doubt()
            await self.node(endpoint).drop()

    def _words(self, one: _Asking) -> Words:
        script = one.call.script
        head = ("EVAL", script.body) if one.in_full else ("EVALSHA", script.digest)
        return (*head, len(one.call.keys), *one.call.keys, *self._time.arguments(), *one.call.arguments)

    def _note(self, one: _Asking, outcome: Outcome) -> None:
        one.asking_at = None
        if not isinstance(outcome, Trouble):
            one.reply, one.trouble = Reply(outcome, one.repeated), None
            return
        if outcome.cure in (Cure.ROUTE, Cure.ASK) and not self.address.cluster:
            outcome = trouble.no_cluster(outcome)
        one.trouble = outcome
        one.repeated = one.repeated or outcome.may_have_happened
        if outcome.cure is Cure.LOAD:
            one.in_full = True
        elif outcome.cure is Cure.ROUTE:
            if outcome.place and one.node:
                self.topology.learn(one.call.bucket, outcome.place, one.node)
            else:
                self.topology.doubt()
        elif outcome.cure is Cure.ASK and one.node:
            one.asking_at = endpoint_of(outcome.place, one.node)

    async def _pause(self, open_: Sequence[_Asking], attempt: int, until: float) -> None:
        """Wait before the next attempt, if there may be one."""
        troubles = [one.trouble for one in open_ if one.trouble is not None]
        hopeless = [one for one in troubles if one.cure is Cure.NONE]
        if hopeless:
            raise self._unavailable(hopeless[0], open_)
        quick = attempt <= len(QUICK_CURES) and all(
            one.cure is Cure.LOAD or (one.cure in QUICK_CURES and one.place) for one in troubles
        )
        pause_s = 0.0 if quick else random.random() * min(SHORTEST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
        if not quick and anyio.current_time() + pause_s >= until:
            raise self._unavailable(troubles[0], open_)
        await anyio.sleep(pause_s)

    def _latest(self, open_: Sequence[_Asking], waited_s: float) -> Trouble:
        """What was wrong when an attempt was broken off: what the one before it met, or silence."""
        return next((one.trouble for one in open_ if one.trouble is not None), trouble.silent(waited_s))

    def _unavailable(self, failure: Trouble, open_: Sequence[_Asking]) -> StoreUnavailable:
        node = next((one.node for one in open_ if one.trouble is failure), None)
        where = self.address.shown
        if node is not None and len(self.address.endpoints) + self.address.cluster > 1:
            where += f" (at {node[0]}:{node[1]})"
        error = StoreUnavailable(f"the store {where} {failure.words}")
        error.__cause__ = failure.cause
        if not self._ailing:
            self._ailing = True
            _LOG.warning("%s", error)
        return error
