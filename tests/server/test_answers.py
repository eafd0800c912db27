"""What each case is answered: every row of the 0.7 wire, over real gRPC."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import grpc
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from tests.server.api import (
    CHECKPOINT,
    DELTA,
    FULL,
    GENERATOR,
    READY,
    RELEASING,
    S3,
    STAGING,
    TRAINER,
    Api,
    Server,
    refused,
    shard_of,
)

pytestmark = pytest.mark.anyio

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
FAILED = grpc.StatusCode.FAILED_PRECONDITION


def s3(uri: str, kind: int = refit.OBJECT_STORAGE_TYPE_S3) -> refit.ObjectStorageSource:
    return refit.ObjectStorageSource(uri=uri, storage_type=kind)


class TestRegisterWorker:
    async def test_a_repeat_renews(self, server: Server, api: Api) -> None:
        first = await api.register("w", ttl_s=10)
        assert first.expires_at_unix_ms == server.clock.now_ms() + 10_000
        server.clock.advance(5_000)
        assert (await api.register("w", ttl_s=10)).expires_at_unix_ms == first.expires_at_unix_ms + 5_000

    async def test_a_shorter_renewal_takes_nothing_away(self, api: Api) -> None:
        first = await api.register("w", ttl_s=100)
        assert (await api.register("w", ttl_s=1)).expires_at_unix_ms == first.expires_at_unix_ms

    async def test_another_role_or_model(self, server: Server, api: Api) -> None:
        await api.register("w", TRAINER, ttl_s=10)
        await refused(api.register("w", GENERATOR), EXISTS, "TRAINER", "GENERATOR")
        await refused(api.register("w", model="other"), EXISTS, "other")
        server.clock.advance(10_000)
        assert (await api.register("w", GENERATOR, model="other")).role == GENERATOR

    @pytest.mark.parametrize(
        ("changed", "field"),
        [
            ({"worker_id": ""}, "worker_id"),
            ({"worker_id": "  \n"}, "worker_id"),
            ({"worker_id": "w" * 1025}, "worker_id"),
            ({"model": ""}, "model_name"),
            ({"role": 0}, "role"),
            ({"role": 9}, "role"),
            ({"ttl_s": 0}, "ttl_seconds"),
            ({"ttl_s": 2**32 - 1}, "ttl_seconds"),
        ],
    )
    async def test_input(self, api: Api, changed: dict[str, Any], field: str) -> None:
        await refused(api.register(**{"worker_id": "w"} | changed), INVALID, field)

    async def test_no_worker_at_all(self, api: Api) -> None:
        await refused(api.refit.RegisterWorker(refit.RegisterWorkerRequest(ttl_seconds=1)), INVALID)


class TestCreateWeightVersion:
    async def test_what_was_asked_for_is_answered(self, server: Server, api: Api) -> None:
        made = await api.create("run:7", key="k")
        assert made == refit.WeightVersion(
            uid="run:7",
            model_name="org/model",
            idempotency_key="k",
            payload_format=FULL,
            expected_source_slots=["s0", "s1"],
            state=STAGING,
            created_at_unix_ms=server.clock.now_ms(),
        )
        assert await api.get("run:7") == made

    async def test_the_server_makes_a_uid(self, api: Api) -> None:
        made = await api.create(None, key="k")
        assert len(made.uid) == 8
        assert set(made.uid) <= set("0123456789abcdef")
        assert (await api.create(None, key="k")).uid == made.uid
        assert (await api.create(None, key="other")).uid != made.uid

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"model": " "}, "model_name"),
            ({"key": ""}, "idempotency_key"),
            ({"uid": ""}, "uid"),
            ({"fmt": 0}, "payload_format"),
            ({"fmt": 7}, "payload_format"),
            ({"state": 0}, "state"),
            ({"state": 9}, "state"),
            ({"base": "b"}, "base_version_id"),
            ({"base": "b", "fmt": CHECKPOINT, "storage": S3}, "base_version_id"),
            ({"fmt": DELTA}, "base_version_id"),
            ({"fmt": DELTA, "base": " "}, "base_version_id"),
            ({"fmt": CHECKPOINT}, "object_storage"),
            ({"storage": s3("s3://b/k", refit.OBJECT_STORAGE_TYPE_AZURE)}, "S3"),
            ({"storage": s3("s3://b/k", refit.OBJECT_STORAGE_TYPE_GCS)}, "S3"),
            ({"storage": s3("s3://b/k", 0)}, "storage_type"),
            ({"storage": s3("s3://b/k", 8)}, "storage_type"),
            ({"storage": s3("")}, "uri"),
            ({"storage": s3("s3://b/k?x=1")}, "uri"),
            ({"storage": s3("s3://b/k#f")}, "uri"),
            ({"storage": s3("s3://b")}, "uri"),
            ({"storage": s3("s3://b/")}, "uri"),
            ({"storage": s3("s3://b//k")}, "uri"),
            ({"storage": s3("s3:///k")}, "uri"),
            ({"storage": s3("gs://b/k")}, "uri"),
            ({"storage": S3, "state": RELEASING}, "state"),
            ({"slots": ()}, "expected_source_slots"),
            ({"slots": ("a", "b", "a")}, "'a'"),
            ({"slots": ("a", " ")}, "expected_source_slots"),
            ({"slots": ("a" * 1025,)}, "expected_source_slots"),
            ({"state": READY}, "READY"),
            ({"state": RELEASING}, "RELEASING"),
        ],
    )
    async def test_input(self, api: Api, changed: dict[str, Any], words: str) -> None:
        await refused(api.create(**changed), INVALID, words)
        await refused(api.get("v"), UNKNOWN)

    async def test_object_storage_together_with_slots(self, api: Api) -> None:
        request = refit.CreateWeightVersionRequest(
            model_name="m",
            idempotency_key="k",
            payload_format=CHECKPOINT,
            expected_source_slots=["s"],
            object_storage=S3,
            state=STAGING,
        )
        await refused(api.refit.CreateWeightVersion(request), INVALID, "object_storage")

    async def test_the_base_of_a_delta(self, api: Api) -> None:
        def delta(uid: str, base: str, **more: Any) -> Any:
            return api.create(uid, fmt=DELTA, base=base, storage=S3, state=READY, **more)

        await refused(delta("d", "unknown"), UNKNOWN, "unknown")
        await api.create("base", fmt=CHECKPOINT, storage=S3)
        await refused(delta("d", "base"), FAILED, "STAGING")
        await api.update("base", READY)
        await refused(delta("d", "base", model="other"), FAILED, "other")
        assert (await delta("d", "base")).base_version_id == "base"
        await api.delete("base")
        await refused(delta("e", "base"), FAILED)
        assert (await delta("d", "base")).uid == "d"  # a repeat, though its base has been released

    async def test_repeats_answer_the_record_whatever_its_state(self, api: Api) -> None:
        made = await api.create("v")
        assert await api.create("v") == made
        await api.register("t0")
        await api.publish("s0", "t0")
        await api.publish("s1", "t0")
        assert (await api.create("v")).state == READY
        await api.delete("v")
        assert (await api.create("v")).state == RELEASING

    async def test_the_same_key_for_another_request(self, api: Api) -> None:
        await api.create("v", key="k")
        await refused(api.create("v", key="k", slots=("s0",)), EXISTS, "'k'", "version v")
        await refused(api.create("w", key="k"), EXISTS)
        await refused(api.create(None, key="k", model="other"), EXISTS)

    async def test_a_uid_that_is_taken_under_another_key(self, api: Api) -> None:
        await api.create("v", key="k")
        await refused(api.create("v", key="other"), EXISTS, "version v already exists")
        assert (await api.create("w", key="other")).uid == "w"  # the refusal has not taken the key

    async def test_object_storage_may_start_ready(self, api: Api) -> None:
        made = await api.create(fmt=CHECKPOINT, storage=S3, state=READY)
        assert (made.state, made.object_storage) == (READY, S3)
        assert await api.shards() == []

    async def test_odd_uids_never_collide(self, api: Api) -> None:
        odd = ("run:7", "..", "foo:shards", "foo", "foo:", "{foo}", "a\0b", "a", "漢字", " v ")
        for uid in odd:
            await api.create(uid)
        await api.delete("foo")
        for uid in odd:
            assert (await api.get(uid)).state == (RELEASING if uid == "foo" else STAGING)


async def test_get_of_an_unknown_version(api: Api) -> None:
    await refused(api.get("v"), UNKNOWN, "version v")
    await refused(api.get(" "), INVALID, "uid")


class TestUpdateWeightVersionState:
    async def test_to_the_state_that_it_has(self, api: Api) -> None:
        await api.create()
        assert (await api.update("v", STAGING)).state == STAGING
        await api.delete()
        assert (await api.update("v", RELEASING)).state == RELEASING

    async def test_of_object_storage(self, api: Api) -> None:
        await api.create(fmt=CHECKPOINT, storage=S3)
        assert (await api.update("v", READY)).state == READY
        assert (await api.update("v", READY)).state == READY
        await refused(api.update("v", STAGING), FAILED, "never goes back")
        assert (await api.update("v", RELEASING)).state == RELEASING
        await refused(api.update("v", READY), FAILED, "never goes back")

    async def test_slots_become_ready_by_publication_only(self, api: Api) -> None:
        await api.create()
        await refused(api.update("v", READY), FAILED, "published")
        assert (await api.update("v", RELEASING)).state == RELEASING
        await refused(api.update("v", STAGING), FAILED)
        await refused(api.update("v", READY), FAILED)

    async def test_a_degraded_version_is_not_made_ready_by_request(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        server.clock.advance(10_000)
        assert (await api.update("v", STAGING)).state == STAGING  # that is what it has
        await refused(api.update("v", READY), FAILED, "live publisher")

    async def test_input(self, api: Api) -> None:
        await refused(api.update("v", READY), UNKNOWN)
        await refused(api.update("", READY), INVALID, "uid")
        await api.create()
        for state in (0, 7):
            await refused(api.update("v", state), INVALID, "state")


async def test_delete_weight_version(api: Api) -> None:
    await refused(api.delete(), UNKNOWN)
    await refused(api.delete(" "), INVALID)
    await api.make_ready()
    assert (await api.delete()).state == RELEASING
    assert (await api.delete()).state == RELEASING
    await api.create("w")
    assert (await api.delete("w")).state == RELEASING


class TestCreateWeightVersionShard:
    async def test_the_last_slot_makes_it_ready_in_the_same_step(self, api: Api) -> None:
        await api.create()
        await api.register("t0")
        answer = await api.publish("s0", "t0")
        assert (answer.shard, answer.version.state) == (shard_of("s0", "t0"), STAGING)
        answer = await api.publish("s1", "t0")
        assert answer.version.state == READY
        assert (await api.get()).state == READY

    async def test_the_order_of_the_checks(self, server: Server, api: Api) -> None:
        await refused(api.publish("odd", "nobody"), UNKNOWN)
        await api.create()
        await refused(api.publish("odd", "nobody"), FAILED, "nobody is not registered")
        await api.register("stranger", model="other")
        await refused(api.publish("odd", "stranger"), FAILED, "other")
        await api.register("t0", ttl_s=10)
        await refused(api.publish("odd", "t0"), INVALID, "'odd'")
        server.clock.advance(10_000)
        await refused(api.publish("s0", "t0"), FAILED, "expired")

    async def test_a_version_that_takes_none(self, api: Api) -> None:
        await api.register("t0")
        await api.create("stored", fmt=CHECKPOINT, storage=S3)
        await refused(api.publish("s0", "t0", uid="stored"), FAILED, "object storage")
        await api.make_ready()
        await api.delete()
        await refused(api.publish("odd", "t0"), FAILED, "RELEASING")

    async def test_repeats_and_other_content(self, api: Api) -> None:
        await api.create()
        await api.register("t0")
        await api.publish("s0", "t0")
        assert (await api.publish("s0", "t0")).shard == shard_of("s0", "t0")
        await refused(api.publish("s0", "t0", digest="e" * 64), EXISTS, "s0", "t0")
        await refused(api.publish("s0", "t0", total_bytes=9), EXISTS)
        assert await api.shards() == [("s0", "t0")]

    async def test_replicas_and_replacements(self, api: Api) -> None:
        await api.make_ready()
        await api.register("replica")
        answer = await api.publish("s0", "replica", digest="e" * 64)
        assert answer.version.state == READY
        assert await api.shards() == [("s0", "replica"), ("s0", "t0"), ("s1", "t1")]

    @pytest.mark.parametrize(
        "field", ["version_id", "source_slot_id", "worker_id", "manifest_digest", "manifest_endpoint"]
    )
    async def test_input(self, api: Api, field: str) -> None:
        shard = shard_of("s0", "t0")
        setattr(shard, field, " ")
        request = refit.CreateWeightVersionShardRequest(shard=shard)
        await refused(api.refit.CreateWeightVersionShard(request), INVALID, field)


class TestListWeightVersionShards:
    async def test_sorted(self, api: Api) -> None:
        await api.create(slots=("b", "a"))
        for worker in ("t2", "t1"):
            await api.register(worker)
            for slot in ("b", "a"):
                await api.publish(slot, worker)
        assert await api.shards() == [("a", "t1"), ("a", "t2"), ("b", "t1"), ("b", "t2")]

    async def test_unknown(self, api: Api) -> None:
        await refused(api.shards(), UNKNOWN)
        await refused(api.shards(" "), INVALID)

    async def test_the_dead_are_left_out(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("short", ttl_s=5)
        await api.publish("s0", "short")
        server.clock.advance(5_000)
        assert await api.shards() == [("s0", "t0"), ("s1", "t1")]


class TestDeleteWeightVersionShard:
    async def test_only_while_releasing_and_unread(self, server: Server, api: Api) -> None:
        await refused(api.withdraw("s0", "t0"), UNKNOWN)
        await api.make_ready()
        await refused(api.withdraw("s0", "t1"), UNKNOWN, "t1", "s0")
        await refused(api.withdraw("s0", "t0"), FAILED)
        await api.register("g", GENERATOR)
        lease = await api.lease("g")
        await api.delete()
        await refused(api.withdraw("s0", "t0"), FAILED, "1 live lease")
        await api.give_back(lease.lease_id, "g")
        assert await api.withdraw("s0", "t0")
        await refused(api.withdraw("s0", "t0"), UNKNOWN)
        assert await api.withdraw("s1", "t1")
        assert (await api.get()).state == RELEASING

    async def test_a_lapsed_lease_is_in_nobodys_way(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        await api.lease("g", ttl_s=5)
        await api.delete()
        server.clock.advance(5_000)
        assert await api.withdraw("s0", "t0")

    async def test_not_found_is_never_said_while_somebody_reads(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        await api.register("g", GENERATOR)
        await api.lease("g", ttl_s=30)
        await api.delete()
        server.clock.advance(10_000)
        await refused(api.withdraw("s0", "t0"), FAILED, "live lease")  # its registration is over, too
        server.clock.advance(20_000)
        await refused(api.withdraw("s0", "t0"), UNKNOWN)

    @pytest.mark.parametrize("blank", ["version_id", "source_slot_id", "worker_id"])
    async def test_input(self, api: Api, blank: str) -> None:
        request = refit.DeleteWeightVersionShardRequest(version_id="v", source_slot_id="s", worker_id="w")
        setattr(request, blank, "")
        await refused(api.refit.DeleteWeightVersionShard(request), INVALID, blank)


class TestRegisterVersionLease:
    async def test_granted_and_renewed(self, server: Server, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = await api.lease("g", ttl_s=10)
        assert lease == refit.VersionLease(
            lease_id=sha256(b"v\0g").hexdigest()[:8],
            version_id="v",
            worker_id="g",
            expires_at_unix_ms=server.clock.now_ms() + 10_000,
        )
        server.clock.advance(4_000)
        assert (await api.lease("g", ttl_s=10)).expires_at_unix_ms == lease.expires_at_unix_ms + 4_000

    async def test_who_may(self, server: Server, api: Api) -> None:
        await refused(api.lease("g"), UNKNOWN)
        await api.make_ready()
        await refused(api.lease("g"), FAILED, "not registered")
        await refused(api.lease("t0"), FAILED, "TRAINER")
        await api.register("stranger", GENERATOR, model="other")
        await refused(api.lease("stranger"), FAILED, "other")
        await api.register("g", GENERATOR, ttl_s=5)
        server.clock.advance(5_000)
        await refused(api.lease("g"), FAILED, "expired")

    async def test_by_state(self, server: Server, api: Api) -> None:
        await api.create("staging")
        await api.register("g", GENERATOR)
        await api.register("late", GENERATOR)
        await refused(api.lease("g", uid="staging"), FAILED, "STAGING")
        await api.make_ready()
        await api.lease("g", ttl_s=10)
        await api.delete()
        await api.lease("g", ttl_s=10)
        await refused(api.lease("late"), FAILED, "RELEASING")
        server.clock.advance(10_000)
        await refused(api.lease("g"), FAILED)

    async def test_no_lease_on_a_version_without_a_live_publisher(self, server: Server, api: Api) -> None:
        await api.make_ready(ttl_s=10)
        await api.register("g", GENERATOR)
        await api.register("t1", ttl_s=60)
        await api.lease("g")
        server.clock.advance(10_000)
        assert (await api.get()).state == STAGING
        await refused(api.lease("g"), FAILED, "DEGRADED")
        await api.register("t0")
        await refused(api.lease("g"), FAILED)  # a new life: what the old one published stays dead
        await api.publish("s0", "t0")
        await api.lease("g")

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"version_id": ""}, "version_id"),
            ({"worker_id": " "}, "worker_id"),
            ({"ttl_seconds": 0}, "ttl_seconds"),
            ({"ttl_seconds": 301}, "at most 300 s"),
        ],
    )
    async def test_input(self, api: Api, changed: dict[str, Any], words: str) -> None:
        fields = {"version_id": "v", "worker_id": "g", "ttl_seconds": 5} | changed
        await refused(
            api.refit.RegisterVersionLease(refit.RegisterVersionLeaseRequest(**fields)), INVALID, words
        )


class TestDeleteVersionLease:
    async def test_once(self, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = await api.lease("g")
        assert await api.give_back(lease.lease_id, "g")
        assert not await api.give_back(lease.lease_id, "g")

    async def test_missing_or_lapsed(self, server: Server, api: Api) -> None:
        assert not await api.give_back("00000000", "g")  # the version is unknown, too
        await api.create("staging")
        assert not await api.give_back("00000000", "g", uid="staging")
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = await api.lease("g", ttl_s=5)
        server.clock.advance(5_000)
        assert not await api.give_back(lease.lease_id, "g")
        await api.delete()
        assert not await api.give_back(lease.lease_id, "g")

    async def test_of_another_worker(self, api: Api) -> None:
        await api.make_ready()
        await api.register("g", GENERATOR)
        lease = await api.lease("g")
        await refused(api.give_back(lease.lease_id, "other"), FAILED, "held by g")
        assert await api.give_back(lease.lease_id, "g")

    @pytest.mark.parametrize("blank", ["version_id", "lease_id", "worker_id"])
    async def test_input(self, api: Api, blank: str) -> None:
        request = refit.DeleteVersionLeaseRequest(version_id="v", lease_id="l", worker_id="w")
        setattr(request, blank, "")
        await refused(api.refit.DeleteVersionLease(request), INVALID, blank)
