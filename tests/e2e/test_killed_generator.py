"""A generator that is killed while it holds the lease: the trainer's fence completes within its bound."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from modelexpress_rl import (
    AsyncModelExpressControlClient,
    AsyncModelExpressTrainerClient,
    ModelExpressTrainerConfig,
)
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from tests.e2e.processes import running, serve

pytest.importorskip("nixl")
pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

LEASE_TTL_S = 6
DRAIN_S = 0.5
MARGIN_S = 1.0
BUSY_S = 5.0  # what a loaded machine may add

GENERATOR = f"""
import anyio, os, signal
from modelexpress_rl import AsyncModelExpressGeneratorClient, ModelExpressGeneratorConfig, WeightVersionRef

class Engine:
    def create_adapter(self):
        return self
    def loader(self, published):  # called under the lease
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    config = ModelExpressGeneratorConfig(
        engine_context=Engine(), model_name="m", lease_ttl_seconds={LEASE_TTL_S}
    )
    async with await AsyncModelExpressGeneratorClient.initialize(config) as generator:
        await generator.stage_weight(WeightVersionRef("v1"))

anyio.run(main)
"""


@pytest.mark.parametrize("released_by", ["orchestrator", "trainer"])
async def test_the_fence_completes_within_its_bound(
    released_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    program = tmp_path / "generator.py"
    program.write_text(GENERATOR)
    with serve("memory", 0, "--drain-deadline", "500ms") as (_, address):
        config = ModelExpressTrainerConfig(
            model_name="m",
            device_id=0,
            server_url=address,
            engine_context=PlainTrainerContext({"w": np.ones(8, np.float32)}, slot_id="s"),
            release_grace_seconds=DRAIN_S,
        )
        async with (
            AsyncModelExpressControlClient.connect(address) as control,
            await AsyncModelExpressTrainerClient.initialize(config) as trainer,
        ):
            await control.create_weight_version("m", "k", "FULL_TENSOR", ["s"], uid="v1")
            staged = await trainer.publish_version("v1")
            with running([sys.executable, str(program)], {"MODEL_EXPRESS_URL": address}) as generator:
                code = await anyio.to_thread.run_sync(generator.wait, 60)
            assert code == -signal.SIGKILL, generator.text
            [status] = await control.list_version_statuses("m")
            assert status.live_leases == 1
            if released_by == "orchestrator":
                await control.delete_weight_version("v1")
            else:
                await trainer.release_version("v1")
            assert not staged.source_reuse_ready.ended
            with anyio.fail_after(DRAIN_S + LEASE_TTL_S + MARGIN_S + BUSY_S):
                await staged.source_reuse_ready.wait()
            [status] = await control.list_version_statuses("m")
            assert not status.live_leases
