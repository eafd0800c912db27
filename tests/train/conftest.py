"""Fixtures of the trainer tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from modelexpress_rl.train import staging
from tests.train.gate import Gate
from tests.train.job import Job
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
async def job(address: str, orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch) -> Job:
    for name in ("LOCAL_RANK", "MODEL_NAME", "MX_WORKER_GRPC_PORT", "MX_METADATA_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    return Job(address, orchestrator)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(staging, "copy_all", made.copy)
    yield made
    made.open.set()


@pytest.fixture
async def control(address: str) -> FaultyControl:
    return FaultyControl(address)


@pytest.fixture
async def rig(control: FaultyControl) -> AsyncIterator[Rig]:
    async with rig_of(control) as made:
        yield made
