"""A control plane with something to see: three versions, two trainers, four generators."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.stores.memory import MemoryStore
from tests.server.api import GENERATOR, Api


@dataclass(frozen=True, slots=True)
class Plane:
    """A running server and a caller."""

    running: Running
    api: Api

    @property
    def address(self) -> str:
        return self.running.address


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with (
        serving(MemoryStore()) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield Plane(running, Api(channel))


@pytest.fixture
async def busy(plane: Plane) -> Plane:
    """v1 and v2 are READY, v3 lacks half of its slots; g0 and g1 serve v2, g2 serves v1, g3 is torn."""
    api = plane.api
    for uid in ("v1", "v2"):
        await api.make_ready(uid, ttl_s=600)
    await api.create("v3", slots=[f"s{n}" for n in range(8)])
    for n in range(4):
        await api.publish(f"s{n}", "t0", uid="v3")
    for worker, served in (("g0", "v2"), ("g1", "v2"), ("g2", "v1"), ("g3", None)):
        await api.register(worker, GENERATOR, ttl_s=600)
        report = v1.ReportServingRequest(worker_id=worker, version_id=served, uncertain=served is None)
        await api.control.ReportServing(report)
    await api.lease("g0", uid="v2", ttl_s=300)
    return plane
