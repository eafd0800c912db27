"""The versions of a Redis store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any, TypeAlias

from modelexpress_rl.server.clock import Clock
from modelexpress_rl.server.stores import codec
from modelexpress_rl.server.stores.port import (
    CommitResult,
    Committed,
    Place,
    StoredVersion,
    VersionEntry,
    VersionRead,
    WorkersRead,
    publishers,
)
from modelexpress_rl.server.stores.redis import keys, scripts
from modelexpress_rl.server.stores.redis.claims import Claims
from modelexpress_rl.server.stores.redis.keys import Bucket
from modelexpress_rl.server.stores.redis.space import KEPT_MS, Row, best_effort, rows_of, text
from modelexpress_rl.server.stores.redis.workers import Workers, workers_read
from statemachines.ids import ModelName, VersionId, WorkerId
from statemachines.version import VersionState
from statemachines.version_records import Retired

DECODED_VERSIONS = 256
_Decoded: TypeAlias = tuple[bytes, VersionEntry]


class Versions(Workers, Claims):
    """The methods of `Store` that concern versions."""

    def __init__(self, address: str, clock: Clock | None = None) -> None:
        super().__init__(address, clock)
        self._decoded: OrderedDict[VersionId, _Decoded] = OrderedDict()

    async def read_version(self, uid: VersionId) -> VersionRead:
        number, bucket = self._place(uid)
        known = self._decoded.get(uid)
        answer = await self._run(number, scripts.READ, [bucket.version(uid)], _revision(known))
        return self._version_read(uid, answer, known)

    async def read_version_and_workers(
        self, uid: VersionId, worker_ids: Collection[WorkerId]
    ) -> tuple[VersionRead, WorkersRead]:
        known = self._decoded.get(uid)
        guess = {*publishers(known[1]), *worker_ids} if known else set(worker_ids)
        if len(self._buckets.all) > 1 or len(guess) > keys.MOST_AT_ONCE:
            guess = set()
        # What is in one place is read in one step.
        number, bucket = self._place(uid)
        where = [bucket.version(uid), *map(bucket.worker, guess)]
        answer = await self._run(number, scripts.READ, where, _revision(known))
        read = self._version_read(uid, answer[:4], known)
        rows: dict[str, Row] = dict(zip(guess, rows_of(answer[3:]), strict=True))
        wanted = {*publishers(read.stored.entry), *worker_ids} if read.stored else set(worker_ids)
        if missing := wanted - rows.keys():
            rows |= (await self._rows(missing, Bucket.worker))[1]
        return read, workers_read(read.now_ms, {name: rows[name] for name in wanted})

    async def commit_version(
        self,
        uid: VersionId,
        entry: VersionEntry | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        number, bucket = self._place(uid)
        body, member, active, lifetime_ms, owed = "", b"", 0, KEPT_MS, ""
        if entry is not None:
            record = entry.record
            body, owed = codec.encode_version(entry), record.spec.idempotency_key
            member = keys.version_member(record.spec.model_name, record.sequence, uid)
            active = int(record.state is not VersionState.RETIRED)
            if isinstance(record.phase, Retired):
                lifetime_ms = self._lifetime_ms(record.phase.forget_at_ms)
        result, owed = await self._commit(
            number,
            f"version {uid}",
            [bucket.version(uid), bucket.versions, bucket.active, bucket.versions_due, bucket.revision],
            *(text(expected_revision), text(valid_until_ms), text(wake_at_ms)),
            *(body, member, active, lifetime_ms, KEPT_MS, uid, owed, self._buckets.channel, number),
            scripts.VERSION_REMEMBERS,
        )
        if isinstance(result, Committed):
            if entry is not None:
                self._keep(uid, str(result.revision).encode(), entry)
            elif owed:
                with best_effort(f"freeing idempotency_key {owed!r}"):  # or else it is purged
                    await self.free_key(owed, uid)
        return result

    async def rearm(self, uid: VersionId, *, expected_revision: int, wake_at_ms: int | None) -> None:
        number, bucket = self._place(uid)
        where = [bucket.version(uid), bucket.versions_due]
        await self._run(number, scripts.REARM, where, expected_revision, text(wake_at_ms), uid, KEPT_MS)

    async def list_versions(
        self, model_name: ModelName | None, *, after: Place | None, limit: int
    ) -> list[StoredVersion]:
        least, most = keys.model_range(model_name)
        if after is not None:
            least = keys.later(least, keys.after_sequence(after.model_name, after.sequence))
        found: list[StoredVersion] = []
        while len(found) < limit:
            wanted = limit - len(found)
            pages = await self._every(_listing, "ZRANGEBYLEX", least, most, "LIMIT", 0, wanted)
            members = sorted(chain.from_iterable(pages))[:wanted]
            found += await self._listed(members)
            if len(members) < wanted:
                break
            least = b"(" + members[-1]
        return found

    async def active_versions(self, model_name: ModelName) -> list[VersionId]:
        least, most = keys.model_range(model_name)
        pages = await self._every(lambda bucket: bucket.active, "ZRANGEBYLEX", least, most)
        return [_uid_of(member) for member in sorted(chain.from_iterable(pages))]

    async def due_versions(self, now_ms: int, limit: int) -> list[VersionId]:
        names = await self._due(lambda bucket: bucket.versions_due, Bucket.version, now_ms, limit)
        return [VersionId(name) for name in names]

    async def _listed(self, members: list[bytes]) -> list[StoredVersion]:
        """The versions of these members of the listing; a member that has none any more leaves it."""
        if not members:
            return []
        _, rows = await self._rows([_uid_of(member) for member in members], Bucket.version)
        found: list[StoredVersion] = []
        for member in members:
            uid = _uid_of(member)
            stored = _stored(uid, rows[uid], None)
            if stored is not None:
                found.append(stored)
                continue
            number, bucket = self._place(uid)
            where = [bucket.version(uid), bucket.versions, bucket.active, bucket.versions_due]
            await self._run(number, scripts.SWEEP, where, member, uid)
        return found

    def _version_read(self, uid: VersionId, answer: Sequence[Any], known: _Decoded | None) -> VersionRead:
        (row,) = rows_of(answer)
        stored = _stored(uid, row, known[1] if known else None)
        if row[0] is not None and row[2] is not None and stored is not None:
            self._keep(uid, row[0], stored.entry)
        return VersionRead(self._time.heard(int(answer[0])), stored)

    def _keep(self, uid: VersionId, revision: bytes, entry: VersionEntry) -> None:
        """Remember what a revision says, so that a version that is busy is not sent each time."""
        self._decoded[uid] = (revision, entry)
        self._decoded.move_to_end(uid)
        while len(self._decoded) > DECODED_VERSIONS:
            self._decoded.popitem(last=False)


def _revision(known: _Decoded | None) -> bytes:
    return known[0] if known else b""


def _listing(bucket: Bucket) -> str:
    return bucket.versions


def _stored(uid: VersionId, row: Row, known: VersionEntry | None) -> StoredVersion | None:
    revision, wake, body = row
    if revision is None:
        return None
    if body is not None:
        entry = codec.decode_version(uid, body)
    else:
        assert known is not None
        entry = known
    return StoredVersion(entry, int(revision), int(wake) if wake else None)


def _uid_of(member: bytes) -> VersionId:
    return VersionId(keys.version_of(member)[2])
