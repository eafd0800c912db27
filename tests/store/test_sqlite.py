"""What only a store on disk can get wrong: restarts, locks, full disks, other people's files."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.server.stores import open_store
from modelexpress_rl.server.stores.port import KeyHolder, StoredRecordError, StoreUnavailable
from modelexpress_rl.server.stores.sqlite import SqliteStore
from tests.store.records import entry, spec, worker
from tests.store.test_contract import put, put_worker
from tests.store.virtual_clock import VirtualClock

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


@pytest.fixture
async def store(path: str) -> AsyncIterator[SqliteStore]:
    opened = SqliteStore(path, VirtualClock())
    yield opened
    await opened.close()


class TestRestart:
    async def test_everything_that_was_acknowledged_is_there(self, path: str) -> None:
        clock = VirtualClock()
        first = SqliteStore(path, clock)
        made = await put(first, entry("v", await first.next_sequence()), wake_at_ms=7)
        await put_worker(first, "w", life=await first.next_sequence(), wake_at_ms=8)
        await first.claim_key("k", KeyHolder("v", spec("k")))
        await first.close()

        again = SqliteStore(path, clock)
        assert again.store_id == first.store_id
        stored = (await again.read_version("v")).stored
        assert (stored.entry, stored.revision, stored.wake_at_ms) == (entry("v", 1), made.revision, 7)
        assert (await again.read_workers(["w"])).workers["w"].record == worker("w", life=2)
        assert await again.read_key("k") == KeyHolder("v", spec("k"))
        assert await again.due_workers(8, 10) == ["w"]
        assert await again.next_sequence() > 2
        newer = await put(again, entry("v", 1), expected=made.revision)
        assert newer.revision > made.revision
        await again.close()

    async def test_time_that_passed_while_down_counts(self, path: str) -> None:
        clock = VirtualClock()
        first = SqliteStore(path, clock)
        before = await first.now_ms()
        await first.close()
        clock.advance(60_000)
        again = SqliteStore(path, clock)
        assert await again.now_ms() == before + 60_000
        await again.close()

    async def test_the_clock_does_not_go_back_with_the_machines(self, path: str) -> None:
        first = SqliteStore(path, VirtualClock(5_000_000))
        await put(first, entry("v", 1))
        shown = await first.now_ms()
        await first.close()
        set_back = VirtualClock(1_000_000)
        again = SqliteStore(path, set_back)
        assert await again.now_ms() >= shown
        set_back.advance(10)
        assert await again.now_ms() == shown + 10
        await again.close()

    async def test_a_closed_store_says_so(self, path: str) -> None:
        store = SqliteStore(path)
        await store.close()
        await store.close()
        with pytest.raises(StateError, match="closed"):
            await store.read_version("v")


class TestOpening:
    async def test_a_second_server_is_refused(self, store: SqliteStore, path: str) -> None:
        with pytest.raises(UsageError, match="in use by another server"):
            open_store(f"sqlite:{path}")
        await put(store, entry("v", 1))  # the first one doesn't notice

    def test_a_folder_that_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"missing/store\.db can't be opened: No such file or directory"):
            open_store(f"sqlite:{tmp_path}/missing/store.db")

    def test_a_file_of_something_else(self, path: str) -> None:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE t (x)")
        other.close()
        with pytest.raises(UsageError, match="SQLite file of something else"):
            open_store(f"sqlite:{path}")

    def test_a_file_that_is_no_database(self, path: str) -> None:
        Path(path).write_bytes(b"not a database at all" * 100)
        with pytest.raises(UsageError, match="can't be opened: file is not a database"):
            open_store(f"sqlite:{path}")

    async def test_a_newer_schema(self, path: str) -> None:
        await SqliteStore(path).close()
        with sqlite3.connect(path) as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
        with pytest.raises(UsageError, match="has schema 99, this release uses 1"):
            open_store(f"sqlite:{path}")
        with pytest.raises(UsageError, match="has schema 99"):  # and the refusal lets go of the file
            open_store(f"sqlite:{path}")

    @pytest.mark.parametrize("address", ["", "sqlite", "sqlite:", "memory:x", "redis:x", "file:x"])
    def test_an_address_of_no_kind(self, address: str) -> None:
        with pytest.raises(UsageError, match=r"memory, sqlite:PATH or redis://|address of the Redis store"):
            open_store(address)


class TestTrouble:
    async def test_a_lock_held_by_another_process_is_said_and_bounded(
        self, store: SqliteStore, path: str
    ) -> None:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="locked: another process has held a lock"):
            await put(store, entry("v", 1))
        assert time.monotonic() - started < 10
        assert (await store.read_version("v")).stored is None  # reading goes on
        other.execute("ROLLBACK")
        other.close()
        await put(store, entry("v", 1))
        assert (await store.read_version("v")).stored is not None

    async def test_a_full_disk_is_said_and_loses_nothing(self, store: SqliteStore) -> None:
        made = await put(store, entry("before", 1))
        limit = "PRAGMA max_page_count = 1"  # as many pages as it has, and no more
        await store._database.run(lambda database: database.connection.execute(limit).fetchall())

        async def fill() -> None:
            for sequence in range(2, 500):
                await put(store, entry(f"v{sequence}", sequence, key="k" * 900))

        with pytest.raises(StoreUnavailable, match="full"):
            await fill()
        before = (await store.read_version("before")).stored
        assert (before.entry, before.revision) == (entry("before", 1), made.revision)
        limit = "PRAGMA max_page_count = 1000000"
        await store._database.run(lambda database: database.connection.execute(limit).fetchall())
        after = await put(store, entry("after", 1_000))
        assert after.revision > made.revision

    async def test_one_damaged_record_is_named_and_harms_no_other(
        self, store: SqliteStore, path: str
    ) -> None:
        await put(store, entry("good", 1))
        await put(store, entry("bad", 2))
        store._decoded.clear()
        other = sqlite3.connect(path)
        other.execute("UPDATE versions SET body = '{}', revision = revision + 1 WHERE uid = 'bad'")
        other.commit()
        other.close()
        with pytest.raises(StoredRecordError, match="'bad'"):
            await store.read_version("bad")
        assert (await store.read_version("good")).stored.entry == entry("good", 1)

    async def test_a_fault_of_ours_reaches_the_caller_and_the_thread_goes_on(
        self, store: SqliteStore
    ) -> None:
        with pytest.raises(ZeroDivisionError):
            await store._database.run(lambda database: 1 / 0, writes=True)
        assert isinstance(await store.next_sequence(), int)

    async def test_whoever_stopped_waiting_is_skipped(self, store: SqliteStore, path: str) -> None:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            for n in range(3):
                tasks.start_soon(_quietly_put, store, f"v{n}", n + 1)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        other.execute("ROLLBACK")
        other.close()
        await put(store, entry("w", 9))
        assert (await store.read_version("w")).stored is not None


async def _quietly_put(store: SqliteStore, uid: str, sequence: int) -> None:
    await put(store, entry(uid, sequence))


class TestGroups:
    async def test_what_waits_together_is_one_transaction(self, store: SqliteStore) -> None:
        transactions: list[str] = []
        await store._database.run(
            lambda database: database.connection.set_trace_callback(
                lambda statement: transactions.append(statement) if statement == "COMMIT" else None
            )
        )
        async with anyio.create_task_group() as tasks:
            for n in range(200):
                tasks.start_soon(put_worker, store, f"w{n}")
        assert len((await store.list_workers(None)).workers) == 200
        assert len(transactions) < 20
