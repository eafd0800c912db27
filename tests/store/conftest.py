"""Every store passes the same tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelexpress_rl.server.stores.port import Store
from tests.store.harness import KINDS, Harness
from tests.store.redis_server import shared_cluster, shared_redis, start_redis

__all__ = ["shared_cluster", "shared_redis", "start_redis"]


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    return Harness.make(request.param, tmp_path, request)


@pytest.fixture
async def store(harness: Harness) -> AsyncIterator[Store]:
    harness.open()
    yield harness.store
    await harness.store.close()
