"""The stores of the control plane, by address: `memory`, `sqlite:PATH`."""

from __future__ import annotations

from modelexpress_rl.errors import UsageError
from modelexpress_rl.server.clock import Clock
from modelexpress_rl.server.stores.port import Store


def open_store(address: str, clock: Clock | None = None) -> Store:
    """Open the store that `address` names; its adapter is imported only now.

    Raises:
        UsageError: the address is of no known kind, or the store can't be opened.
    """
    kind, _, place = address.partition(":")
    if kind == "memory" and not place:
        from modelexpress_rl.server.stores.memory import MemoryStore

        return MemoryStore(clock)
    if kind == "sqlite" and place:
        from modelexpress_rl.server.stores.sqlite import SqliteStore

        return SqliteStore(place, clock)
    raise UsageError(f"a store is memory or sqlite:PATH, not {address!r}")
