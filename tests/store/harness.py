"""The stores under test, each as one that can crash and be opened again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from modelexpress_rl.server.stores import open_store
from modelexpress_rl.server.stores.port import Store
from tests.store.virtual_clock import VirtualClock

KINDS = ("memory", "sqlite")


@dataclass
class Harness:
    """One store's worth of data: `open` it, and `reopen` it as after a crash of the server."""

    kind: str
    folder: Path
    clock: VirtualClock = field(default_factory=VirtualClock)
    store: Store | None = None

    def open(self) -> Store:
        address = "memory" if self.kind == "memory" else f"{self.kind}:{self.folder / 'store.db'}"
        self.store = open_store(address, self.clock)
        return self.store

    async def reopen(self) -> Store:
        """What a restarted server finds. Memory stands for a store that outlives the server."""
        assert self.store is not None
        if self.kind == "memory":
            return self.store
        await self.store.close()
        return self.open()


MakeHarness = Callable[[str], Harness]
