"""A control plane in this process, and what every test of the generator begins with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from modelexpress_rl.rpc import ControlPlane, parse_address
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.transport.inprocess import Hub
from tests.inference.world import World, opened


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
async def plane() -> AsyncIterator[Running]:
    store = MemoryStore()
    async with serving(store) as running:
        yield running
    await store.close()


@pytest.fixture
async def control(plane: Running) -> AsyncIterator[ControlPlane]:
    async with ControlPlane(parse_address(plane.address), rpc_timeout_s=5.0) as control:
        yield control


@pytest.fixture
async def world(plane: Running, control: ControlPlane, hub: Hub) -> AsyncIterator[World]:
    async with opened(plane.address, control, hub) as world:
        yield world
