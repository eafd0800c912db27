"""The control plane of the joint machine: how calls are served, and one step's scratch paper.

Every command is decided after everything that is due has been settled. The real driver does so at each
command; here time passes in ticks only, so that it is enough to do it once in each.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias, TypeVar

from statemachines import version, worker
from statemachines.kernel import Reason, Refused
from statemachines.version_records import (
    AcquireLease,
    Erase,
    Event,
    Publication,
    PublishShard,
    RenewLease,
    RetractShard,
    ReturnLease,
    VersionRecord,
    VersionState,
    WithdrawShard,
    WorkerExpired,
)
from statemachines.world_records import (
    DECIDE,
    MODEL,
    UID,
    Call,
    Decided,
    Generator,
    Kind,
    Machine,
    OnTheWay,
    Reply,
    Shard,
    Step,
    Store,
    Trainer,
    World,
    moment_of,
)

T = TypeVar("T")


class Turn:
    """One step in the making: a world that is being changed, and the decisions so far."""

    def __init__(self, world: World) -> None:
        self.before = world
        self.log: list[Decided] = []
        self._fields: dict[str, Any] = {}
        self._world: World | None = world

    @property
    def world(self) -> World:
        """The world as it is by now."""
        if self._world is None:
            self._world = self.before._replace(**self._fields)
        return self._world

    @property
    def now_ms(self) -> int:
        """The time."""
        now_ms: int = self._field("now_ms")
        return now_ms

    @property
    def store(self) -> Store:
        """What the control plane knows."""
        store: Store = self._field("store")
        return store

    def trainer(self, i: int) -> Trainer:
        """A trainer."""
        trainer: Trainer = self._field("trainers")[i]
        return trainer

    def generator(self, i: int) -> Generator:
        """A generator."""
        generator: Generator = self._field("generators")[i]
        return generator

    def step(self, move: tuple[str | int, ...]) -> Step:
        """What came of it."""
        return Step(move, self.before, self.world, tuple(self.log))

    def change(self, **changes: Any) -> None:
        """Change fields of the world."""
        self._fields.update(changes)
        self._world = None

    def change_store(self, **changes: Any) -> None:
        """Change fields of what the control plane knows."""
        self.change(store=self.store._replace(**changes))

    def change_trainer(self, i: int, **changes: Any) -> Trainer:
        """Change fields of a trainer."""
        trainer = self.trainer(i)._replace(**changes)
        self.change(trainers=_with(self._field("trainers"), i, trainer))
        return trainer

    def change_generator(self, i: int, **changes: Any) -> Generator:
        """Change fields of a generator."""
        generator = self.generator(i)._replace(**changes)
        self.change(generators=_with(self._field("generators"), i, generator))
        return generator

    def send(self, item: OnTheWay) -> None:
        """Put something on the way."""
        self.change(post=(*self._field("post"), item))

    def decide(self, machine: Machine, record: Any, event: object) -> Decided:
        """Decide one event of one machine now, and log it."""
        decided = _decide(machine, record, event, self.now_ms, self.store.workers)
        self.log.append(decided)
        return decided

    def _field(self, name: str) -> Any:
        return self._fields[name] if name in self._fields else getattr(self.before, name)


def _with(items: tuple[T, ...], i: int, item: T) -> tuple[T, ...]:
    return (*items[:i], item, *items[i + 1 :])


Workers: TypeAlias = tuple[worker.WorkerRecord | None, ...]
_known: dict[Hashable, Decided] = {}
_records: dict[Hashable, VersionRecord] = {}


def forget() -> None:
    """Drop the decisions that are remembered: to be called when a table is another one."""
    _known.clear()
    _records.clear()


def _decide(machine: Machine, record: Any, event: object, now_ms: int, workers: Workers) -> Decided:
    """A decision; the same question is asked in very many worlds, so the answers are remembered."""
    of_version = machine is Machine.VERSION
    question = (machine, id(record) if of_version else record, event, now_ms, workers if of_version else ())
    decided = _known.get(question)
    if decided is None or (of_version and decided.before is not record):
        moment = moment_of(now_ms, workers) if of_version else now_ms
        try:
            decision = DECIDE[machine](record, event, moment)
        except Refused as refused:
            decided = Decided(machine, record, event, moment, record, (), refused)
        else:
            after = _the_same(decision.record) if of_version else decision.record
            decided = Decided(machine, record, event, moment, after, decision.effects)
        _known[question] = decided
    return decided


def _the_same(record: VersionRecord) -> VersionRecord:
    """One object for equal records, so that questions about it can be told apart by it."""
    phase = record.phase
    spans = ("drain_deadline_ms", "abandon_at_ms", "retention_ms", "forget_at_ms")
    times = tuple(getattr(phase, name, None) for name in spans)
    publications, leases = frozenset(record.publications.items()), frozenset(record.leases.items())
    what = (record.spec.expected_slots, record.sequence, record.state)
    return _records.setdefault((what, publications, leases, record.left, times), record)


def settle(turn: Turn) -> None:
    """Apply what is due: registrations that are over, and then everything about the version."""
    for i, record in enumerate(turn.store.workers):
        if (
            record is not None
            and record.state is worker.WorkerState.LIVE
            and turn.now_ms >= record.deadline_ms
        ):
            decide_worker(turn, i, worker.Expire())
    found = turn.store.version
    for event in _due(turn, found) if found is not None else ():
        decide_version(turn, event)


def _due(turn: Turn, record: VersionRecord) -> tuple[Event, ...]:
    return version.due(record, moment_of(turn.now_ms, turn.store.workers))


def decide_version(turn: Turn, event: Event) -> Refused | None:
    """Decide and commit one event of the version; erase it where the machine says so."""
    record = turn.store.version
    if record is None:
        return Refused(Reason.NOT_FOUND, f"version {UID} is not known")
    decided = turn.decide(Machine.VERSION, record, event)
    if decided.refused is None:
        erased = any(isinstance(effect, Erase) for effect in decided.effects)
        turn.change_store(version=None if erased else decided.after)
    return decided.refused


def decide_worker(turn: Turn, i: int, event: worker.Register | worker.Expire | worker.Leave) -> None:
    """Decide one event of a registration; versions that the end of a life concerns are told."""
    record, workers = turn.store.workers[i], list(turn.store.workers)
    lives = turn.store.lives + isinstance(event, worker.Register)
    if record is None:
        assert isinstance(event, worker.Register)
        workers[i] = worker.begin(turn.trainer(i).worker_id, event, turn.now_ms)
        turn.change_store(workers=tuple(workers), lives=lives)
        return
    decided = turn.decide(Machine.WORKER, record, event)
    workers[i] = decided.after
    turn.change_store(workers=tuple(workers), lives=lives)
    if decided.effects:
        decide_version(turn, WorkerExpired(record.worker_id))


def registration(turn: Turn) -> worker.Register:
    """A registration as a trainer asks for it, with the life that it would begin."""
    ttl_ms = turn.world.config.registration_ttl_ms
    return worker.Register(worker.WorkerRole.TRAINER, MODEL, ttl_ms, turn.store.lives + 1)


def serve(turn: Turn, call: Call) -> Reply:
    """Carry out a call that has arrived."""
    if call.kind is Kind.REGISTER:
        decide_worker(turn, call.who, registration(turn))
        return _reply(turn, None)
    if call.kind is Kind.DRAIN:
        return _serve_drain(turn, call)
    return _reply(turn, decide_version(turn, _event(turn, call)))


def _event(turn: Turn, call: Call) -> Event:
    config = turn.world.config
    if call.kind is Kind.ANNOUNCE:
        trainer = turn.trainer(call.who)
        manifest = str(call.incarnation)
        return PublishShard(Publication(trainer.slot_id, trainer.worker_id, 1, 1, manifest, "endpoint"))
    reader = turn.generator(call.who)
    if call.kind is Kind.ACQUIRE:
        return AcquireLease(reader.worker_id, config.lease_ttl_ms)
    if call.kind is Kind.RENEW:
        return RenewLease(reader.worker_id, config.lease_ttl_ms)
    return ReturnLease(reader.lease_id, reader.worker_id)


def _serve_drain(turn: Turn, call: Call) -> Reply:
    """Withdraw from a released version; retract from one that is not."""
    trainer = turn.trainer(call.who)
    record = turn.store.version
    if record is not None and record.state in (VersionState.RELEASING, VersionState.RETIRED):
        return _reply(turn, decide_version(turn, WithdrawShard(trainer.slot_id, trainer.worker_id)))
    return _reply(turn, decide_version(turn, RetractShard(trainer.slot_id, trainer.worker_id)))


def _reply(turn: Turn, refused: Refused | None) -> Reply:
    record = turn.store.version
    if record is None:
        return Reply(refused)
    leases = version.live_leases(record, turn.now_ms)
    gone_in_ms = max((held.deadline_ms - turn.now_ms for held in leases), default=0)
    return Reply(refused, record.sequence, record.state, _live_shards(turn, record), gone_in_ms)


def _live_shards(turn: Turn, record: VersionRecord) -> frozenset[Shard]:
    """The publications that count now, by what the control plane knows."""
    moment = moment_of(turn.now_ms, turn.store.workers)
    return frozenset(
        (shard.worker_id, int(shard.manifest_digest))
        for shard in record.publications.values()
        if version.publishes(shard, moment)
    )
