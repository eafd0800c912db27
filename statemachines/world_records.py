"""The data of the joint machine: one version, the processes around it, and what is on the way between.

Everything has one clock, in whole ticks that stand for milliseconds. What the machines know is in their
records; beside them stands what is *true* and nobody sees: whether a buffer has been overwritten, whether
what was read from it is the version or rubbish. The promises are about that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple, TypeAlias

from statemachines import installation, publication, version, worker
from statemachines.ids import LeaseId, ModelName, SlotId, VersionId, WorkerId, lease_id_of
from statemachines.installation_records import InstallationRecord
from statemachines.kernel import Decision, Refused
from statemachines.publication_records import PublicationRecord
from statemachines.publication_records import begin as begin_publication
from statemachines.spec import PayloadFormat, VersionSpec
from statemachines.version_records import VersionRecord

MODEL = ModelName("m")
UID = VersionId("v")
FAR_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Config:
    """A small world: one trainer for each entry of `slots`, and what may go wrong how often.

    `unanswered` calls are lost, answered into the void, carried out late, or answered late. `stray` adds
    timers that fire at any time and commands of the wrong worker. As on a real server, retention is longer
    than a lease and than a call can be under way. `published` begins with every trainer's shard announced.
    """

    slots: tuple[str, ...] = ("a",)
    generators: int = 1
    registration_ttl_ms: int = 2
    lease_ttl_ms: int = 2
    margin_ms: int = 0
    drain_ms: int = 1
    retention_ms: int = 3
    call_life_ms: int = 1
    unanswered: int = 0
    cuts: int = 0
    crashes: int = 0
    restarts: int = 0
    flushes: int = 0
    failed_reads: int = 0
    creations: int = 0
    stray: bool = False
    published: bool = False

    @property
    def spec(self) -> VersionSpec:
        """The one version of this world."""
        slots = tuple(SlotId(slot) for slot in sorted(set(self.slots)))
        return VersionSpec(MODEL, "key", PayloadFormat.FULL_TENSOR, slots)


Shard: TypeAlias = tuple[WorkerId, int]
"""A publication as readers tell it apart: the worker, and the incarnation that its manifest names."""


class Bytes(StrEnum):
    """What a read has brought, or would bring now."""

    COMING = "coming"
    SPOILT = "spoilt on the way"
    GOOD = "the version"
    BAD = "rubbish"


class Store(NamedTuple):
    """What the control plane knows. `births` counts the versions ever created, `lives` the lives."""

    version: VersionRecord | None
    workers: tuple[worker.WorkerRecord | None, ...]
    births: int = 1
    lives: int = 0


class Trainer(NamedTuple):
    """A trainer process.

    `separated`: it has told its publication that it is cut off, and asks only what changes nothing.
    `record` is which record of the version it knows. `overwritten`: the truth about its buffer.
    """

    worker_id: WorkerId
    slot_id: SlotId
    publication: PublicationRecord
    registered_until_ms: int = 0
    readers_gone_by_ms: int = 0
    record: int = 1
    separated: bool = False
    drained_at_ms: int | None = None
    waiting: bool = False
    incarnation: int = 0
    overwritten: bool = False
    alive: bool = True
    cut_off: bool = False


class Generator(NamedTuple):
    """A generator process.

    `granted` are the shards of the grant, `reads` what each source has brought so far, `staging` what
    lies in the staging buffer beside that, `late` the reads that go on after their pull has ended, and
    `parameters` what is served.
    """

    worker_id: WorkerId
    installation: InstallationRecord = InstallationRecord()
    granted: frozenset[Shard] = frozenset()
    reads: tuple[tuple[Shard, Bytes], ...] = ()
    staging: frozenset[Bytes] = frozenset()
    late: tuple[tuple[Shard, Bytes], ...] = ()
    parameters: frozenset[Bytes] = frozenset()
    last_read_ms: int = 0
    returning_until_ms: int | None = None
    acquire_from_ms: int = 0
    waiting: bool = False
    alive: bool = True

    @property
    def lease_id(self) -> LeaseId:
        """The one lease that it can hold."""
        return lease_id_of(UID, self.worker_id)


class Kind(StrEnum):
    """The calls to the control plane."""

    REGISTER = "register"
    ANNOUNCE = "announce"
    DRAIN = "drain"
    ACQUIRE = "acquire"
    RENEW = "renew"
    RETURN = "return"


class Outcome(StrEnum):
    """What becomes of a call."""

    OK = "ok"
    LOST = "lost"
    UNHEARD = "carried out, reply lost"
    LATE = "unanswered, carried out late"
    SLOW = "carried out, answered late"


class Call(NamedTuple):
    """A call of the trainer or generator `who`."""

    kind: Kind
    who: int
    sent_ms: int
    incarnation: int = 0


class Reply(NamedTuple):
    """An answer: what was refused, which record answered, who is live, until when leases run."""

    refused: Refused | None = None
    record: int | None = None
    state: version.VersionState | None = None
    live: frozenset[Shard] = frozenset()
    readers_gone_in_ms: int = 0


class OnTheWay(NamedTuple):
    """A call that has not arrived, or (with `reply`) an answer that has not, and when it is lost."""

    call: Call
    until_ms: int
    reply: Reply | None = None


class World(NamedTuple):
    """A state of the joint machine. The counters say what may still go wrong."""

    config: Config
    store: Store
    trainers: tuple[Trainer, ...]
    generators: tuple[Generator, ...]
    now_ms: int = 0
    post: tuple[OnTheWay, ...] = ()
    unanswered: int = 0
    cuts: int = 0
    crashes: int = 0
    restarts: int = 0
    flushes: int = 0
    failed_reads: int = 0
    creations: int = 0


class Machine(Enum):
    """Which machine decides."""

    VERSION = "version"
    WORKER = "worker"
    PUBLICATION = "publication"
    INSTALLATION = "installation"


DECIDE: Mapping[Machine, Callable[[Any, Any, Any], Decision[Any]]] = {
    Machine.VERSION: version.decide,
    Machine.WORKER: worker.decide,
    Machine.PUBLICATION: publication.decide,
    Machine.INSTALLATION: installation.decide,
}


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """One decision of one machine within a step; `after` is `before` where it was refused."""

    machine: Machine
    before: Any
    event: object
    moment: Any
    after: Any
    effects: tuple[object, ...] = ()
    refused: Refused | None = None


class Step(NamedTuple):
    """One move of the world, with every decision that it took."""

    move: tuple[str | int, ...]
    before: World
    after: World
    log: tuple[Decided, ...] = ()


def fresh(config: Config) -> World:
    """A version in STAGING, trainers that are about to capture, and nothing registered yet."""
    trainers = tuple(
        Trainer(WorkerId(f"t{i}"), SlotId(slot), begin_publication(UID, SlotId(slot)))
        for i, slot in enumerate(config.slots)
    )
    generators = tuple(Generator(WorkerId(f"g{i}")) for i in range(config.generators))
    store = Store(version.begin(UID, config.spec, 0, 1), (None,) * len(trainers))
    return World(
        config,
        store,
        trainers,
        generators,
        unanswered=config.unanswered,
        cuts=config.cuts,
        crashes=config.crashes,
        restarts=config.restarts,
        flushes=config.flushes,
        failed_reads=config.failed_reads,
        creations=config.creations,
    )


def moment_of(now_ms: int, workers: tuple[worker.WorkerRecord | None, ...]) -> version.Moment:
    """What a decision about the version may know; generators g0 to g3 are always registered here."""
    known = {record.worker_id: record for record in workers if record is not None}
    return version.Moment(now_ms, {**_READERS, **known})


_READERS = {
    worker_id: worker.WorkerRecord(worker_id, worker.WorkerRole.GENERATOR, MODEL, 0, FAR_MS)
    for worker_id in (WorkerId(f"g{i}") for i in range(4))
}
