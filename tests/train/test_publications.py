"""Publications against a real control plane: what is announced, drained, refused, lost and given back."""

from __future__ import annotations

import gc

import anyio
import grpc
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import FenceBroken, StateError, Unavailable
from modelexpress_rl.rpc import FailedPrecondition, NotFound, RpcError, WorkerEndpoint, parse_address
from modelexpress_rl.train.fences import Fence
from modelexpress_rl.train.publication import Publication
from statemachines.publication_records import PublicationState as State
from tests.train.support import (
    SLOT,
    Buffer,
    FaultyControl,
    Orchestrator,
    Rig,
    eventually,
    rig_of,
    staged_data,
    within,
)

pytestmark = pytest.mark.anyio
READY, RELEASING = 2, 3


async def manifest_of(rig: Rig, version_id: str) -> refit.GetWeightVersionShardManifestResponse:
    async with WorkerEndpoint(parse_address(rig.service.endpoint)) as endpoint:
        request = refit.GetWeightVersionShardManifestRequest(version_id=version_id, source_slot_id=SLOT)
        return await endpoint.get_weight_version_shard_manifest(request)


class TestTheOrdinaryWay:
    async def test_published_ready_served_released_reusable(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        assert one.publish_ready.done
        await one.publish()
        assert await orchestrator.state("v1") == READY
        [shard] = await orchestrator.shards("v1")
        served = await manifest_of(rig, "v1")
        assert served.manifest == b"manifest of buffer of v1"
        assert shard.manifest_digest == served.manifest_digest
        assert shard.manifest_endpoint == rig.service.endpoint
        await orchestrator.release("v1")
        await within(5, one.source_reuse_ready)
        assert one.state is State.REUSABLE
        assert rig.buffers["v1"].released == 1
        with pytest.raises(NotFound):
            await manifest_of(rig, "v1")
        assert await orchestrator.shards("v1") == []
        assert rig.publications.live == ()

    async def test_publish_is_idempotent(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        async with anyio.create_task_group() as both:
            both.start_soon(one.publish)
            both.start_soon(one.publish)
        await one.publish()
        assert len(await orchestrator.shards("v1")) == 1

    async def test_a_staged_version_that_was_never_published_is_given_back_at_once(self, rig: Rig) -> None:
        one = rig.stage("v1")
        assert rig.publications.release("v1") is one.source_reuse_ready
        assert one.source_reuse_ready.done
        assert rig.buffers["v1"].released == 1
        with pytest.raises(StateError, match="version v1 in slot s is REUSABLE: it can't be published"):
            await one.publish()

    async def test_what_is_not_staged_here_has_nothing_to_wait_for(self, rig: Rig) -> None:
        assert rig.publications.release("unknown").done

    async def test_a_version_may_be_staged_again_after_its_end(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        first = rig.stage("v1")
        rig.publications.release("v1")
        await orchestrator.create("v1")
        second = rig.stage("v1", Buffer("another"))
        assert second is not first
        await second.publish()
        assert await orchestrator.state("v1") == READY


class TestASecondPublication:
    async def test_with_other_buffers_is_refused_and_the_first_keeps_its_own(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        first = Buffer("the first tensors")
        one = rig.stage("v1", first)
        await one.publish()
        with pytest.raises(StateError) as caught:
            rig.stage("v1", Buffer("the second tensors"))
        for part in ("version v1 in slot s", "the first tensors", "the second tensors", "PUBLISHED"):
            assert part in str(caught.value)
        assert first.released == 0
        assert one.state is State.PUBLISHED
        assert (await manifest_of(rig, "v1")).manifest == b"manifest of the first tensors"

    async def test_the_same_again_is_a_no_op(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        assert rig.stage("v1") is one
        await one.publish()
        assert rig.stage("v1") is one
        await rig.stage("v1").publish()
        assert rig.buffers["v1"].released == 0


class TestReaders:
    async def test_the_fence_waits_for_the_last_lease(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
        lease = await orchestrator.lease("v1")
        await orchestrator.release("v1")
        rig.publications.release("v1")
        await eventually(lambda: one.state is State.DRAINING)
        with pytest.raises(TimeoutError):
            await within(0.2, one.source_reuse_ready)
        assert (await manifest_of(rig, "v1")).manifest
        await orchestrator.return_lease("v1", lease)
        await within(5, one.source_reuse_ready)

    async def test_a_reader_that_died_holds_the_fence_for_its_lease_only(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
        await orchestrator.lease("v1", ttl_ms=400)
        await orchestrator.release("v1")
        await within(5, one.source_reuse_ready)

    async def test_a_version_that_nobody_releases_has_its_shard_retracted(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
        lease = await orchestrator.lease("v1")
        rig.publications.release("v1")
        await eventually(lambda: "RetractShard" in rig.control.calls)  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            await within(0.2, one.source_reuse_ready)
        assert await orchestrator.shards("v1") == []
        await orchestrator.return_lease("v1", lease)
        await within(5, one.source_reuse_ready)

    async def test_a_version_that_nobody_ever_read_is_given_back_at_once(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1", SLOT, "another slot")
        one = rig.stage("v1")
        await one.publish()
        rig.publications.release("v1")
        await within(5, one.source_reuse_ready)

    async def test_without_our_service_the_version_is_released_and_polled(
        self, address: str, orchestrator: Orchestrator
    ) -> None:
        async with rig_of(FaultyControl(address, modern=False)) as rig:
            await orchestrator.create("v1")
            one = rig.stage("v1")
            await one.publish()
            lease = await orchestrator.lease("v1")
            rig.publications.release("v1")

            async def released() -> bool:
                return await orchestrator.state("v1") == RELEASING

            await eventually(released)
            with pytest.raises(TimeoutError):
                await within(0.2, one.source_reuse_ready)
            await orchestrator.return_lease("v1", lease)
            await within(5, one.source_reuse_ready)


class TestRefusals:
    async def test_a_version_that_is_being_released(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1")
        await orchestrator.release("v1")
        one = rig.stage("v1")
        with pytest.raises(FailedPrecondition) as caught:
            await one.publish()
        assert isinstance(caught.value, grpc.RpcError)
        assert one.source_reuse_ready.done
        assert rig.buffers["v1"].released == 1
        assert not rig.service.served

    async def test_an_unknown_version(self, rig: Rig) -> None:
        one = rig.stage("v1")
        with pytest.raises(NotFound):
            await one.publish()
        assert one.source_reuse_ready.done

    async def test_a_slot_that_is_not_expected(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1", "another slot")
        one = rig.stage("v1")
        with pytest.raises(RpcError, match="does not expect slot 's'"):
            await one.publish()
        assert one.source_reuse_ready.done


class TestLostReplies:
    async def test_one_lost_reply_is_confirmed_by_the_repeat(
        self, rig: Rig, control: FaultyControl, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        control.faults["CreateWeightVersionShard"] = ["lost"]
        one = rig.stage("v1")
        await one.publish()
        assert await orchestrator.state("v1") == READY
        assert rig.buffers["v1"].released == 0
        await orchestrator.release("v1")
        await within(5, one.source_reuse_ready)
        assert rig.buffers["v1"].released == 1

    async def test_replies_that_are_all_lost_count_as_announced(
        self, address: str, orchestrator: Orchestrator
    ) -> None:
        control = FaultyControl(address, rpc_timeout_s=0.3)
        control.always["CreateWeightVersionShard"] = "lost"
        async with rig_of(control, rpc_timeout_s=0.3) as rig:
            await orchestrator.create("v1")
            one = rig.stage("v1")
            with pytest.raises(Unavailable, match="it counts as announced and goes on in the background"):
                await one.publish()
            assert await orchestrator.state("v1") == READY
            # A reader got hold of it: neither may the buffer be freed early ...
            lease = await orchestrator.lease("v1")
            rig.publications.release("v1")
            await orchestrator.release("v1")
            with pytest.raises(TimeoutError):
                await within(0.2, one.source_reuse_ready)
            assert rig.buffers["v1"].released == 0
            # ... nor leak once it is read.
            await orchestrator.return_lease("v1", lease)
            await within(5, one.source_reuse_ready)
            assert rig.buffers["v1"].released == 1

    async def test_the_announcement_goes_on_after_publish_gave_up(
        self, address: str, orchestrator: Orchestrator
    ) -> None:
        control = FaultyControl(address)
        control.always["CreateWeightVersionShard"] = "unsent"
        async with rig_of(control, rpc_timeout_s=0.2) as rig:
            await orchestrator.create("v1")
            one = rig.stage("v1")
            with pytest.raises(Unavailable):
                await one.publish()
            del control.always["CreateWeightVersionShard"]

            async def ready() -> bool:
                return await orchestrator.state("v1") == READY

            await eventually(ready)
            await one.publish()

    async def test_a_release_right_after_an_unheard_announcement_waits_for_its_readers(
        self, rig: Rig, control: FaultyControl, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        control.faults["CreateWeightVersionShard"] = ["lost"] * 50
        one = rig.stage("v1")
        async with anyio.create_task_group() as group:
            group.start_soon(_publish_quietly, one)
            await eventually(lambda: one.state is State.PUBLISHED)
            lease = await orchestrator.lease("v1")
            rig.publications.release("v1")
            with pytest.raises(TimeoutError):
                await within(0.3, one.source_reuse_ready)
            await orchestrator.return_lease("v1", lease)
            await within(5, one.source_reuse_ready)


async def _publish_quietly(one: Publication) -> None:
    with pytest.raises((StateError, Unavailable)):
        await one.publish()


class TestTheEnd:
    async def test_close_gives_back_what_nobody_reads(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1")
        one, two = rig.stage("v1"), rig.stage("v2")
        await one.publish()
        await rig.publications.aclose(5.0)
        assert one.source_reuse_ready.done
        assert two.source_reuse_ready.done
        with pytest.raises(StateError, match="closed"):
            rig.stage("v3")

    async def test_close_breaks_the_fence_where_somebody_still_reads(
        self, rig: Rig, orchestrator: Orchestrator
    ) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
        await orchestrator.lease("v1")
        await rig.publications.aclose(0.2)
        with pytest.raises(FenceBroken, match="closed before the readers of this version had drained"):
            await one.source_reuse_ready.wait()
        assert not rig.service.served

    async def test_close_while_draining_does_not_wait_for_the_grace(
        self, address: str, orchestrator: Orchestrator
    ) -> None:
        async with rig_of(FaultyControl(address), release_grace_s=60) as rig:
            await orchestrator.create("v1")
            one = rig.stage("v1")
            await one.publish()
            rig.publications.release("v1")
            await rig.publications.aclose(5.0)
            assert one.source_reuse_ready.done

    async def test_a_capture_that_is_released_is_cancelled(self, rig: Rig) -> None:
        publication, _ = rig.publications.begin("v1", SLOT, "x")
        async with anyio.create_task_group() as group:
            group.start_soon(_capture_for_ever, publication)
            await anyio.wait_all_tasks_blocked()
            rig.publications.release("v1")
        for fence in (publication.publish_ready, publication.source_reuse_ready):
            with pytest.raises(FenceBroken, match="released while it was being captured"):
                await fence.wait()
        assert rig.publications.live == ()

    async def test_a_capture_under_way_at_close_breaks_its_fences(self, rig: Rig) -> None:
        publication, _ = rig.publications.begin("v1", SLOT, "x")
        async with anyio.create_task_group() as group:
            group.start_soon(_capture_for_ever, publication)
            await anyio.wait_all_tasks_blocked()
            await rig.publications.aclose(1.0)
        with pytest.raises(FenceBroken, match="closed while the version was being captured"):
            await publication.publish_ready.wait()

    async def test_a_capture_that_fails_breaks_its_fences_with_the_reason(self, rig: Rig) -> None:
        publication, _ = rig.publications.begin("v1", SLOT, "x")
        with pytest.raises(ValueError, match="no such tensor"), publication.capturing():
            raise ValueError("no such tensor")
        with pytest.raises(FenceBroken, match="no such tensor"):
            await publication.source_reuse_ready.wait()

    async def test_a_crash_of_the_background_leaves_no_fence_open(self, rig: Rig) -> None:
        one = rig.stage("v1")

        async def crash() -> None:
            raise RuntimeError("a fault of ours")

        rig.background.spawn(crash)
        with pytest.raises(FenceBroken, match="a fault of ours"):
            await within(5, one.source_reuse_ready)

    async def test_the_fence_outlives_every_handle(self, rig: Rig, orchestrator: Orchestrator) -> None:
        await orchestrator.create("v1")
        one = rig.stage("v1")
        await one.publish()
        fence = one.source_reuse_ready
        del one
        gc.collect()
        await orchestrator.release("v1")
        await within(5, fence)


class TestTheEnginesOwnFence:
    async def test_it_is_waited_for_too(self, rig: Rig) -> None:
        engine = Fence("the engine's")
        one = rig.stage("v1", source_reuse_ready=engine)
        rig.publications.release("v1")
        await anyio.wait_all_tasks_blocked()
        assert not one.source_reuse_ready.ended
        assert rig.buffers["v1"].released == 0
        engine.complete()
        await within(5, one.source_reuse_ready)
        assert rig.buffers["v1"].released == 1

    async def test_one_that_nobody_completes_breaks_ours_in_time(self, control: FaultyControl) -> None:
        async with rig_of(control, engine_fence_timeout_s=0.05) as rig:
            one = rig.stage("v1", source_reuse_ready=Fence("the engine's"))
            rig.publications.release("v1")
            with pytest.raises(FenceBroken, match=r"not complete after 0.05 s"):
                await within(5, one.source_reuse_ready)


async def _capture_for_ever(publication: Publication) -> None:
    async def capture() -> None:
        with publication.capturing():
            await anyio.sleep_forever()
            publication.captured(staged_data(Buffer()))

    with pytest.raises(StateError, match="released while it was being captured"):
        await capture()
