"""Quotas and the sizes of fields: who is refused, in which words, and who is not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc import ControlPlane, ResourceExhausted
from modelexpress_rl.server.quotas import ModelQuota, QuotaExceeded
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.memory import MemoryStore
from statemachines.ids import ModelName
from tests.server.api import GENERATOR, MODEL, S3, Server, eventually, refused, server_on, shard_of
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@contextlib.asynccontextmanager
async def server_with(**settings: object) -> AsyncIterator[Server]:
    clock = VirtualClock()
    async with server_on(MemoryStore(clock), clock, Settings(**settings)) as server:  # type: ignore[arg-type]
        yield server


class TestVersions:
    async def test_of_one_model(self) -> None:
        async with server_with(max_versions_per_model=3) as server:
            api = server.api
            for n in range(3):
                await api.create(f"v{n}")
            await refused(
                api.create("v3"), EXHAUSTED, MODEL, "3 versions", "quota is 3", "--max-versions-per-model"
            )
            assert (await api.create("v1")).uid == "v1"  # a repeat is none more
            await api.create("other", model="another/model")
            await api.delete("v0")  # nobody publishes it: it is retired at once
            await api.create("v3")
            await refused(api.create("v4"), EXHAUSTED)

    async def test_a_refused_one_leaves_nothing(self) -> None:
        async with server_with(max_versions_per_model=1) as server:
            api = server.api
            await api.create("a")
            await refused(api.create("b", key="k"), EXHAUSTED)
            assert await server.running.registry.store.read_key("k") is None
            await api.delete("a")
            assert (await api.create("c", key="k", slots=["other"])).uid == "c"

    async def test_a_released_one_that_is_still_read_counts(self) -> None:
        async with server_with(max_versions_per_model=1, drain_deadline_ms=1_000) as server:
            api = server.api
            await api.make_ready("a", ttl_s=600)
            await api.delete("a")
            await refused(api.create("b"), EXHAUSTED)
            await api.withdraw("s0", "t0", uid="a")
            await api.withdraw("s1", "t1", uid="a")
            await api.create("b")

    async def test_our_client_does_not_try_again(self) -> None:
        async with server_with(max_versions_per_model=1) as server:
            await server.api.create("a")
            async with ControlPlane.dial(server.running.address) as plane:
                with pytest.raises(ResourceExhausted, match="--max-versions-per-model"):
                    await plane.create_weight_version(
                        refit.CreateWeightVersionRequest(
                            model_name=MODEL,
                            idempotency_key="k",
                            payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
                            expected_source_slots=["s"],
                            state=refit.WEIGHT_VERSION_STATE_STAGING,
                        )
                    )


class TestShards:
    async def test_slots_of_a_new_version(self) -> None:
        async with server_with(max_shards_per_version=4) as server:
            await server.api.create("fits", slots=[f"s{n}" for n in range(4)])
            create = server.api.create("wide", slots=[f"s{n}" for n in range(5)])
            await refused(create, EXHAUSTED, "5 slots", "quota is 4", "--max-shards-per-version")

    async def test_replicas(self) -> None:
        async with server_with(max_shards_per_version=3) as server:
            api = server.api
            await api.create(slots=["s0", "s1"])
            for worker in ("t0", "t1", "t2", "t3"):
                await api.register(worker, ttl_s=60 if worker == "t1" else 600)
            for worker in ("t0", "t1", "t2"):
                await api.publish("s0", worker)
            await refused(api.publish("s1", "t3"), EXHAUSTED, "version v", "4 slots or", "quota is 3")
            await api.publish("s0", "t2")  # a repeat is none more
            assert len(await api.shards()) == 3
            await server.pass_time(61)  # t1 is dead, and what it published counts no more
            await api.publish("s1", "t3")

    async def test_one_refused_leaves_the_others_of_its_group(self) -> None:
        async with server_with(max_shards_per_version=2) as server:
            api = server.api
            await api.create(slots=["s0", "s1"])
            for n in range(6):
                await api.register(f"t{n}")
            answers: list[str] = []

            async def publish(worker: str, slot: str) -> None:
                try:
                    await api.publish(slot, worker)
                    answers.append("OK")
                except grpc.aio.AioRpcError as error:
                    answers.append(error.code().name)

            async with anyio.create_task_group() as tasks:
                for n in range(6):
                    tasks.start_soon(publish, f"t{n}", f"s{n % 2}")
            assert sorted(answers) == ["OK"] * 2 + ["RESOURCE_EXHAUSTED"] * 4


class TestWorkers:
    async def test_of_one_model(self) -> None:
        async with server_with(max_workers_per_model=2, retention_ms=10_000) as server:
            api = server.api
            await api.register("t0", ttl_s=5)
            await api.register("g0", GENERATOR, ttl_s=600)
            await refused(api.register("t1"), EXHAUSTED, MODEL, "2 workers", "--max-workers-per-model")
            await api.register("g0", GENERATOR, ttl_s=600)  # a renewal
            await api.register("t1", model="another/model")
            await server.pass_time(6)
            await refused(api.register("t1x"), EXHAUSTED)  # t0 is expired, and still remembered
            await api.register("t0", ttl_s=5)  # a new life of it is no new worker
            await server.pass_time(16)
            await api.register("t1x")


class TestCounting:
    async def test_it_looks_now_and_then_and_always_at_the_quota(self) -> None:
        now_s, looks, number = 0.0, 0, 0

        async def count(model_name: ModelName) -> int:
            nonlocal looks
            looks += 1
            return number

        quota = ModelQuota(5, count, "{model_name} has {number} of {most}", clock=lambda: now_s)
        model = ModelName("m{x}")
        for _ in range(5):
            await quota.require_room(model)
        assert looks == 1
        number = 5
        for _ in range(2):
            with pytest.raises(QuotaExceeded, match=r"'m\{x\}' has 5 of 5"):
                await quota.require_room(model)
        assert looks == 3
        number = 1  # some were released
        await quota.require_room(model)
        assert looks == 4
        number = 5  # another server added some
        now_s = 11.0
        with pytest.raises(QuotaExceeded):
            await quota.require_room(model)

    async def test_what_it_remembers_is_bounded(self) -> None:
        async def count(model_name: ModelName) -> int:
            return 0

        quota = ModelQuota(5, count, "")
        for n in range(2_000):
            await quota.require_room(ModelName(f"m{n}"))
        assert len(quota._known) == 1024


class TestFields:
    """What is longer than a record should hold is refused, and the refusal names the field."""

    LONG = "x" * 1025

    async def test_every_text(self, server: Server) -> None:
        api, long = server.api, self.LONG
        for call, field in (
            (api.register(long), "worker.worker_id"),
            (api.register("w", model=long), "worker.model_name"),
            (api.create(long), "uid"),
            (api.create("v", key=long), "idempotency_key"),
            (api.create("v", model=long), "model_name"),
            (api.create("v", slots=[long]), "expected_source_slots"),
            (api.create("v", fmt=refit.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA, base=long), "base_version_id"),
            (api.get(long), "uid"),
            (api.update(long, refit.WEIGHT_VERSION_STATE_READY), "uid"),
            (api.delete(long), "uid"),
            (api.publish(long, "t"), "shard.source_slot_id"),
            (api.publish("s", long), "shard.worker_id"),
            (api.publish("s", "t", uid=long), "shard.version_id"),
            (api.publish("s", "t", digest=long), "shard.manifest_digest"),
            (api.shards(long), "version_id"),
            (api.withdraw(long, "t"), "source_slot_id"),
            (api.withdraw("s", long), "worker_id"),
            (api.lease(long), "worker_id"),
            (api.give_back(long, "g"), "lease_id"),
            (api.control.ListVersions(v1.ListVersionsRequest(model_name=long)), "model_name"),
            (api.control.ListVersions(v1.ListVersionsRequest(page_token=self.LONG * 8)), "page_token"),
            (api.control.ListWorkers(v1.ListWorkersRequest(model_name=long)), "model_name"),
        ):
            await refused(call, INVALID, field)  # type: ignore[arg-type]
        shard = shard_of("s", "t")
        shard.manifest_endpoint = long
        request = refit.CreateWeightVersionShardRequest(shard=shard)
        await refused(api.refit.CreateWeightVersionShard(request), INVALID, "shard.manifest_endpoint")
        storage = refit.ObjectStorageSource(uri="s3://b/" + "k" * 4096, storage_type=S3.storage_type)
        create = api.create(fmt=refit.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT, storage=storage)
        await refused(create, INVALID, "object_storage.uri")


class TestKeepLast:
    async def test_each_model_has_its_own(self) -> None:
        async with server_with(keep_last=3, keep_last_for={"org/model": 1, "kept/all": 0}) as server:
            api = server.api
            await api.register("t", ttl_s=600)
            for model in ("org/model", "kept/all", "m"):
                await api.register(f"t {model}", model=model, ttl_s=600)
                for n in range(5):
                    await api.create(f"{model} {n}", model=model, slots=["s"])
                    await api.publish("s", f"t {model}", uid=f"{model} {n}")

            async def unreleased(model: str) -> list[str]:
                listed = await api.control.ListVersions(v1.ListVersionsRequest(model_name=model))
                ready = v1.VERSION_STATE_READY
                return [each.version.uid[-1] for each in listed.versions if each.status.state == ready]

            async def as_said() -> bool:
                kept = [await unreleased(model) for model in ("org/model", "kept/all", "m")]
                return kept == [["4"], ["0", "1", "2", "3", "4"], ["2", "3", "4"]]

            await eventually(as_said)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"keep_last_for": {"m": -1}}, "keep_last for 'm'"),
            ({"max_versions_per_model": 0}, "max_versions_per_model"),
            ({"max_shards_per_version": 0}, "max_shards_per_version"),
            ({"max_workers_per_model": -1}, "max_workers_per_model"),
        ],
    )
    def test_settings_that_make_no_sense(self, settings: dict[str, object], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            Settings(**settings)  # type: ignore[arg-type]
