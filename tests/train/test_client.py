"""The trainer clients end to end: a real control plane, the in-process transport, bytes compared."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import numpy as np
import pytest

from modelexpress_rl import rpc
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import DeadlineExceeded, FenceBroken, StateError, UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.reshard import manifest_columns
from modelexpress_rl.reshard.digests import decode_digests
from modelexpress_rl.rpc.endpoint import ACCEPT_MANIFEST_HEADER
from modelexpress_rl.train.client import ModelExpressTrainerClient
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext
from modelexpress_rl.version import WeightVersionRef
from tests.train.job import Job, bytes_of, weights
from tests.train.support import SLOT, within

pytestmark = pytest.mark.anyio
READY = 2


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MODEL_NAME", "MX_WORKER_GRPC_PORT", "MX_METADATA_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")


MODES = [
    TrainerStagingMode.IN_PLACE,
    TrainerStagingMode.COPY_TO_HOST,
    TrainerStagingMode.COPY_TO_DEVICE,
]


class TestPublishing:
    @pytest.mark.parametrize("mode", MODES)
    async def test_readers_get_the_bytes_of_every_version(self, job: Job, mode: TrainerStagingMode) -> None:
        tensors = weights()
        async with await job.open(staging_mode=mode) as client:
            assert await client.bind_tensors(tensors) == SLOT == client.source_slot_id
            for step in range(4):
                for tensor in tensors.values():
                    tensor += 1
                version = f"v{step}"
                await job.orchestrator.create(version)
                staged = await client.publish_version(WeightVersionRef(version))
                assert staged.publish_ready.done
                assert await job.orchestrator.state(version) == READY
                assert await job.read(version) == bytes_of(tensors)
                await job.orchestrator.release(version)
                await within(5, staged.source_reuse_ready)

    @pytest.mark.parametrize("bad", ["\ud800", "", 5, None, "x" * 5000], ids=ascii)
    async def test_what_is_no_version_ends_its_own_call_only(self, job: Job, bad: Any) -> None:
        tensors = weights()
        async with await job.open(tensors) as client:
            for call in (client.stage_shard, client.publish_version, client.release_version):
                with pytest.raises(UsageError, match="version_id"):
                    await call(bad)
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
            assert await job.read("v1") == bytes_of(tensors)

    @pytest.mark.parametrize("bad", ["\ud800", 5, "x" * 5000], ids=ascii)
    async def test_what_is_no_slot_is_refused_before_it_is_announced(self, job: Job, bad: Any) -> None:
        async with await job.open(engine_context=PlainTrainerContext(slot_id=bad)) as client:
            with pytest.raises(UsageError, match="the slot of the tensors"):
                await client.bind_tensors(weights())
            with pytest.raises(UsageError, match="the slot of the tensors"):
                await client.stage_shard("v1", weights())
            assert client._background.failure is None

    @pytest.mark.parametrize("name", ["", "a\n", "\ud800", 5, "x" * 5000], ids=ascii)
    async def test_a_tensor_whose_name_no_reader_takes_is_refused_at_once(self, job: Job, name: Any) -> None:
        async with await job.open({name: np.zeros(3)}) as client:
            await job.orchestrator.create("v1")
            with pytest.raises(UsageError, match="a name must be a printable string"):
                await client.publish_version("v1")

    async def test_a_box_in_two_places_is_refused_and_in_one_place_twice_is_not(self, job: Job) -> None:
        here, there = np.zeros(3), np.ones(3)
        boxes = [PlainBox("a", here), PlainBox("a", here), PlainBox("b", there[:0]), PlainBox("b", here[:0])]
        async with await job.open(boxes) as client:
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
        async with await job.open() as client:
            with pytest.raises(UsageError, match=r"tensor 'a': offset \(0,\) shape \(3,\) is given twice"):
                await client.bind_tensors([PlainBox("a", here), PlainBox("a", there)])

    async def test_a_copy_is_not_reached_by_the_next_step(self, job: Job) -> None:
        tensors = weights()
        async with await job.open(tensors, staging_mode="COPY_TO_HOST") as client:
            await job.orchestrator.create("v1")
            before = bytes_of(tensors)
            await client.publish_version("v1")
            for tensor in tensors.values():
                tensor += 1
            assert await job.read("v1") == before

    async def test_boxes_keep_their_place_in_the_global_tensor(self, job: Job) -> None:
        part = np.arange(6, dtype=np.float32).reshape(2, 3)
        async with await job.open([PlainBox("w", part, full_shape=(4, 6), offset=(2, 3))]) as client:
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
            found, shard = await job.manifest("v1")
            assert found.table.tensors.shape(0) == (4, 6)
            assert found.table.box(0) == ((2, 3), (2, 3))
            assert (shard.tensor_count, shard.total_bytes) == (1, 24)
            assert found.agent_name == f"trainer-{client.worker_id}-{socket.gethostname()}"

    async def test_who_asks_for_columns_gets_them(self, job: Job) -> None:
        async with await job.open(weights()) as client:
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
            found, shard = await job.manifest("v1")
            async with rpc.WorkerEndpoint(rpc.parse_address(client.worker_endpoint)) as endpoint:
                answer = await endpoint.get_weight_version_shard_manifest(
                    refit.GetWeightVersionShardManifestRequest(version_id="v1", source_slot_id=SLOT),
                    metadata={ACCEPT_MANIFEST_HEADER: manifest_columns.NAME},
                )
            assert manifest_columns.is_columnar(answer.manifest)
            again = manifest_columns.decode_announced(answer.manifest, shard.manifest_digest)
            assert manifests.encode(again) == manifests.encode(found)

    async def test_digests_are_served_for_what_is_published(self, job: Job) -> None:
        tensors = weights()
        async with await job.open(tensors) as client:
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
            found, shard = await job.manifest("v1")
            async with rpc.WorkerEndpoint(rpc.parse_address(client.worker_endpoint)) as endpoint:
                answer = await endpoint.get_shard_digests(
                    v1.GetShardDigestsRequest(version_id="v1", source_slot_id=SLOT)
                )
                table = decode_digests(answer.digests, found.table, shard.manifest_digest)
                assert len(table.digests) >= len(tensors)
                with pytest.raises(rpc.NotFound):
                    await endpoint.get_shard_digests(
                        v1.GetShardDigestsRequest(version_id="v2", source_slot_id=SLOT)
                    )

    async def test_the_manifest_is_made_once_for_the_same_memory(self, job: Job) -> None:
        async with await job.open(weights()) as client:
            digests = set()
            for version in ("v1", "v2", "v3"):
                await job.orchestrator.create(version)
                await client.publish_version(version)
                digests.add((await job.manifest(version))[1].manifest_digest)
            assert len(digests) == 1


class TestStagingTwice:
    async def test_the_same_tensors_again_are_a_no_op(self, job: Job) -> None:
        async with await job.open(weights()) as client:
            await job.orchestrator.create("v1")
            first = await client.stage_shard("v1")
            second = await client.stage_shard("v1")
            assert first.source_reuse_ready is second.source_reuse_ready
            await second.publish()
            await first.publish()

    async def test_other_tensors_are_refused_and_the_first_stay_readable(self, job: Job) -> None:
        first, second = weights(), weights()
        async with await job.open() as client:
            await job.orchestrator.create("v1")
            staged = await client.stage_shard("v1", tensors=first)
            await staged.publish()
            with pytest.raises(StateError, match=r"3 tensors of 118 bytes.*a second publication of it"):
                await client.stage_shard("v1", tensors=second)
            assert await job.read("v1") == bytes_of(first)

    async def test_two_at_once_are_one(self, job: Job) -> None:
        async with await job.open(weights(), staging_mode="COPY_TO_HOST") as client:
            fences = []

            async def stage() -> None:
                fences.append((await client.stage_shard("v1")).source_reuse_ready)

            async with anyio.create_task_group() as group:
                group.start_soon(stage)
                group.start_soon(stage)
            assert fences[0] is fences[1]


class TestReplicas:
    async def test_two_ranks_of_one_partition_publish_one_slot(self, job: Job) -> None:
        await job.orchestrator.create("v1")
        async with await job.open(weights()) as one, await job.open(weights()) as two:
            first, second = await one.publish_version("v1"), await two.publish_version("v1")
            shards = await job.orchestrator.shards("v1")
            assert {shard.worker_id for shard in shards} == {one.worker_id, two.worker_id}
            # One of them may leave: the other one keeps the version READY.
            await within(5, first.release())
            assert await job.orchestrator.state("v1") == READY
            assert await job.read("v1") == bytes_of(weights())
            assert not second.source_reuse_ready.ended


class TestMovedTensors:
    async def test_a_bound_tensor_whose_storage_moved_is_named(self, job: Job) -> None:
        torch = pytest.importorskip("torch")
        tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
        async with await job.open(tensors) as client:
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
            tensors["b"].data = torch.ones(4)
            with pytest.raises(StateError, match="tensor 'b': its storage moved since it was bound"):
                await client.stage_shard("v2")

    async def test_given_tensors_may_lie_elsewhere_every_time(self, job: Job) -> None:
        async with await job.open() as client:
            for step in range(3):
                version, tensors = f"v{step}", {"a": np.full(5, step, np.float32)}
                await job.orchestrator.create(version)
                staged = await client.stage_shard(version, tensors=tensors)
                await staged.publish()
                assert await job.read(version) == bytes_of(tensors)
                await within(5, staged.release())

    async def test_versions_of_other_tensors_that_are_staged_at_once(self, job: Job) -> None:
        """What one registers was deregistered by the other, before the first had lent it (seed 502)."""
        tensors = {f"v{step}": {"a": np.full(5, step, np.float32)} for step in range(3)}
        async with await job.open() as client:

            async def publish(version: str) -> None:
                await (await client.stage_shard(version, tensors=tensors[version])).publish()

            for version in tensors:
                await job.orchestrator.create(version)
            async with anyio.create_task_group() as group:
                for version in tensors:
                    group.start_soon(publish, version)
            for version, held in tensors.items():
                assert await job.read(version) == bytes_of(held)


class TestArenas:
    async def test_the_next_version_is_captured_while_one_is_read(self, job: Job) -> None:
        async with await job.open(
            weights(), staging_mode="COPY_TO_HOST", staging_timeout_seconds=0.1
        ) as client:
            for version in ("v1", "v2", "v3"):
                await job.orchestrator.create(version)
            one = await client.publish_version("v1")
            lease = await job.orchestrator.lease("v1")
            await client.publish_version("v2")
            with pytest.raises(DeadlineExceeded, match=r"held by version v1 \(SERVING\), version v2"):
                await client.stage_shard("v3")
            one.release()
            await job.orchestrator.return_lease("v1", lease)
            await within(5, one.source_reuse_ready)
            await client.publish_version("v3")
            addresses = {
                int((await job.manifest(version))[0].table.addr.min()) // 4096 for version in ("v2", "v3")
            }
            assert len(addresses) == 2


class TestMetrics:
    async def test_they_are_numbers_and_handed_out_once(self, job: Job) -> None:
        async with await job.open(weights()) as client:
            assert client.pop_metrics() == {}
            await job.orchestrator.create("v1")
            await client.publish_version("v1")
            metrics = client.pop_metrics()
            assert {"trainer_refit_e2e_s", "source_preparation_s", "rollout_readiness_s", "bytes"} <= set(
                metrics
            )
            assert all(isinstance(value, (int, float)) for value in metrics.values())
            assert metrics["bytes"] == 118
            assert client.pop_metrics() == {}

    async def test_a_failed_refit_leaves_a_record_too(self, job: Job) -> None:
        async with await job.open(weights()) as client:
            with pytest.raises(rpc.NotFound):
                await client.publish_version("unknown")
            assert client.pop_metrics()["trainer_refit_e2e_s"] > 0


class TestTheEnd:
    async def test_close_leaves_nothing_behind(self, job: Job) -> None:
        await job.orchestrator.create("v1")
        client = await job.open(weights())
        staged = await client.publish_version("v1")
        await client.close()
        await client.close()
        assert staged.source_reuse_ready.done
        for use in (client.publish_version, client.stage_shard, client.bind_tensors):
            with pytest.raises(StateError, match="closed"):
                await use("v2")
        with pytest.raises(rpc.Unavailable):
            async with rpc.WorkerEndpoint(rpc.parse_address(client.worker_endpoint)) as endpoint:
                await endpoint.get_weight_version_shard_manifest(
                    refit.GetWeightVersionShardManifestRequest(version_id="v1", source_slot_id=SLOT)
                )

    async def test_close_says_good_bye(self, job: Job) -> None:
        client = await job.open(weights())
        await client.close()
        answer = await job.orchestrator.plane.list_workers(v1.ListWorkersRequest())
        assert client.worker_id not in [worker.worker_id for worker in answer.workers]

    async def test_close_with_a_reader_is_bounded_and_breaks_the_fence(self, job: Job) -> None:
        await job.orchestrator.create("v1")
        client = await job.open(weights(), close_timeout_seconds=0.2)
        staged = await client.publish_version("v1")
        await job.orchestrator.lease("v1")
        with anyio.fail_after(5):
            await client.close()
        with pytest.raises(FenceBroken):
            await staged.source_reuse_ready.wait()

    async def test_after_a_crash_of_the_background_calls_say_so_and_close_works(
        self, job: Job, caplog: pytest.LogCaptureFixture
    ) -> None:
        await job.orchestrator.create("v1")
        client = await job.open(weights())
        staged = await client.publish_version("v1")

        async def crash() -> None:
            raise RuntimeError("a fault of ours")

        client._background.spawn(crash)
        with pytest.raises(FenceBroken, match="a fault of ours"):
            await within(5, staged.source_reuse_ready)
        with pytest.raises(StateError, match="a background task crashed"):
            await client.stage_shard("v2")
        caplog.clear()
        await client.close()
        assert "failed" not in caplog.text

    async def test_a_control_plane_that_is_not_there_is_an_error_and_leaves_nothing(self, job: Job) -> None:
        with pytest.raises(rpc.Unavailable):
            await job.open(weights(), server_url="127.0.0.1:1", rpc_timeout_seconds=0.3)
        [agent] = job.agents
        with pytest.raises(StateError, match="closed"):
            await agent.metadata()


class TestPorts:
    async def test_two_publishers_on_one_host_have_two_ports(self, job: Job) -> None:
        async with await job.open(weights()) as one, await job.open(weights()) as two:
            assert one.worker_endpoint != two.worker_endpoint
            for version, client in (("v1", one), ("v2", two)):
                await job.orchestrator.create(version)
                await client.publish_version(version)
                assert (await job.manifest(version))[1].manifest_endpoint == client.worker_endpoint

    async def test_a_configured_port_that_is_taken_is_a_clear_error(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            monkeypatch.setenv("MX_WORKER_GRPC_PORT", str(port))
            with pytest.raises(UsageError, match=rf"MX_WORKER_GRPC_PORT.*{port}.*taken"):
                await job.open(weights())

    async def test_a_configured_port_is_used_plus_the_device_index(
        self, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        monkeypatch.setenv("MX_WORKER_GRPC_PORT", str(port - 3))
        async with await job.open(weights(), device_id=3) as client:
            assert client.worker_endpoint == f"127.0.0.1:{port}"


class TestBlocking:
    async def test_the_facade_does_the_same(self, job: Job) -> None:
        await job.orchestrator.create("v1")
        tensors = weights()
        config = job.config()

        def train() -> tuple[str, Any, Any]:
            with ModelExpressTrainerClient.initialize(config, create_agent=job.agent) as client:
                slot = client.bind_tensors(tensors)
                staged = client.publish_version("v1")
                staged.publish()
                metrics = client.pop_metrics()
                with pytest.raises(DeadlineExceeded):
                    staged.source_reuse_ready.wait(timeout_s=0.05)
                with pytest.raises(StateError, match="prepare_delta_base"):
                    client.prepare_delta_base([])
                fence = client.release_version("v1")
                fence.wait(timeout_s=5)
                assert staged.source_reuse_ready.done
                pid, client._portal._pid = client._portal._pid, -1  # as in a forked child
                client.close()
                client._portal._pid = pid
                assert not client._portal.closed
                return slot, metrics, client

        slot, metrics, client = await anyio.to_thread.run_sync(train)
        assert slot == SLOT
        assert metrics["tensors"] == 3
        client.close()

    async def test_a_blocking_wait_in_a_coroutine_is_refused(self, job: Job) -> None:
        async with await job.open(weights()) as client:
            staged = await client.stage_shard("v1")
            with pytest.raises(StateError, match="await wait"):
                staged.source_reuse_ready.wait_blocking(1)
