"""What is true of a version now, without committing it: reads settle in memory.

The clock is read first, the version second, the workers third: what seems lapsed then has lapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelexpress_rl.server.fold import settled, unknown
from modelexpress_rl.server.stores.port import Store, StoredVersion, VersionEntry
from statemachines import version
from statemachines.ids import VersionId, WorkerId
from statemachines.version import Moment, VersionRecord, VersionState
from statemachines.version_records import Publication
from statemachines.worker import WorkerRecord


@dataclass(frozen=True, slots=True)
class View:
    """A version as it is at `moment`, under the revision of its last commit."""

    entry: VersionEntry
    revision: int
    moment: Moment

    @property
    def record(self) -> VersionRecord:
        """The settled record: all that it files is live."""
        return self.entry.record


async def view(store: Store, uid: VersionId) -> View:
    """What is true of `uid` now.

    Raises:
        Refused: NOT_FOUND, also where its retention is over and nobody has erased it yet.
    """
    read, workers = await store.read_version_and_workers(uid, ())
    if read.stored is not None:
        moment = Moment(read.now_ms, {key: one.record for key, one in workers.workers.items()})
        found = View(settled(read.stored.entry, moment)[0], read.stored.revision, moment)
        if found.record.state is not VersionState.FORGOTTEN:
            return found
    raise unknown(uid)


async def views(store: Store, stored: Sequence[StoredVersion], now_ms: int) -> list[View]:
    """What is true of these versions, which were read after `now_ms`."""
    wanted = {shard.worker_id for one in stored for shard in one.entry.record.publications.values()}
    moment = Moment(now_ms, await registrations(store, wanted))
    return [View(settled(one.entry, moment)[0], one.revision, moment) for one in stored]


async def registrations(store: Store, worker_ids: set[WorkerId]) -> dict[WorkerId, WorkerRecord]:
    """The registrations of those of `worker_ids` that exist."""
    if not worker_ids:
        return {}
    read = await store.read_workers(worker_ids)
    return {worker_id: one.record for worker_id, one in read.workers.items()}


def live_publications(record: VersionRecord, moment: Moment) -> list[Publication]:
    """The publications that count at the moment, by (slot, worker)."""
    filed = sorted(record.publications.items())
    return [shard for _, shard in filed if version.publishes(shard, moment)]
