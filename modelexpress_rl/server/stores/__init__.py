"""The stores of the control plane, by address: `memory`, `sqlite:PATH`, `redis://HOST:PORT/DB`."""

from __future__ import annotations

from modelexpress_rl.errors import UsageError
from modelexpress_rl.server.clock import Clock
from modelexpress_rl.server.stores.port import Store

REDIS_KINDS = ("redis", "rediss", "redis-cluster", "rediss-cluster")


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
    if kind in REDIS_KINDS:
        try:
            from modelexpress_rl.server.stores.redis import RedisStore
        except ModuleNotFoundError as error:
            raise UsageError("a Redis store needs the extra: pip install 'modelexpress-rl[redis]'") from error
        return RedisStore(address, clock)
    raise UsageError(f"a store is memory, sqlite:PATH or redis://HOST:PORT/DB, not {shown(address)!r}")


def shown(address: str) -> str:
    """An address without the user and the password in it, for messages."""
    scheme, mark, rest = address.partition("://")
    place, slash, options = rest.partition("/")
    return f"{scheme}{mark}{place.rpartition('@')[2]}{slash}{options}"
