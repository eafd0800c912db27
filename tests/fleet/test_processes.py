"""A fleet of three processes over NIXL, with a real trainer and control plane, of which one is killed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
import pytest
import torch

from modelexpress_rl import (
    AsyncModelExpressControlClient,
    AsyncModelExpressTrainerClient,
    ModelExpressTrainerConfig,
)
from modelexpress_rl.fleet import Fleet, FleetAborted, FleetPolicy
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from statemachines.fleet_records import Held
from tests.e2e.processes import Running, running, serve
from tests.fleet.generator_process import MODEL, SIZE, digest_of
from tests.fleet.remote import RemoteGenerator

pytest.importorskip("nixl")
pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

START_S = 60.0
POLICY = FleetPolicy(stage_timeout_s=60, commit_timeout_s=20, undo_timeout_s=30, attempts=2)


class Job:
    """A trainer in this process, and generators in others."""

    def __init__(
        self,
        address: str,
        control: AsyncModelExpressControlClient,
        trainer: AsyncModelExpressTrainerClient,
        weights: dict[str, torch.Tensor],
        stack: contextlib.ExitStack,
    ) -> None:
        self._address = address
        self._control = control
        self._trainer = trainer
        self._weights = weights
        self._stack = stack
        self.digests: dict[str, str] = {}
        self.processes: dict[str, Running] = {}
        self.generators: dict[str, RemoteGenerator] = {}

    async def publish(self, version: str) -> None:
        """Publish weights that no other version has in any place."""
        for weight in self._weights.values():
            weight += 1 + torch.rand_like(weight)
        self.digests[version] = digest_of(*self._weights.values())
        await self._control.create_weight_version(MODEL, version, "FULL_TENSOR", ["t"], uid=version)
        await self._trainer.publish_version(version)
        await self._control.wait_for_state(version, "READY", timeout=30)

    async def release(self, version: str) -> None:
        await self._control.delete_weight_version(version)
        await self._trainer.release_version(version)

    async def start(self, *names: str) -> None:
        command = [sys.executable, "-m", "tests.fleet.generator_process"]
        for name in names:
            self.processes[name] = self._stack.enter_context(
                running([*command, f"{name}-{len(self.processes)}"], {"MODEL_EXPRESS_URL": self._address})
            )
        for name in names:
            line = await anyio.to_thread.run_sync(self.processes[name].wait_for_line, "port ", START_S)
            self.generators[name] = RemoteGenerator(int(line.split()[1]))

    async def hold(self, version: str, *names: str) -> bool:
        """Whether each of these processes has every byte of the version, and serves."""
        for name in names:
            generator = self.generators[name]
            assert await generator.ask("digest") == self.digests[version], name
            assert not await generator.ask("is_paused"), name
        return True


@pytest.fixture
async def job(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Job]:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    weights = {"model.weight": torch.zeros(SIZE, SIZE), "model.bias": torch.zeros(SIZE)}
    with serve() as (_, address), contextlib.ExitStack() as stack:
        config = ModelExpressTrainerConfig(
            model_name=MODEL,
            device_id=0,
            server_url=address,
            staging_mode="COPY_TO_HOST",
            engine_context=PlainTrainerContext(weights, slot_id="t"),
        )
        async with (
            AsyncModelExpressControlClient.connect(address) as control,
            await AsyncModelExpressTrainerClient.initialize(config) as trainer,
        ):
            yield Job(address, control, trainer, weights, stack)


async def test_three_processes_of_which_one_is_killed_between_stage_and_commit(job: Job) -> None:
    await job.publish("v1")
    await job.start("g0", "g1", "g2")
    async with Fleet(current_version_id="v1", policy=POLICY) as fleet:
        for name, generator in job.generators.items():
            await fleet.admit(name, generator)
        assert await job.hold("v1", "g0", "g1", "g2")
        await job.publish("v2")
        async with fleet.updating("v2") as update:
            await update.staged()
            assert await job.hold("v1", "g0", "g1", "g2")  # v2 lies beside it
            job.processes["g2"].process.kill()
            with pytest.raises(FleetAborted) as caught:
                await update.commit()
        assert await job.hold("v1", "g0", "g1")
        report = caught.value.report
        assert (report.members, list(report.out)) == (("g0", "g1"), ["g2"])
        assert report.holds["g2"] == Held("v1", certain=False)
        assert report.holds["g0"] == report.holds["g1"] == Held("v1")

        assert (await fleet.update("v2")).members == ("g0", "g1")
        assert await job.hold("v2", "g0", "g1")
        await job.start("g2")
        await fleet.admit("g2", job.generators["g2"])
        assert await job.hold("v2", "g0", "g1", "g2")

        await job.release("v1")
        await job.publish("v3")
        two = FleetPolicy(quorum=2, stage_timeout_s=60, commit_timeout_s=20, grace_s=5, attempts=2)
        async with fleet.updating("v3", policy=two) as update:
            await update.staged()
            job.processes["g0"].process.kill()
            report = await update.commit()
        assert report.members == ("g1", "g2")
        assert await job.hold("v3", "g1", "g2")
