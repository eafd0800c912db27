"""What the tests of the wire share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.wire.fake_server import FakeControlPlane


@pytest.fixture
async def fake() -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane() as server:
        yield server
