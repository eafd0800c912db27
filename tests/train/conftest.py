"""Fixtures of the trainer tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.train.support import FaultyControl, Orchestrator, Rig, control_plane, rig_of


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with control_plane() as at:
        yield at


@pytest.fixture
async def orchestrator(address: str) -> AsyncIterator[Orchestrator]:
    made = Orchestrator(address)
    yield made
    await made.plane.aclose()


@pytest.fixture
async def control(address: str) -> FaultyControl:
    return FaultyControl(address)


@pytest.fixture
async def rig(control: FaultyControl) -> AsyncIterator[Rig]:
    async with rig_of(control) as made:
        yield made
