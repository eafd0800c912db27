"""A server per test, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from modelexpress_rl.server.stores.memory import MemoryStore
from tests.server.api import Api, Server, server_on
from tests.store.redis_server import shared_redis, start_redis
from tests.store.virtual_clock import VirtualClock

__all__ = ["shared_redis", "start_redis"]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    clock = VirtualClock()
    async with server_on(MemoryStore(clock), clock) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Api:
    return server.api
