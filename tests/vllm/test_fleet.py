"""A real `vllm serve` in a fleet: it goes with the others, and back with them."""

from __future__ import annotations

import os
from pathlib import Path

import anyio.to_thread
import pytest

from modelexpress_rl.errors import StateError, VersionGone
from modelexpress_rl.fleet import Fleet, FleetAborted, FleetPolicy, Holding, VllmServer
from tests.fleet.fakes import FakeGenerator
from tests.vllm.checkpoints import published, write
from tests.vllm.server import answers, serving, version_of
from tests.vllm.trainers import MODEL, trainer

pytestmark = pytest.mark.anyio
__test__ = os.environ.get("MX_TEST_VLLM") == "all"  # a server of its own takes its time

POLICY = FleetPolicy(stage_timeout_s=120, commit_timeout_s=120, undo_timeout_s=120, attempts=1)


async def test_a_server_goes_with_its_fleet_and_back_with_it(tmp_path: Path, control_plane: str) -> None:
    steps = [write(tmp_path, "qwen3-tied", step) for step in range(3)]
    extension = "modelexpress_rl.inference.engines.vllm.ahead.StagesAhead"
    with (
        serving(steps[0], 1, "--worker-extension-cls", extension) as url,
        trainer(published(steps[1])) as publishing,
    ):
        server, other = VllmServer(url, stages_ahead=True), FakeGenerator(None)
        await server.initialize({"model_name": MODEL})
        assert await server.holds() == Holding(None)
        first = await anyio.to_thread.run_sync(publishing.publish, "one", published(steps[1]))
        async with Fleet(current_version_id=first, policy=POLICY) as fleet:
            await fleet.admit("vllm", server)
            await fleet.admit("other", other)
            of_first = answers(url)
            second = await anyio.to_thread.run_sync(publishing.publish, "two", published(steps[2]))
            other.takes_s = lambda call: 5.0 if call == "install" else 0.01
            other.fails_half_way = 1
            with pytest.raises(FleetAborted, match="half of it") as caught:
                await fleet.update(second)
            assert set(caught.value.report.members) == {"vllm", "other"}
            assert version_of(url) == first
            assert answers(url) == of_first
            with pytest.raises(StateError, match="nobody's was not installed"):
                await server.install("nobody's", hold_s=0)
            assert await server.holds() == Holding(first, held=True)
            await server.resume(first)
            with pytest.raises(VersionGone, match="nobody's is not staged on rank 0"):
                await server.stage("nobody's", keep_s=1)
            assert (await fleet.update(second)).committed
            assert version_of(url) == second
            assert answers(url) != of_first
