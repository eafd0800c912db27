"""What the control plane needs from a store: records under compare-and-set, and a clock.

The contract is made so that a cluster can keep it. All that belongs to one version may lie in one
place and each worker in another; nothing here spans two of them in one step:

1. A commit replaces one record, where its revision is still the one that was read.
2. A decision also relies on registrations and leases that were live when they were read. Their
   deadlines only ever grow, except when a worker says good-bye. So a commit carries `valid_until_ms`,
   the earliest of them, and the store refuses it (LATE) once its clock has come that far: nothing is
   ever committed after what it relied on has lapsed.
3. `now_ms` in an answer was taken before anything in that answer was read. Read the clock first, the
   version second and the workers third, and everything that seems lapsed has lapsed.

Every method may raise `StoreUnavailable`. After it, or after a cancellation, a commit may or may not
have happened: read again. Identities are opaque strings of any characters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, TypeAlias

from modelexpress_rl.errors import ModelExpressError, Unavailable
from statemachines.ids import ModelName, VersionId, WorkerId
from statemachines.spec import VersionSpec
from statemachines.version import VersionRecord
from statemachines.worker import WorkerRecord


class StoreUnavailable(Unavailable):
    """The store could not be reached or could not write; the message says what is wrong with it."""


class Stopping(StoreUnavailable):
    """This server is about to end; another one, or the next, will answer."""


class StoredRecordError(ModelExpressError):
    """A stored record can't be understood: damaged, or written by a newer release."""


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """What is stored of a version: its record, and what the server remembers for people.

    `ready_at_ms` is when it first became READY (0 before), `reason` why it is in its state.
    """

    record: VersionRecord
    ready_at_ms: int = 0
    reason: str = ""


def publishers(entry: VersionEntry) -> set[WorkerId]:
    """The workers that a version's publications are of."""
    return {shard.worker_id for shard in entry.record.publications.values()}


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """An entry, the revision it was committed under, and when it next has something due."""

    entry: VersionEntry
    revision: int
    wake_at_ms: int | None


@dataclass(frozen=True, slots=True)
class StoredWorker:
    """A registration and the revision it was committed under."""

    record: WorkerRecord
    revision: int


@dataclass(frozen=True, slots=True)
class VersionRead:
    """A version as it was read, or None; the store's clock was `now_ms` before that."""

    now_ms: int
    stored: StoredVersion | None


@dataclass(frozen=True, slots=True)
class WorkersRead:
    """The workers that exist of those asked for; the store's clock was `now_ms` before that."""

    now_ms: int
    workers: Mapping[WorkerId, StoredWorker]


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who holds an idempotency key: the version id, and the request that it was claimed for."""

    uid: VersionId
    spec: VersionSpec


@dataclass(frozen=True, slots=True)
class Committed:
    """The record is stored, under this revision."""

    revision: int


class Rejected(Enum):
    """Why nothing was stored: read again and decide again."""

    CONFLICT = "another revision is stored"
    LATE = "something that the decision relied on has lapsed"


CommitResult: TypeAlias = Committed | Rejected


@dataclass(frozen=True, slots=True)
class Place:
    """Where a listing goes on: after this sequence of this model."""

    model_name: ModelName
    sequence: int


@dataclass(frozen=True, slots=True)
class Change:
    """A version was committed or erased."""

    uid: VersionId
    model_name: ModelName


@dataclass(frozen=True, slots=True)
class Resync:
    """Changes may have been missed: look again at everything that matters to you."""


class Store(Protocol):
    """A store of versions, workers and idempotency keys."""

    kind: ClassVar[str]
    """"memory", "sqlite" or "redis"."""

    @property
    def store_id(self) -> str:
        """Made once, when the store was: another id means another store, or an emptied one."""
        ...

    async def close(self) -> None:
        """Let go of the store; idempotent."""
        ...

    async def now_ms(self) -> int:
        """The store's clock: Unix milliseconds that never go back, whatever restarts."""
        ...

    async def next_sequence(self) -> int:
        """A number greater than every one that this store has ever given."""
        ...

    # Versions.

    async def read_version(self, uid: VersionId) -> VersionRead:
        """Read one version."""
        ...

    async def read_version_and_workers(
        self, uid: VersionId, worker_ids: Collection[WorkerId]
    ) -> tuple[VersionRead, WorkersRead]:
        """As `read_version`, then `read_workers` of its publishers and of `worker_ids`, at less cost."""
        ...

    async def commit_version(
        self,
        uid: VersionId,
        entry: VersionEntry | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        """Store `entry`, or erase the version (None), where `expected_revision` is still current.

        `expected_revision` None means that the version must not exist. Erasing also frees the
        idempotency key, where this version holds it. Revisions of a uid grow for ever, also when it
        is erased and created again.
        """
        ...

    async def rearm(self, uid: VersionId, *, expected_revision: int, wake_at_ms: int | None) -> None:
        """Only move the wake of a version; nothing where another revision is stored."""
        ...

    async def list_versions(
        self, model_name: ModelName | None, *, after: Place | None, limit: int
    ) -> list[StoredVersion]:
        """Versions by (model_name, sequence), of one model or of all, at most `limit`."""
        ...

    async def active_versions(self, model_name: ModelName) -> list[VersionId]:
        """The versions of a model that are not RETIRED, oldest first; others cost nothing."""
        ...

    async def due_versions(self, now_ms: int, limit: int) -> list[VersionId]:
        """The versions whose wake is not after `now_ms`, the longest overdue first."""
        ...

    # Idempotency keys.

    async def read_key(self, idempotency_key: str) -> KeyHolder | None:
        """Who holds the key, if anybody."""
        ...

    async def claim_key(self, idempotency_key: str, holder: KeyHolder) -> KeyHolder:
        """Claim the key for `holder`, unless somebody holds it; answers who holds it now.

        The claim counts from now on, also where it was held already. A version is committed for it only
        while `purge_keys` can't have freed it: `valid_until_ms` says so.
        """
        ...

    async def free_key(self, idempotency_key: str, uid: VersionId) -> None:
        """Free the key where this version holds it."""
        ...

    async def purge_keys(self, claimed_before_ms: int) -> int:
        """Free keys that were last claimed before that and whose version does not exist; answers how many.

        A key whose version exists is kept, however old its claim is: erasing the version frees it.
        """
        ...

    # Workers.

    async def read_workers(self, worker_ids: Collection[WorkerId]) -> WorkersRead:
        """Read many workers at once."""
        ...

    async def commit_worker(
        self,
        worker_id: WorkerId,
        record: WorkerRecord | None,
        *,
        expected_revision: int | None,
        valid_until_ms: int | None,
        wake_at_ms: int | None,
    ) -> CommitResult:
        """As `commit_version`, for a registration."""
        ...

    async def list_workers(self, model_name: ModelName | None) -> WorkersRead:
        """Every registration, of one model or of all."""
        ...

    async def due_workers(self, now_ms: int, limit: int) -> list[WorkerId]:
        """The workers whose wake is not after `now_ms`, the longest overdue first."""
        ...

    # Both.

    async def next_wake_ms(self) -> int | None:
        """The earliest wake of any version or worker."""
        ...

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change | Resync]]:
        """What is committed from now on, by any server; several changes of one version may be one."""
        ...
