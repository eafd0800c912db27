"""What every store must keep; see `modelexpress_rl.server.stores.port`."""

from __future__ import annotations

import anyio
import pytest

from modelexpress_rl.server.stores import open_store
from modelexpress_rl.server.stores.port import (
    Change,
    Committed,
    KeyHolder,
    Place,
    Rejected,
    Store,
    VersionEntry,
)
from tests.store.harness import Harness
from tests.store.records import ODD_IDS, entry, published, retired, spec, worker

pytestmark = pytest.mark.anyio


async def put(
    store: Store,
    new: VersionEntry | None,
    *,
    uid: str | None = None,
    expected: int | None = None,
    valid_until_ms: int | None = None,
    wake_at_ms: int | None = None,
) -> Committed | Rejected:
    assert uid is not None or new is not None
    return await store.commit_version(
        uid if uid is not None else new.record.uid,
        new,
        expected_revision=expected,
        valid_until_ms=valid_until_ms,
        wake_at_ms=wake_at_ms,
    )


async def put_worker(store: Store, worker_id: str, *, expected: int | None = None, **more: object) -> object:
    wake_at_ms, valid = more.pop("wake_at_ms", None), more.pop("valid_until_ms", None)
    return await store.commit_worker(
        worker_id,
        worker(worker_id, **more),
        expected_revision=expected,
        valid_until_ms=valid,
        wake_at_ms=wake_at_ms,
    )


class TestVersions:
    async def test_an_unknown_version_reads_as_none(self, store: Store) -> None:
        assert (await store.read_version("v")).stored is None

    async def test_a_commit_is_read_back(self, store: Store) -> None:
        made = await put(store, entry("v", 1), wake_at_ms=77)
        stored = (await store.read_version("v")).stored
        assert stored.entry == entry("v", 1)
        assert (stored.revision, stored.wake_at_ms) == (made.revision, 77)

    async def test_only_the_current_revision_may_be_replaced(self, store: Store) -> None:
        first = await put(store, entry("v", 1))
        assert await put(store, entry("v", 1)) is Rejected.CONFLICT
        second = await put(store, retired("v", 1), expected=first.revision)
        assert second.revision > first.revision
        assert await put(store, entry("v", 1), expected=first.revision) is Rejected.CONFLICT
        assert await put(store, None, uid="v", expected=first.revision) is Rejected.CONFLICT
        assert (await store.read_version("v")).stored.entry == retired("v", 1)

    async def test_a_version_that_is_not_there_has_no_revision_to_replace(self, store: Store) -> None:
        assert await put(store, entry("v", 1), expected=5) is Rejected.CONFLICT
        assert (await store.read_version("v")).stored is None

    async def test_a_decision_is_late_from_the_moment_that_it_relied_on(
        self, store: Store, harness: Harness
    ) -> None:
        until = harness.clock.now_ms() + 10
        harness.clock.advance(9)
        made = await put(store, entry("v", 1), valid_until_ms=until)
        harness.clock.advance(1)
        late = await put(store, retired("v", 1), expected=made.revision, valid_until_ms=until)
        assert late is Rejected.LATE
        assert (await store.read_version("v")).stored.entry == entry("v", 1)

    async def test_revisions_grow_also_when_a_version_is_made_again(self, store: Store) -> None:
        first = await put(store, entry("v", 1))
        gone = await put(store, None, uid="v", expected=first.revision)
        again = await put(store, entry("v", 2))
        assert first.revision < gone.revision < again.revision

    async def test_one_of_many_racing_commits_wins(self, store: Store) -> None:
        first = await put(store, entry("v", 1))
        results: list[object] = []

        async def race() -> None:
            results.append(await put(store, retired("v", 1), expected=first.revision))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(race)
        assert sum(isinstance(result, Committed) for result in results) == 1
        assert results.count(Rejected.CONFLICT) == 19

    async def test_identities_are_opaque(self, store: Store) -> None:
        for sequence, uid in enumerate(ODD_IDS, 1):
            await put(store, entry(uid, sequence, model=uid))
        for sequence, uid in enumerate(ODD_IDS, 1):
            assert (await store.read_version(uid)).stored.entry == entry(uid, sequence, model=uid)
            assert await store.active_versions(uid) == [uid]
        assert len(await store.list_versions(None, after=None, limit=100)) == len(ODD_IDS)


class TestReadingTogether:
    async def test_a_version_comes_with_its_publishers_and_whoever_is_asked_for(self, store: Store) -> None:
        for name in ("t0", "t1", "t2", "g"):
            await put_worker(store, name)
        read, workers = await store.read_version_and_workers("v", ["g", "nobody"])
        assert (read.stored, set(workers.workers)) == (None, {"g"})
        made = await put(store, published("v", "t0", "t1"))
        for asked, found in (((), {"t0", "t1"}), (("g", "nobody"), {"t0", "t1", "g"})):
            read, workers = await store.read_version_and_workers("v", asked)
            assert read.stored.entry == published("v", "t0", "t1")
            assert set(workers.workers) == found
            assert workers.workers["t0"].record == worker("t0")
        await put(store, published("v", "t2"), expected=made.revision)
        assert set((await store.read_version_and_workers("v", ()))[1].workers) == {"t2"}

    async def test_what_another_server_committed_is_seen(self, store: Store, harness: Harness) -> None:
        if harness.kind in ("memory", "sqlite"):
            return  # one server at a time
        other = open_store(harness.address, harness.clock)
        for name in ("t0", "t1"):
            await put_worker(store, name)
        made = await put(store, published("v", "t0"))
        made = await put(other, published("v", "t1"), expected=made.revision)
        read, workers = await store.read_version_and_workers("v", ())
        assert (read.stored.revision, set(workers.workers)) == (made.revision, {"t1"})
        await other.close()


class TestListing:
    async def test_pages_by_model_and_sequence(self, store: Store) -> None:
        for uid, sequence, model in (("d", 4, "b"), ("a", 1, "b"), ("c", 3, "a"), ("b", 2, "b")):
            await put(store, entry(uid, sequence, model=model))
        everything = await store.list_versions(None, after=None, limit=10)
        assert [one.entry.record.uid for one in everything] == ["c", "a", "b", "d"]
        page = await store.list_versions("b", after=None, limit=2)
        assert [one.entry.record.uid for one in page] == ["a", "b"]
        rest = await store.list_versions("b", after=Place("b", 2), limit=2)
        assert [one.entry.record.uid for one in rest] == ["d"]
        across = await store.list_versions(None, after=Place("a", 3), limit=2)
        assert [one.entry.record.uid for one in across] == ["a", "b"]
        assert await store.list_versions("c", after=None, limit=10) == []
        assert await store.list_versions("b", after=Place("b", 4), limit=10) == []

    async def test_active_ones_leave_when_they_retire_or_go(self, store: Store) -> None:
        made = {uid: await put(store, entry(uid, n)) for n, uid in enumerate("abc", 1)}
        assert await store.active_versions("model") == ["a", "b", "c"]
        await put(store, retired("a", 1), expected=made["a"].revision)
        await put(store, None, uid="b", expected=made["b"].revision)
        assert await store.active_versions("model") == ["c"]
        listed = await store.list_versions("model", after=None, limit=10)
        assert [one.entry.record.uid for one in listed] == ["a", "c"]


class TestWakes:
    async def test_due_ones_come_longest_overdue_first_and_stay_due(self, store: Store) -> None:
        for uid, sequence, wake in (("a", 1, 300), ("b", 2, 100), ("c", 3, 200), ("d", 4, None)):
            await put(store, entry(uid, sequence), wake_at_ms=wake)
        assert await store.due_versions(99, 10) == []
        assert await store.due_versions(200, 10) == ["b", "c"]
        assert await store.due_versions(1_000, 2) == ["b", "c"]
        assert await store.due_versions(1_000, 10) == ["b", "c", "a"]

    async def test_a_commit_moves_the_wake_and_an_erasure_ends_it(self, store: Store) -> None:
        made = await put(store, entry("a", 1), wake_at_ms=100)
        made = await put(store, entry("a", 1), expected=made.revision, wake_at_ms=500)
        assert await store.due_versions(499, 10) == []
        assert await store.next_wake_ms() == 500
        await put(store, None, uid="a", expected=made.revision)
        assert await store.due_versions(500, 10) == []
        assert await store.next_wake_ms() is None

    async def test_rearming_changes_nothing_else(self, store: Store) -> None:
        made = await put(store, entry("a", 1), wake_at_ms=100)
        await store.rearm("a", expected_revision=made.revision, wake_at_ms=200)
        await store.rearm("a", expected_revision=made.revision + 1, wake_at_ms=300)
        await store.rearm("unknown", expected_revision=1, wake_at_ms=50)
        stored = (await store.read_version("a")).stored
        assert (stored.revision, stored.wake_at_ms, stored.entry) == (made.revision, 200, entry("a", 1))
        assert await store.next_wake_ms() == 200

    async def test_workers_wake_too(self, store: Store) -> None:
        await put(store, entry("a", 1), wake_at_ms=300)
        made = await put_worker(store, "w", wake_at_ms=200)
        assert await store.next_wake_ms() == 200
        assert await store.due_workers(200, 10) == ["w"]
        await put_worker(store, "w", expected=made.revision, wake_at_ms=900)
        assert await store.due_workers(200, 10) == []
        assert await store.next_wake_ms() == 300

    async def test_many_renewals_leave_one_wake(self, store: Store) -> None:
        made = await put_worker(store, "w", wake_at_ms=1)
        for wake in range(2, 200):
            made = await put_worker(store, "w", expected=made.revision, wake_at_ms=wake)
        assert await store.next_wake_ms() == 199
        assert await store.due_workers(10_000, 10) == ["w"]


class TestKeys:
    async def test_the_first_claim_wins(self, store: Store) -> None:
        mine, theirs = KeyHolder("a", spec("k")), KeyHolder("b", spec("k", "other"))
        assert await store.read_key("k") is None
        assert await store.claim_key("k", mine) == mine
        assert await store.claim_key("k", theirs) == mine
        assert await store.read_key("k") == mine

    async def test_keys_are_opaque(self, store: Store) -> None:
        for key in ODD_IDS:
            assert await store.claim_key(key, KeyHolder(key, spec(key))) == KeyHolder(key, spec(key))

    async def test_erasing_frees_the_own_key_only(self, store: Store) -> None:
        await store.claim_key("k", KeyHolder("a", spec("k")))
        await store.claim_key("other", KeyHolder("b", spec("other")))
        made = await put(store, entry("a", 1, key="k"))
        await put(store, None, uid="a", expected=made.revision)
        assert await store.read_key("k") is None
        assert await store.read_key("other") == KeyHolder("b", spec("other"))

    async def test_only_the_holder_frees(self, store: Store) -> None:
        await store.claim_key("k", KeyHolder("a", spec("k")))
        await store.free_key("k", "b")
        assert await store.read_key("k") is not None
        await store.free_key("k", "a")
        await store.free_key("k", "a")
        assert await store.read_key("k") is None

    async def test_orphans_are_purged_and_renewed_claims_are_not(
        self, store: Store, harness: Harness
    ) -> None:
        start = harness.clock.now_ms()
        for uid in ("made", "orphan", "retried"):
            await store.claim_key(uid, KeyHolder(uid, spec(uid)))
        await put(store, entry("made", 1, key="made"))
        harness.clock.advance(1_000)
        await store.claim_key("retried", KeyHolder("retried", spec("retried")))
        assert await store.purge_keys(start + 500) == 1
        assert [await store.read_key(uid) is None for uid in ("made", "orphan", "retried")] == [
            False,
            True,
            False,
        ]

    async def test_a_version_is_committed_while_its_claim_is_safe_or_not_at_all(
        self, store: Store, harness: Harness
    ) -> None:
        ttl_ms, start = 1_000, harness.clock.now_ms()
        for uid in ("early", "late"):
            await store.claim_key(uid, KeyHolder(uid, spec(uid)))
        harness.clock.advance(ttl_ms - 1)
        made = await put(store, entry("early", 1, key="early"), valid_until_ms=start + ttl_ms)
        assert isinstance(made, Committed)
        assert await store.purge_keys(harness.clock.now_ms() - ttl_ms) == 0
        harness.clock.advance(1)
        late = await put(store, entry("late", 2, key="late"), valid_until_ms=start + ttl_ms)
        assert late is Rejected.LATE
        assert await store.purge_keys(harness.clock.now_ms() - ttl_ms) == 0  # it is purged only later still
        harness.clock.advance(1)
        assert await store.purge_keys(harness.clock.now_ms() - ttl_ms) == 1
        assert await store.read_key("late") is None
        assert await store.read_key("early") == KeyHolder("early", spec("early"))
        assert await store.purge_keys(harness.clock.now_ms() + 1) == 0


class TestWorkers:
    async def test_compare_and_set(self, store: Store, harness: Harness) -> None:
        made = await put_worker(store, "w", life=1)
        assert await put_worker(store, "w", life=2) is Rejected.CONFLICT
        late = await put_worker(
            store, "w", life=2, expected=made.revision, valid_until_ms=harness.clock.now_ms()
        )
        assert late is Rejected.LATE
        stored = (await store.read_workers(["w"])).workers["w"]
        assert (stored.record, stored.revision) == (worker("w", life=1), made.revision)
        gone = await store.commit_worker(
            "w", None, expected_revision=made.revision, valid_until_ms=None, wake_at_ms=None
        )
        assert gone.revision > made.revision
        assert (await store.read_workers(["w"])).workers == {}

    async def test_many_are_read_at_once(self, store: Store, harness: Harness) -> None:
        names = [f"w{n}" for n in range(1_200)]
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(put_worker, store, name)
        read = await store.read_workers([*names, "unknown"])
        assert set(read.workers) == set(names)
        assert read.now_ms == harness.clock.now_ms()
        assert (await store.read_workers([])).workers == {}

    async def test_listing_by_model(self, store: Store) -> None:
        for name in ODD_IDS:
            await put_worker(store, name, model=name)
        assert set((await store.list_workers(None)).workers) == set(ODD_IDS)
        for name in ODD_IDS:
            assert list((await store.list_workers(name)).workers) == [name]


class TestNumbersAndTime:
    async def test_sequences_grow(self, store: Store) -> None:
        numbers = [await store.next_sequence() for _ in range(5)]
        assert numbers == sorted(set(numbers))

    async def test_the_clock_is_the_one_given(self, store: Store, harness: Harness) -> None:
        assert await store.now_ms() == harness.clock.now_ms()
        harness.clock.advance(5)
        assert (await store.read_version("v")).now_ms == harness.clock.now_ms()


class TestChanges:
    async def test_each_commit_is_told_and_rejections_are_not(self, store: Store) -> None:
        async with store.changes() as changes:
            made = await put(store, entry("v", 1))
            assert await anext(changes) == Change("v", "model")
            await put(store, entry("v", 1))  # a conflict
            await store.rearm("v", expected_revision=made.revision, wake_at_ms=5)
            await put(store, None, uid="v", expected=made.revision)
            assert await anext(changes) == Change("v", "model")
            with anyio.move_on_after(0.05) as nothing_more:
                await anext(changes)
            assert nothing_more.cancelled_caught

    async def test_a_slow_subscriber_holds_one_change_per_version(self, store: Store) -> None:
        async with store.changes() as slow, store.changes() as quick:
            made = await put(store, entry("v", 1))
            await anext(quick)
            for _ in range(50):
                made = await put(store, entry("v", 1), expected=made.revision)
                await anext(quick)
            await put(store, entry("w", 2))
            assert [await anext(slow), await anext(slow)] == [Change("v", "model"), Change("w", "model")]
