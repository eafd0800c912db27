"""Which node has a bucket: the one Redis, whichever of several is the primary, or a cluster's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from modelexpress_rl.server.stores.redis import keys
from modelexpress_rl.server.stores.redis.address import Endpoint, RedisAddress
from modelexpress_rl.server.stores.redis.keys import Buckets
from modelexpress_rl.server.stores.redis.node import Node
from modelexpress_rl.server.stores.redis.trouble import Cure, Trouble


class Topology:
    """Asks the nodes who has what, once it has to, and once for all who want to know."""

    def __init__(self, address: RedisAddress, buckets: Buckets, node: Callable[[Endpoint], Node]) -> None:
        self._address = address
        self._node = node
        self._slots = [keys.slot_of(bucket.tag) for bucket in buckets.all]
        self._fixed = not address.cluster and len(address.endpoints) == 1
        self._where: list[Endpoint | None] = [address.endpoints[0] if self._fixed else None] * len(
            self._slots
        )
        self._doubted = not self._fixed
        self._asking: anyio.Event | None = None
        self._failure: Trouble | None = None

    async def locate(self, bucket: int) -> Endpoint | Trouble:
        """Where a bucket is, or why nobody knows."""
        if self._doubted:
            await self._ask_once()
        where = self._where[bucket]
        if where is not None:
            return where
        return self._failure or Trouble(Cure.AGAIN, "is a cluster in which no node serves some of the slots")

    def doubt(self) -> None:
        """A node did not do what was expected of it: ask again who has what."""
        self._doubted = not self._fixed

    def learn(self, bucket: int, place: str, teller: Endpoint) -> None:
        """A node said where a bucket is."""
        self._where[bucket] = endpoint_of(place, teller)

    def endpoints(self) -> list[Endpoint]:
        """Every node that is known, in any order; those of the address, too."""
        known = {where for where in self._where if where is not None} | set(self._address.endpoints)
        return random.sample(sorted(known), len(known))

    async def _ask_once(self) -> None:
        """Ask, unless somebody does: then wait for that."""
        if self._asking is not None:
            await self._asking.wait()
            return
        self._asking = anyio.Event()
        try:
            await (self._ask_cluster() if self._address.cluster else self._ask_for_primary())
        finally:
            self._asking.set()
            self._asking = None

    async def _ask_cluster(self) -> None:
        for endpoint in self.endpoints():
            (outcome,) = await self._node(endpoint).exchange([("CLUSTER", "SLOTS")])
            if isinstance(outcome, Trouble):
                self._failure = outcome
                continue
            self._where = [_serving(outcome, slot, endpoint) for slot in self._slots]
            self._failure = None
            if all(self._where):
                self._doubted = False
                return

    async def _ask_for_primary(self) -> None:
        roles: dict[Endpoint, Any] = {}

        async def ask(endpoint: Endpoint) -> None:
            (roles[endpoint],) = await self._node(endpoint).exchange([("ROLE",)])

        async with anyio.create_task_group() as tasks:
            for endpoint in self._address.endpoints:
                tasks.start_soon(ask, endpoint)
        primaries = [
            ((len(role[2]), role[1]), endpoint)
            for endpoint, role in roles.items()
            if not isinstance(role, Trouble) and role[0] == b"master"
        ]
        if primaries:  # of two, the one that replicas follow
            self._where = [max(primaries)[1]] * len(self._where)
            self._doubted, self._failure = False, None
            return
        self._where = [None] * len(self._where)
        troubles = [role for role in roles.values() if isinstance(role, Trouble)]
        words = "has no primary among its nodes" + (f"; one {troubles[0].words}" if troubles else "")
        self._failure = Trouble(Cure.AGAIN, words)


def endpoint_of(place: str, teller: Endpoint) -> Endpoint:
    """An endpoint as a redirection names it; without a host it is on the teller's."""
    host, _, port = place.rpartition(":")
    return host or teller[0], int(port)


def _serving(ranges: Sequence[Any], slot: int, teller: Endpoint) -> Endpoint | None:
    for start, end, primary, *_ in ranges:
        if start <= slot <= end:
            host = (primary[0] or b"").decode()
            return (host if host not in ("", "?") else teller[0]), int(primary[1])
    return None
