"""What goes on once publish_version has returned, and what becomes of it where it is cut off or fails."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import numpy as np
import pytest

from modelexpress_rl.errors import DeadlineExceeded, FenceBroken, StateError
from modelexpress_rl.train.client import ModelExpressTrainerClient
from tests.train.gate import Gate
from tests.train.job import Job, bytes_of, weights
from tests.train.support import eventually, within

pytestmark = pytest.mark.anyio


def states(client: Any) -> list[str]:
    pool = client._runtime._method._stager.generations
    return [one.record.state.value for one in pool.generations]


COPY = {"staging_mode": "COPY_TO_HOST"}


async def test_tensors_that_were_made_in_inference_mode_are_captured(job: Job) -> None:
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        tensors = {"w": torch.ones(10)}
    async with await job.open(tensors, overlap="CAPTURE", **COPY) as client:
        await job.orchestrator.create("v1")
        staged = await client.publish_version("v1")
        await within(5, staged.published)


class TestPublish:
    async def test_it_returns_before_the_control_plane_has_answered(self, job: Job) -> None:
        tensors = weights()
        async with await job.open(tensors, overlap="PUBLISH", **COPY) as client:
            await job.orchestrator.create("v1")
            before = bytes_of(tensors)
            staged = await client.publish_version("v1")
            assert staged.weights_free is staged.publish_ready
            assert staged.weights_free.done
            assert not staged.published.ended
            for tensor in tensors.values():
                tensor += 1
            metrics = client.pop_metrics()  # what the trainer waited for, at once
            assert {"trainer_refit_e2e_s", "copy_s", "generation_wait_s"} <= set(metrics)
            assert (metrics["generation"], metrics["skipped"], metrics["generations"]) == (1, 0, 1)
            await within(5, staged.published)
            assert await job.read("v1") == before
            await job.orchestrator.create("v2")
            await client.publish_version("v2")
            assert client.pop_metrics()["background_publish_s"] > 0

    async def test_what_is_refused_is_told_and_the_next_one_is_fine(
        self, job: Job, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with await job.open(weights(), overlap="PUBLISH", **COPY) as client:
            staged = await client.publish_version("unknown")
            with pytest.raises(FenceBroken, match=r"published of version unknown.*refused"):
                await within(5, staged.published)
            await within(5, staged.source_reuse_ready)
            assert "version unknown in slot" in caplog.text
            assert states(client) == ["FREE"]
            await job.orchestrator.create("v1")
            await (await client.publish_version("v1")).publish()
            assert client.pop_metrics()["background_failures"] == 1
            assert await job.read("v1") == bytes_of(weights())

    async def test_in_place_the_weights_are_free_when_nobody_reads(self, job: Job) -> None:
        async with await job.open(weights(), overlap="PUBLISH") as client:
            await job.orchestrator.create("v1")
            staged = await client.publish_version("v1")
            assert staged.weights_free is staged.source_reuse_ready
            await staged.publish()
            assert not staged.weights_free.ended
            await job.orchestrator.release("v1")
            await within(5, staged.weights_free)

    async def test_tensors_that_are_made_anew_for_each_version(self, job: Job) -> None:
        async with await job.open(overlap="PUBLISH", **COPY) as client:
            for step in range(3):
                tensors = {"a": np.full(100, step, np.float32)}
                await job.orchestrator.create(f"v{step}")
                staged = await client.publish_version(f"v{step}", tensors)
                await staged.publish()
                assert await job.read(f"v{step}") == bytes_of(tensors)
                await within(5, staged.release())


class TestCapture:
    async def test_it_returns_while_the_copy_runs(self, job: Job, gate: Gate) -> None:
        tensors = weights()
        async with await job.open(tensors, overlap="CAPTURE", **COPY) as client:
            await job.orchestrator.create("v1")
            gate.hold()
            staged = await client.publish_version("v1")
            assert (await client.publish_version("v1")).source_reuse_ready is staged.source_reuse_ready
            await gate.held()
            assert not staged.weights_free.ended
            assert states(client) == ["CAPTURING"]
            gate.open.set()
            await within(5, staged.weights_free)
            before = bytes_of(tensors)
            for tensor in tensors.values():
                tensor += 1
            await staged.publish()
            assert await job.read("v1") == before

    async def test_a_capture_that_fails_half_way_is_told_and_the_same_version_can_be_tried_again(
        self, job: Job, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with await job.open(weights(), overlap="CAPTURE", **COPY) as client:
            await job.orchestrator.create("v1")
            gate.failures = 1
            staged = await client.publish_version("v1")
            for fence in (staged.weights_free, staged.published, staged.source_reuse_ready):
                with pytest.raises(FenceBroken, match="the second half did not fit"):
                    await within(5, fence)
            with pytest.raises((FenceBroken, StateError)):
                await staged.publish()
            assert "not captured" in caplog.text
            assert states(client) == ["FREE"]
            again = await client.publish_version("v1")
            await again.publish()
            assert await job.read("v1") == bytes_of(weights())

    async def test_a_failure_in_the_foreground_is_raised(self, job: Job, gate: Gate) -> None:
        async with await job.open(weights(), **COPY) as client:
            await job.orchestrator.create("v1")
            gate.failures = 1
            with pytest.raises(MemoryError):
                await client.publish_version("v1")
            assert states(client) == ["FREE"]
            await client.publish_version("v1")
            assert await job.read("v1") == bytes_of(weights())

    async def test_a_version_that_is_released_meanwhile_leaves_the_memory_to_the_next_once_the_copy_ended(
        self, job: Job, gate: Gate
    ) -> None:
        async with await job.open(
            weights(), overlap="CAPTURE", generations=1, staging_timeout_seconds=5, **COPY
        ) as client:
            for version in ("v1", "v2"):
                await job.orchestrator.create(version)
            gate.hold()
            staged = await client.publish_version("v1")
            await gate.held()
            await client.release_version("v1")
            with pytest.raises(FenceBroken, match="it was released while it was being captured"):
                await within(5, staged.weights_free)
            assert states(client) == ["STOPPING"]
            async with anyio.create_task_group() as group:
                group.start_soon(client.publish_version, "v2")
                await anyio.wait_all_tasks_blocked()
                gate.open.set()
            assert await self._read(job, "v2") == bytes_of(weights())

    async def _read(self, job: Job, version: str) -> dict[str, bytes]:
        await eventually(lambda: self._listed(job, version))
        return await job.read(version)

    async def _listed(self, job: Job, version: str) -> bool:
        return bool(await job.orchestrator.shards(version))

    async def test_released_before_the_rest_of_the_capture_began(self, job: Job, gate: Gate) -> None:
        async with await job.open(weights(), overlap="CAPTURE", **COPY) as client:
            gate.hold()
            staged = await client.publish_version("v1")
            staged.release()  # in the same turn of the loop
            with pytest.raises(FenceBroken, match="released while"):
                await within(5, staged.publish_ready)
            gate.open.set()
            await eventually(lambda: states(client) == ["FREE"])

    async def test_close_during_a_capture_is_bounded_and_breaks_the_fences(
        self, job: Job, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = await job.open(weights(), overlap="CAPTURE", **COPY)
        gate.hold()
        staged = await client.publish_version("v1")
        await gate.held()
        async with anyio.create_task_group() as group:
            group.start_soon(client.close)
            await anyio.wait_all_tasks_blocked()
            gate.open.set()
        for fence in (staged.weights_free, staged.published, staged.source_reuse_ready):
            with pytest.raises(FenceBroken):
                await within(1, fence)
        assert job.agents[0].table.all() == []  # type: ignore[attr-defined]
        assert "failed" not in caplog.text

    async def test_a_publish_that_is_cancelled_while_it_copies_leaves_nothing_stuck(
        self, job: Job, gate: Gate
    ) -> None:
        async with await job.open(weights(), generations=1, staging_timeout_seconds=2, **COPY) as client:
            for version in ("v1", "v2"):
                await job.orchestrator.create(version)
            gate.hold()
            scope = anyio.CancelScope()

            async def publish() -> None:
                with scope:
                    await client.publish_version("v1")

            async with anyio.create_task_group() as group:
                group.start_soon(publish)
                await gate.held()
                scope.cancel()
                gate.open.set()
            await within(5, await client.release_version("v1"))
            await client.publish_version("v2")
            assert await job.read("v2") == bytes_of(weights())


class TestSlowReaders:
    async def test_skip_says_clearly_what_it_did(self, job: Job, caplog: pytest.LogCaptureFixture) -> None:
        async with await job.open(weights(), overlap="CAPTURE", back_pressure="SKIP", **COPY) as client:
            assert client.room == 2
            for version in ("v1", "v2", "v3"):
                await job.orchestrator.create(version)
            one = await client.publish_version("v1")
            await one.publish()
            await (await client.publish_version("v2")).publish()
            assert client.room == 0
            skipped = await client.publish_version("v3")
            assert (skipped.skipped, one.skipped) == (True, False)
            assert (skipped.version_id, skipped.source_slot_id) == ("v3", "s")
            for fence in (skipped.publish_ready, skipped.published):
                with pytest.raises(FenceBroken, match=r"v3: skipped: 2 of 2 are held by version v1 \(SERV"):
                    await fence.wait()
            assert skipped.weights_free.done
            assert skipped.source_reuse_ready.done
            await skipped.publish()
            assert await job.orchestrator.shards("v3") == []
            assert "version v3 in slot s: not published" in caplog.text
            metrics = client.pop_metrics()
            assert (metrics["skipped"], metrics["versions_skipped"], metrics["generations"]) == (1, 1, 2)
            await within(5, one.release())
            again = await client.publish_version("v3")
            await again.publish()
            assert await job.read("v3") == bytes_of(weights())

    async def test_grow_is_bounded_and_seen(self, job: Job) -> None:
        async with await job.open(
            weights(), back_pressure="GROW", max_generations=3, staging_timeout_seconds=0.1, **COPY
        ) as client:
            for number in range(4):
                await job.orchestrator.create(f"v{number}")
            for number in range(3):
                await client.publish_version(f"v{number}")
            metrics = client.pop_metrics()
            assert (metrics["generations"], metrics["generations_grown"]) == (3, 1)
            with pytest.raises(DeadlineExceeded, match="3 of 3 are held"):
                await client.publish_version("v3")
            assert client.pop_metrics()["generation_wait_s"] >= 0.1
            for number in range(3):
                assert await job.read(f"v{number}") == bytes_of(weights())

    async def test_a_reader_that_was_killed_holds_a_generation_no_longer_than_its_lease(
        self, job: Job
    ) -> None:
        async with await job.open(weights(), overlap="PUBLISH", generations=1, **COPY) as client:
            for version in ("v1", "v2"):
                await job.orchestrator.create(version)
            await (await client.publish_version("v1")).publish()
            await job.orchestrator.lease("v1", ttl_ms=300)  # and never heard of again
            await job.orchestrator.release("v1")
            await eventually(lambda: states(client) == ["DRAINING"])
            with anyio.fail_after(10):
                staged = await client.publish_version("v2")
                await staged.publish()
            assert await job.read("v2") == bytes_of(weights())


class TestBlocking:
    async def test_the_blocking_client_has_the_same(self, job: Job, gate: Gate) -> None:
        tensors = weights()
        for version in ("v1", "v2"):
            await job.orchestrator.create(version)

        def train() -> dict[str, bytes]:
            config = job.config(tensors, overlap="CAPTURE", back_pressure="SKIP", generations=1, **COPY)
            with ModelExpressTrainerClient.initialize(config, create_agent=job.agent) as client:
                assert client.room == 1
                gate.hold()
                staged = client.publish_version("v1")
                assert not staged.weights_free.done
                gate.open.set()
                staged.weights_free.wait(5)
                staged.published.wait(5)
                assert client.publish_version("v2").skipped
                staged.release().wait(5)
                after = bytes_of(tensors)
                client.publish_version("v2").publish()
                read.append(1)
                done.wait(10)
                return after

        read: list[int] = []
        done = threading.Event()
        got: list[dict[str, bytes]] = []
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, lambda: got.append(train()))
            try:
                await eventually(lambda: read)
                seen = await job.read("v2")
            finally:
                done.set()
        assert got == [seen]
