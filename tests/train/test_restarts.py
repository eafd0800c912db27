"""Publications across a control plane that is restarted, with its store or without; real parts."""

from __future__ import annotations

import pytest

from modelexpress_rl.server.stores.memory import MemoryStore
from statemachines.publication_records import PublicationState as State
from tests.train.support import (
    FaultyControl,
    Orchestrator,
    control_plane,
    eventually,
    rig_of,
    within,
)

pytestmark = pytest.mark.anyio
READY = 2


async def test_one_that_keeps_its_store_goes_on_where_it_was() -> None:
    store = MemoryStore()
    async with control_plane(store=store) as address:
        port = int(address.rpartition(":")[2])
        orchestrator = Orchestrator(address)
        rig_context = rig_of(FaultyControl(address))
        rig = await rig_context.__aenter__()
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
    try:
        async with control_plane(store=store, port=port):
            assert await orchestrator.state("v1") == READY
            assert one.state is State.PUBLISHED
            await orchestrator.create("v2")
            await rig.stage("v2").publish()
            await orchestrator.release("v1")
            await within(10, one.source_reuse_ready)
    finally:
        await rig_context.__aexit__(None, None, None)
        await orchestrator.plane.aclose()


async def test_one_that_comes_back_empty_is_told_again_once_the_version_is_made_again() -> None:
    async with control_plane() as address:
        port = int(address.rpartition(":")[2])
        orchestrator = Orchestrator(address)
        rig_context = rig_of(FaultyControl(address))
        rig = await rig_context.__aenter__()
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
    try:
        async with control_plane(port=port):
            await eventually(lambda: one.state is State.ORPHANED, 10)
            await orchestrator.create("v1")

            async def ready() -> bool:
                return await orchestrator.state("v1") == READY

            await eventually(ready, 10)
            await eventually(lambda: one.state is State.PUBLISHED)
            assert not one.source_reuse_ready.ended
            assert rig.buffers["v1"].released == 0
            assert rig.registration.live
    finally:
        await rig_context.__aexit__(None, None, None)
        await orchestrator.plane.aclose()
