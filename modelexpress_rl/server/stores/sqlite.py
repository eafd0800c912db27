"""A store in one SQLite file: a restarted server finds everything that it had acknowledged.

WAL with `synchronous = FULL`; all work on one thread, in groups (`sqlite_thread.py`). Deadlines are
absolute, so what passes while the server is down counts. One server at a time may have the file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import Any, ClassVar

from modelexpress_rl.server.clock import Clock, SystemClock
from modelexpress_rl.server.stores import codec
from modelexpress_rl.server.stores.changes import ChangeFeed
from modelexpress_rl.server.stores.port import (
    Change,
    CommitResult,
    Committed,
    KeyHolder,
    Place,
    Rejected,
    Resync,
    StoredVersion,
    StoredWorker,
    VersionEntry,
    VersionRead,
    WorkersRead,
    publishers,
)
from modelexpress_rl.server.stores.sqlite_thread import Database, SqliteThread
from statemachines.ids import ModelName, VersionId, WorkerId
from statemachines.version import VersionState
from statemachines.worker import WorkerRecord

_IDS_PER_QUERY = 500  # older SQLite allows 999 parameters
_DECODED_VERSIONS = 64
_decode_worker = lru_cache(maxsize=16_384)(codec.decode_worker)


class SqliteStore:
    """See `Store`.

    Raises:
        UsageError: the file can't be opened, is not a store, or another server has it.
    """

    kind: ClassVar[str] = "sqlite"

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._database = SqliteThread(path, clock or SystemClock())
        self.clock: Clock = self._database.clock
        self._feed = ChangeFeed()
        self._decoded: OrderedDict[VersionId, tuple[int, VersionEntry]] = OrderedDict()

    @property
    def store_id(self) -> str:
        return self._database.store_id

    async def close(self) -> None:
        self._database.close()

    async def now_ms(self) -> int:
        return self.clock.now_ms()

    async def next_sequence(self) -> int:
        return await self._database.run(Database.next_sequence, writes=True)

    async def read_version(self, uid: VersionId) -> VersionRead:
        known_revision, known = self._decoded.get(uid, (None, None))

        def read(database: Database) -> tuple[int, tuple[Any, ...] | None]:
            now_ms = database.clock.now_ms()
            row = database.connection.execute(
                "SELECT revision, wake_at, CASE WHEN revision IS ? THEN NULL ELSE body END "
                "FROM versions WHERE uid = ?",
                (known_revision, uid),
            ).fetchone()
            return now_ms, row

        now_ms, row = await self._database.run(read)
        if row is None:
            return VersionRead(now_ms, None)
        revision, wake_at_ms, body = row
        if known is not None and body is None:
            return VersionRead(now_ms, StoredVersion(known, revision, wake_at_ms))
        entry = codec.decode_version(uid, body)
        self._keep(uid, revision, entry)
        return VersionRead(now_ms, StoredVersion(entry, revision, wake_at_ms))

    async def read_version_and_workers(
        self, uid: VersionId, worker_ids: Collection[WorkerId]
    ) -> tuple[VersionRead, WorkersRead]:
        read = await self.read_version(uid)
        wanted = publishers(read.stored.entry) if read.stored else set[WorkerId]()
        return read, await self.read_workers(wanted.union(worker_ids))

    async def commit_version(
        self,
        uid: VersionId,
        entry: VersionEntry | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        body = "" if entry is None else codec.encode_version(entry)

        def commit(database: Database) -> tuple[CommitResult, str]:
            before = database.connection.execute(
                "SELECT revision, model FROM versions WHERE uid = ?", (uid,)
            ).fetchone()
            revision, model = before or (None, "")
            if rejected := _rejected(database, revision, expected_revision, valid_until_ms):
                return rejected, model
            committed = Committed(database.next_revision())
            if entry is None:
                database.connection.execute("DELETE FROM versions WHERE uid = ?", (uid,))
                database.connection.execute("DELETE FROM keys WHERE uid = ?", (uid,))
                return committed, model
            record = entry.record
            database.connection.execute(
                "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (uid) DO UPDATE SET "
                "active = excluded.active, revision = excluded.revision, wake_at = excluded.wake_at, "
                "body = excluded.body",
                (
                    uid,
                    record.spec.model_name,
                    record.sequence,
                    record.state is not VersionState.RETIRED,
                    committed.revision,
                    wake_at_ms,
                    body,
                ),
            )
            return committed, record.spec.model_name

        def tell(outcome: tuple[CommitResult, str]) -> None:
            result, model = outcome
            if isinstance(result, Committed):
                if entry is not None:
                    self._keep(uid, result.revision, entry)
                self._feed.publish(Change(uid, ModelName(model)))

        return (await self._database.run(commit, writes=True, on_commit=tell))[0]

    async def rearm(self, uid: VersionId, *, expected_revision: int, wake_at_ms: int | None) -> None:
        def rearm(database: Database) -> None:
            database.connection.execute(
                "UPDATE versions SET wake_at = ? WHERE uid = ? AND revision = ?",
                (wake_at_ms, uid, expected_revision),
            )

        await self._database.run(rearm, writes=True)

    async def list_versions(
        self, model_name: ModelName | None, *, after: Place | None, limit: int
    ) -> list[StoredVersion]:
        place = (after.model_name, after.sequence) if after else ("", -1)
        query = "SELECT uid, revision, wake_at, body FROM versions WHERE (model, sequence) > (?, ?)"
        parameters: tuple[object, ...] = place
        if model_name is not None:
            query, parameters = f"{query} AND model = ?", (*place, model_name)
        query += " ORDER BY model, sequence LIMIT ?"

        def read(database: Database) -> list[tuple[Any, ...]]:
            return database.connection.execute(query, (*parameters, limit)).fetchall()

        return [
            StoredVersion(codec.decode_version(uid, body), revision, wake_at_ms)
            for uid, revision, wake_at_ms, body in await self._database.run(read)
        ]

    async def active_versions(self, model_name: ModelName) -> list[VersionId]:
        return await self._ids(
            "SELECT uid FROM versions WHERE model = ? AND active ORDER BY sequence", model_name
        )

    async def due_versions(self, now_ms: int, limit: int) -> list[VersionId]:
        return await self._ids(
            "SELECT uid FROM versions WHERE wake_at <= ? ORDER BY wake_at LIMIT ?", now_ms, limit
        )

    async def read_key(self, idempotency_key: str) -> KeyHolder | None:
        return await self._database.run(lambda database: _holder(database, idempotency_key))

    async def claim_key(self, idempotency_key: str, holder: KeyHolder) -> KeyHolder:
        def claim(database: Database) -> KeyHolder:
            winner = _holder(database, idempotency_key) or holder
            database.connection.execute(
                "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?)",
                (idempotency_key, winner.uid, database.clock.now_ms(), codec.encode_holder(winner)),
            )
            return winner

        return await self._database.run(claim, writes=True)

    async def free_key(self, idempotency_key: str, uid: VersionId) -> None:
        def free(database: Database) -> None:
            database.connection.execute(
                "DELETE FROM keys WHERE idempotency_key = ? AND uid = ?", (idempotency_key, uid)
            )

        await self._database.run(free, writes=True)

    async def purge_keys(self, claimed_before_ms: int) -> int:
        def purge(database: Database) -> int:
            return database.connection.execute(
                "DELETE FROM keys WHERE claimed_at < ? AND uid NOT IN (SELECT uid FROM versions)",
                (claimed_before_ms,),
            ).rowcount

        return await self._database.run(purge, writes=True)

    async def read_workers(self, worker_ids: Collection[WorkerId]) -> WorkersRead:
        wanted = list(worker_ids)

        def read(database: Database) -> tuple[int, list[tuple[Any, ...]]]:
            now_ms = database.clock.now_ms()
            rows: list[tuple[Any, ...]] = []
            for start in range(0, len(wanted), _IDS_PER_QUERY):
                some = wanted[start : start + _IDS_PER_QUERY]
                marks = ",".join("?" * len(some))
                query = f"SELECT worker_id, revision, body FROM workers WHERE worker_id IN ({marks})"
                rows += database.connection.execute(query, some).fetchall()
            return now_ms, rows

        return _workers(*await self._database.run(read))

    async def commit_worker(
        self,
        worker_id: WorkerId,
        record: WorkerRecord | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        def commit(database: Database) -> CommitResult:
            before = database.connection.execute(
                "SELECT revision FROM workers WHERE worker_id = ?", (worker_id,)
            ).fetchone()
            revision = before[0] if before else None
            if rejected := _rejected(database, revision, expected_revision, valid_until_ms):
                return rejected
            committed = Committed(database.next_revision())
            if record is None:
                database.connection.execute("DELETE FROM workers WHERE worker_id = ?", (worker_id,))
            else:
                body = codec.encode_worker(record)
                database.connection.execute(
                    "INSERT OR REPLACE INTO workers VALUES (?, ?, ?, ?, ?)",
                    (worker_id, record.model_name, committed.revision, wake_at_ms, body),
                )
            return committed

        return await self._database.run(commit, writes=True)

    async def list_workers(self, model_name: ModelName | None) -> WorkersRead:
        query = "SELECT worker_id, revision, body FROM workers WHERE ?1 IS NULL OR model = ?1"

        def read(database: Database) -> tuple[int, list[tuple[Any, ...]]]:
            now_ms = database.clock.now_ms()
            return now_ms, database.connection.execute(query, (model_name,)).fetchall()

        return _workers(*await self._database.run(read))

    async def due_workers(self, now_ms: int, limit: int) -> list[WorkerId]:
        return await self._ids(
            "SELECT worker_id FROM workers WHERE wake_at <= ? ORDER BY wake_at LIMIT ?", now_ms, limit
        )

    async def next_wake_ms(self) -> int | None:
        query = (
            "SELECT min(wake) FROM (SELECT min(wake_at) AS wake FROM versions WHERE wake_at IS NOT NULL "
            "UNION ALL SELECT min(wake_at) FROM workers WHERE wake_at IS NOT NULL)"
        )
        row: tuple[int | None] = await self._database.run(
            lambda database: database.connection.execute(query).fetchone()
        )
        return row[0]

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change | Resync]]:
        return self._feed.subscribe()

    async def _ids(self, query: str, *parameters: object) -> list[Any]:
        rows = await self._database.run(
            lambda database: database.connection.execute(query, parameters).fetchall()
        )
        return [row[0] for row in rows]

    def _keep(self, uid: VersionId, revision: int, entry: VersionEntry) -> None:
        """Remember what a revision says, so that a version that is busy is not decoded each time."""
        self._decoded[uid] = (revision, entry)
        self._decoded.move_to_end(uid)
        while len(self._decoded) > _DECODED_VERSIONS:
            self._decoded.popitem(last=False)


def _rejected(
    database: Database, revision: int | None, expected: int | None, valid_until_ms: int | None
) -> Rejected | None:
    if revision != expected:
        return Rejected.CONFLICT
    if valid_until_ms is not None and database.clock.now_ms() >= valid_until_ms:
        return Rejected.LATE
    return None


def _holder(database: Database, idempotency_key: str) -> KeyHolder | None:
    row: Sequence[Any] | None = database.connection.execute(
        "SELECT body FROM keys WHERE idempotency_key = ?", (idempotency_key,)
    ).fetchone()
    return None if row is None else codec.decode_holder(idempotency_key, row[0])


def _workers(now_ms: int, rows: Sequence[tuple[Any, ...]]) -> WorkersRead:
    found = {WorkerId(row[0]): StoredWorker(_decode_worker(row[0], row[2]), row[1]) for row in rows}
    return WorkersRead(now_ms, found)
