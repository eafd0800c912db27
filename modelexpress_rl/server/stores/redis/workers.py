"""The workers of a Redis store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import chain

from modelexpress_rl.server.stores import codec
from modelexpress_rl.server.stores.port import CommitResult, StoredWorker, WorkersRead
from modelexpress_rl.server.stores.redis import keys, scripts
from modelexpress_rl.server.stores.redis.keys import Bucket
from modelexpress_rl.server.stores.redis.space import KEPT_MS, Row, Space, text
from statemachines.ids import ModelName, WorkerId
from statemachines.worker import WorkerRecord

_decode_worker = lru_cache(maxsize=16_384)(codec.decode_worker)


class Workers(Space):
    """The methods of `Store` that concern workers."""

    async def read_workers(self, worker_ids: Collection[WorkerId]) -> WorkersRead:
        if not worker_ids:
            return WorkersRead(await self.now_ms(), {})
        return workers_read(*await self._rows(worker_ids, Bucket.worker))

    async def commit_worker(
        self,
        worker_id: WorkerId,
        record: WorkerRecord | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        number, bucket = self._place(worker_id)
        body, member, lifetime_ms = "", b"", KEPT_MS
        if record is not None:
            body, member = codec.encode_worker(record), keys.worker_member(record.model_name, worker_id)
            lifetime_ms = self._lifetime_ms(wake_at_ms)
        result, _ = await self._commit(
            number,
            f"worker {worker_id}",
            [
                *(bucket.worker(worker_id), bucket.workers, bucket.active),
                *(bucket.workers_due, bucket.worker_revision),
            ],
            *(text(expected_revision), text(valid_until_ms), text(wake_at_ms)),
            *(body, member, "-", lifetime_ms, KEPT_MS, worker_id, "", "", number),
            scripts.WORKER_REMEMBERS,
        )
        return result

    async def list_workers(self, model_name: ModelName | None) -> WorkersRead:
        now_ms = await self.now_ms()
        least, most = keys.model_range(model_name)
        pages = await self._every(lambda bucket: bucket.workers, "ZRANGEBYLEX", least, most)
        members = {WorkerId(keys.worker_of(member)): member for member in chain.from_iterable(pages)}
        _, rows = await self._rows(members, Bucket.worker) if members else (now_ms, {})
        for worker_id, row in rows.items():
            if row[0] is None:  # Redis let go of it
                number, bucket = self._place(worker_id)
                where = [bucket.worker(worker_id), bucket.workers, bucket.active, bucket.workers_due]
                await self._run(number, scripts.SWEEP, where, members[WorkerId(worker_id)], worker_id)
        read = workers_read(now_ms, rows)
        if model_name is None:
            return read
        return WorkersRead(
            now_ms, {key: one for key, one in read.workers.items() if one.record.model_name == model_name}
        )

    async def due_workers(self, now_ms: int, limit: int) -> list[WorkerId]:
        names = await self._due(lambda bucket: bucket.workers_due, Bucket.worker, now_ms, limit)
        return [WorkerId(name) for name in names]


def workers_read(now_ms: int, rows: Mapping[str, Row]) -> WorkersRead:
    """The workers in these rows."""
    found: dict[WorkerId, StoredWorker] = {}
    for name, (revision, _, body) in rows.items():
        if revision is not None and body is not None:
            worker_id = WorkerId(name)
            found[worker_id] = StoredWorker(_decode_worker(worker_id, body), int(revision))
    return WorkersRead(now_ms, found)
