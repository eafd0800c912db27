"""One SQLite connection on a thread of its own, which commits what is waiting in groups.

Everything that waits when the thread comes round is one transaction, with one sync to the disk, and
nobody is answered before it is over. So a thousand renewals cost tens of syncs, and what was answered
survives the process and the machine.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.server.clock import Clock, StoreClock
from modelexpress_rl.server.stores.port import StoredRecordError, StoreUnavailable

T = TypeVar("T")

GROUP = 256
BUSY_TIMEOUT_S = 2.0
APPLICATION_ID = 0x4D58524C  # "MXRL"
_MAGIC = b"SQLite format 3\0"
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE counters (one INTEGER PRIMARY KEY CHECK (one = 1), store_id TEXT NOT NULL,
    clock_ms INTEGER NOT NULL, revision INTEGER NOT NULL, sequence INTEGER NOT NULL);
CREATE TABLE versions (uid TEXT PRIMARY KEY, model TEXT NOT NULL, sequence INTEGER NOT NULL,
    active INTEGER NOT NULL, revision INTEGER NOT NULL, wake_at INTEGER, body TEXT NOT NULL);
CREATE UNIQUE INDEX versions_by_model ON versions (model, sequence);
CREATE INDEX versions_active ON versions (model, sequence) WHERE active;
CREATE INDEX versions_due ON versions (wake_at) WHERE wake_at IS NOT NULL;
CREATE TABLE keys (idempotency_key TEXT PRIMARY KEY, uid TEXT NOT NULL, claimed_at INTEGER NOT NULL,
    body TEXT NOT NULL);
CREATE INDEX keys_by_uid ON keys (uid);
CREATE TABLE workers (worker_id TEXT PRIMARY KEY, model TEXT NOT NULL, revision INTEGER NOT NULL,
    wake_at INTEGER, body TEXT NOT NULL);
CREATE INDEX workers_by_model ON workers (model);
CREATE INDEX workers_due ON workers (wake_at) WHERE wake_at IS NOT NULL;
"""


@dataclass(slots=True)
class Counters:
    """The numbers that only grow."""

    revision: int
    sequence: int


class Database:
    """What an operation is given: the connection, the clock, and the counters.

    An operation that changes a counter or a row sets `dirty`.
    """

    def __init__(self, path: str, source: Clock) -> None:
        _require_store_file(path)
        self._lock_fd = _lock(path)
        try:
            self.connection = _connect(path)
            try:
                self.store_id, clock_ms, revision, sequence = _prepare(self.connection, path)
            except BaseException:
                self.connection.close()
                raise
        except sqlite3.Error as error:
            os.close(self._lock_fd)
            raise UsageError(f"the store sqlite:{path} can't be opened: {error}") from error
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.path = path
        self.clock = StoreClock(source, clock_ms)
        self.counters = Counters(revision, sequence)
        self.dirty = False

    def next_revision(self) -> int:
        """A revision that no record of this store has ever had."""
        self.dirty = True
        self.counters.revision += 1
        return self.counters.revision

    def next_sequence(self) -> int:
        """A number that this store has never given."""
        self.dirty = True
        self.counters.sequence += 1
        return self.counters.sequence

    def transact(self, work: Callable[[], None], *, writes: bool) -> None:
        """Do `work` in one transaction; on an error nothing of it has happened."""
        before = Counters(self.counters.revision, self.counters.sequence)
        self.dirty = False
        try:
            self.connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            work()
            if self.dirty:
                self.connection.execute(
                    "UPDATE counters SET clock_ms = ?, revision = ?, sequence = ?",
                    (self.clock.now_ms(), self.counters.revision, self.counters.sequence),
                )
            self.connection.execute("COMMIT")
        except BaseException:
            self.counters = before
            if self.connection.in_transaction:
                with suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the connection and let another process have the file."""
        with suppress(sqlite3.Error):
            self.connection.close()
        os.close(self._lock_fd)


@dataclass(slots=True)
class _Job:
    operation: Callable[[Database], Any]
    writes: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    on_commit: Callable[[Any], None] | None
    outcome: Any = None
    failure: Exception | None = None

    def deliver(self) -> None:
        """In the loop's thread: tell the feed first, then whoever still waits."""
        if self.failure is None and self.on_commit is not None:
            self.on_commit(self.outcome)
        if self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
        else:
            self.future.set_result(self.outcome)


class SqliteThread:
    """Runs operations on the database, from any number of tasks.

    Raises:
        UsageError: the file can't be opened, is not a store, or another server has it.
    """

    def __init__(self, path: str, source: Clock) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[Database | BaseException] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, args=(path, source), name="mx-rl sqlite store", daemon=True
        )
        self._thread.start()
        opened = self._opened.get()
        if isinstance(opened, BaseException):
            self._thread.join()
            raise opened
        self.store_id = opened.store_id
        self.clock = opened.clock

    async def run(
        self,
        operation: Callable[[Database], T],
        *,
        writes: bool = False,
        on_commit: Callable[[T], None] | None = None,
    ) -> T:
        """Run `operation`; it is answered once the transaction that it was part of is durable.

        `on_commit` is called with the answer, in the loop's thread, even where the caller has gone.

        Raises:
            StoreUnavailable: the database could not do it; nothing has happened.
            StoredRecordError: what was read can't be understood.
        """
        if self._closed:
            raise StateError("the store is closed")
        loop = asyncio.get_running_loop()
        job = _Job(operation, writes, loop, loop.create_future(), on_commit)
        self._jobs.put(job)
        outcome: T = await job.future
        return outcome

    def close(self) -> None:
        """Finish what was asked for and end the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _run(self, path: str, source: Clock) -> None:
        try:
            database = Database(path, source)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._opened.put(error)
            return
        self._opened.put(database)
        try:
            while jobs := self._next_group():
                self._execute(database, jobs)
        finally:
            database.close()

    def _next_group(self) -> list[_Job]:
        """What waits, but for jobs that nobody waits for any more; empty at the end."""
        while True:
            job = self._jobs.get()
            group: list[_Job] = []
            while job is not None:
                if not job.future.cancelled():
                    group.append(job)
                if len(group) >= GROUP or self._jobs.empty():
                    break
                job = self._jobs.get()
            if job is None:
                if group:
                    self._jobs.put(None)  # once more, after this group
                return group
            if group:
                return group

    def _execute(self, database: Database, jobs: Sequence[_Job]) -> None:
        def work() -> None:
            for job in jobs:
                try:
                    job.outcome = job.operation(database)
                except StoredRecordError as error:  # only reads raise it
                    job.failure = error

        try:
            database.transact(work, writes=any(job.writes for job in jobs))
        except sqlite3.Error as error:
            for job in jobs:
                job.failure = _unavailable(database.path, error)
        except Exception as error:  # noqa: BLE001 - a fault of ours: whoever waits must hear of it
            for job in jobs:
                job.failure = error
        for job in jobs:
            with suppress(RuntimeError):  # its loop has been closed
                job.loop.call_soon_threadsafe(job.deliver)


def _unavailable(path: str, error: sqlite3.Error) -> StoreUnavailable:
    text = str(error)
    if "locked" in text:
        text += f": another process has held a lock on the file for more than {BUSY_TIMEOUT_S:g} s"
    failure = StoreUnavailable(f"the store sqlite:{path} failed: {text}; nothing was changed")
    failure.__cause__ = error
    return failure


def _require_store_file(path: str) -> None:
    """Refuse what can't be a store, before a lock file is left beside it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UsageError(f"the store sqlite:{path} can't be opened: it is not a regular file")
        with open(path, "rb") as file:
            begin = file.read(len(_MAGIC))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"the store sqlite:{path} can't be opened: {error.strerror}") from error
    if begin and begin != _MAGIC:
        raise UsageError(f"the store sqlite:{path} can't be opened: file is not a database of SQLite")


def _lock(path: str) -> int:
    """One server at a time: its group commits, wakes and watches live in one process."""
    try:
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"the store sqlite:{path} can't be opened: {error.strerror}: {path}.lock") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise UsageError(
            f"the store sqlite:{path} is in use by another server: one server at a time can use it "
            f"(several need a store that they share)"
        ) from error
    return lock_fd


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: str) -> tuple[str, int, int, int]:
    """Make the tables of a new file, check those of an old one; answers its counters."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (schema_version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {SCHEMA_VERSION}; "
            f"INSERT INTO counters VALUES (1, '{uuid4().hex}', 0, 0, 0); COMMIT;"
        )
    elif application_id != APPLICATION_ID:
        raise UsageError(f"{path} is an SQLite file of something else, not a store of mx-rl serve")
    elif schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"the store sqlite:{path} has schema {schema_version}, this release uses {SCHEMA_VERSION}"
        )
    store_id, clock_ms, revision, sequence = connection.execute(
        "SELECT store_id, clock_ms, revision, sequence FROM counters"
    ).fetchone()
    return store_id, clock_ms, revision, sequence
