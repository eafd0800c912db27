"""The stores under test, each as one that can crash and be opened again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from modelexpress_rl.server.stores import open_store
from modelexpress_rl.server.stores.port import Store
from tests.store.virtual_clock import VirtualClock

KINDS = ("memory", "sqlite", "redis", "redis-cluster")


@dataclass
class Harness:
    """One store's worth of data: `open` it, and `reopen` it as after a crash of the server."""

    kind: str
    folder: Path
    redis_address: str = ""
    clock: VirtualClock = field(default_factory=VirtualClock)
    store: Store | None = None
    name: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def make(cls, kind: str, folder: Path, request: pytest.FixtureRequest) -> Harness:
        """A harness of this kind, with the server that it needs."""
        shared = {"redis": "shared_redis", "redis-cluster": "shared_cluster"}.get(kind)
        return cls(kind, folder, request.getfixturevalue(shared).address if shared else "")

    @property
    def address(self) -> str:
        if self.redis_address:
            return f"{self.redis_address}?prefix={self.name}"
        return "memory" if self.kind == "memory" else f"{self.kind}:{self.folder / 'store.db'}"

    def open(self) -> Store:
        self.store = open_store(self.address, self.clock)
        return self.store

    async def reopen(self) -> Store:
        """What a restarted server finds. Memory stands for a store that outlives the server."""
        assert self.store is not None
        if self.kind == "memory":
            return self.store
        await self.store.close()
        return self.open()


MakeHarness = Callable[[str], Harness]
