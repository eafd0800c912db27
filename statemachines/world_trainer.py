"""The trainers of the joint machine: what a driver of the publication machine owes it.

1. The bound of a separation counts from the end of the last registration that may have been applied,
   answered or not; after one that went unanswered the trainer registers again only once a question that
   changes nothing has been answered.
2. An answer that comes from another record than the one it knows is `VersionLost` first. Its bound is a
   lease TTL from then: whoever read under the old record can't renew.
3. `Drained` is said when a released version has answered a withdrawal with "done" or "not found", when
   it is retired, or when every lease that was live at a retraction must have lapsed.
4. A refused announcement is `AnnounceRefused` only where none before went unanswered.
5. Being cut off is a condition: what is offered while it lasts is told of it, too.
6. Under an id that was used before, a process ends that registration before it makes its own.
"""

from __future__ import annotations

from statemachines import publication, worker
from statemachines.publication_records import (
    Announced,
    AnnounceRefused,
    AnnounceShard,
    AnnounceUnknown,
    BoundPassed,
    BreakFences,
    Captured,
    CaptureFailed,
    Close,
    CloseDeadlinePassed,
    Discard,
    Drained,
    Draining,
    Event,
    Orphaned,
    PublicationRecord,
    PublicationState,
    Publish,
    Published,
    Reachable,
    RegistrationLost,
    Release,
    ServerUnreachable,
    SignalReuse,
    Staged,
    VersionLost,
    VersionReleased,
    WatchDrain,
    begin,
)
from statemachines.version_records import VersionState
from statemachines.world_records import UID, Bytes, Call, Kind, Machine, Reply, Trainer, World
from statemachines.world_server import Turn, decide_worker

SIMPLE: dict[str, Event] = {
    "capture": Captured(),
    "fail": CaptureFailed("no memory"),
    "publish": Publish(),
    "discard": Discard(),
    "release": Release(),
    "close": Close(),
    "watch": VersionReleased(),
    "bound": BoundPassed(),
    "drained": Drained(),
    "close-deadline": CloseDeadlinePassed(),
}
_OFFERED = (PublicationState.PUBLISHED, PublicationState.DRAINING)
_OPEN = (*_OFFERED, PublicationState.ORPHANED)


def tell(turn: Turn, i: int, event: Event) -> None:
    """Tell a publication something, and do what it then asks for."""
    decided = turn.decide(Machine.PUBLICATION, turn.trainer(i).publication, event)
    turn.change_trainer(i, publication=decided.after)
    for effect in decided.effects:
        if isinstance(effect, SignalReuse):
            _overwrite(turn, i)
        elif isinstance(effect, WatchDrain):
            turn.change_trainer(i, drained_at_ms=None)
        elif isinstance(effect, BreakFences) and isinstance(event, CloseDeadlinePassed):
            turn.change_trainer(i, alive=False)
    trainer = turn.trainer(i)
    if trainer.separated and _is_offered(trainer.publication):
        tell(turn, i, ServerUnreachable(trainer.readers_gone_by_ms))


def _is_offered(record: PublicationRecord) -> bool:
    announcing = isinstance(record.phase, Staged) and record.phase.announcing
    return announcing or record.state in _OFFERED


def _overwrite(turn: Turn, i: int) -> None:
    """The owner writes the next version into its buffer: whoever reads on reads rubbish."""
    owner = turn.change_trainer(i, overwritten=True, drained_at_ms=None)
    shard = (owner.worker_id, owner.incarnation)

    def spoil(reads: tuple[tuple[tuple[str, int], Bytes], ...]) -> tuple[tuple[tuple[str, int], Bytes], ...]:
        return tuple((s, Bytes.SPOILT if s == shard and b is Bytes.COMING else b) for s, b in reads)

    for j, generator in enumerate(turn.world.generators):
        turn.change_generator(j, reads=spoil(generator.reads), late=spoil(generator.late))


def hear(turn: Turn, call: Call, reply: Reply | None) -> None:
    """Take in an answer, or that there is none."""
    i = call.who
    trainer = turn.change_trainer(i, waiting=False)
    if not trainer.alive or trainer.incarnation != call.incarnation:
        return
    if call.kind is Kind.REGISTER:
        _hear_registration(turn, i, call, reply)
    elif call.kind is Kind.ANNOUNCE:
        _hear_announcement(turn, i, reply)
    elif reply is not None:
        _hear_drain(turn, i, reply)


def _bound_from(turn: Turn, ended_ms: int) -> int:
    config = turn.world.config
    return publication.readers_gone_by_ms(ended_ms, config.registration_ttl_ms, config.lease_ttl_ms, 0)


def _hear_registration(turn: Turn, i: int, call: Call, reply: Reply | None) -> None:
    trainer, config = turn.trainer(i), turn.world.config
    if reply is None:
        life_over_ms = trainer.readers_gone_by_ms - config.lease_ttl_ms
        if not trainer.separated or call.sent_ms < life_over_ms:  # it may have gone on with the same life
            ended_ms = turn.now_ms + config.call_life_ms
            trainer = turn.change_trainer(i, readers_gone_by_ms=_bound_from(turn, ended_ms))
        turn.change_trainer(i, separated=True)
        tell(turn, i, ServerUnreachable(trainer.readers_gone_by_ms))
        return
    if call.sent_ms >= trainer.registered_until_ms and not trainer.separated:
        tell(turn, i, RegistrationLost(trainer.readers_gone_by_ms))  # this began a new life
    until_ms = call.sent_ms + config.registration_ttl_ms
    gone_ms = max(trainer.readers_gone_by_ms, _bound_from(turn, turn.now_ms))
    turn.change_trainer(i, registered_until_ms=until_ms, readers_gone_by_ms=gone_ms)
    if _is_same_record(turn, i, reply):
        _reach(turn, i)


def _reach(turn: Turn, i: int) -> None:
    turn.change_trainer(i, separated=False)
    tell(turn, i, Reachable())


def _is_same_record(turn: Turn, i: int, reply: Reply) -> bool:
    """Whether the record that answers is the one we know; if it is another, take it on."""
    trainer = turn.trainer(i)
    if reply.record != trainer.record:
        tell(turn, i, VersionLost(turn.now_ms + turn.world.config.lease_ttl_ms))
        turn.change_trainer(i, drained_at_ms=None)
        if reply.record is None:
            turn.change_trainer(i, separated=True)
            return False
        turn.change_trainer(i, record=reply.record)
        _reach(turn, i)
    return True


def _hear_announcement(turn: Turn, i: int, reply: Reply | None) -> None:
    if reply is None:
        tell(turn, i, AnnounceUnknown())
        return
    if not _is_same_record(turn, i, reply):
        return
    if reply.refused is None:
        tell(turn, i, Announced())
    elif "not registered" in reply.refused.message:
        turn.change_trainer(i, separated=True)
        tell(turn, i, RegistrationLost(turn.trainer(i).readers_gone_by_ms))
    else:
        tell(turn, i, AnnounceRefused())


def _hear_drain(turn: Turn, i: int, reply: Reply) -> None:
    before = turn.trainer(i).record
    if not _is_same_record(turn, i, reply) or before != turn.trainer(i).record:
        return
    if reply.state in (VersionState.RELEASING, VersionState.RETIRED):
        # Refused with "not found", or retired: in both cases nobody reads.
        if reply.refused is None or "has not published" in reply.refused.message:
            tell(turn, i, Drained())
    else:
        turn.change_trainer(i, drained_at_ms=turn.now_ms + reply.readers_gone_in_ms)


def notice_time(turn: Turn, i: int) -> None:
    """What the clock alone tells a trainer: that its registration must have lapsed."""
    trainer = turn.trainer(i)
    if trainer.alive and not trainer.separated and turn.now_ms >= trainer.registered_until_ms > 0:
        turn.change_trainer(i, separated=True)
        tell(turn, i, RegistrationLost(trainer.readers_gone_by_ms))


def restart(turn: Turn, i: int) -> None:
    """A new process under the same id, with other buffers."""
    old = turn.trainer(i)
    if turn.store.workers[i] is not None:
        decide_worker(turn, i, worker.Leave())
    turn.change_trainer(
        i,
        publication=begin(UID, old.slot_id),
        registered_until_ms=0,
        readers_gone_by_ms=0,
        separated=False,
        drained_at_ms=None,
        waiting=False,
        incarnation=old.incarnation + 1,
        overwritten=False,
        alive=True,
    )


def calls_of(world: World, i: int) -> list[Kind]:
    """The calls that a trainer may make now."""
    trainer, kinds = world.trainers[i], list[Kind]()
    if not trainer.alive or trainer.waiting:
        return kinds
    if not (trainer.separated and trainer.cut_off) and _worth_registering(world, trainer):
        kinds.append(Kind.REGISTER)
    if trainer.separated or not trainer.registered_until_ms:
        return kinds
    if AnnounceShard() in publication.pending(trainer.publication):
        kinds.append(Kind.ANNOUNCE)
    if isinstance(trainer.publication.phase, Draining) and trainer.drained_at_ms is None:
        kinds.append(Kind.DRAIN)
    return kinds


def _worth_registering(world: World, trainer: Trainer) -> bool:
    if trainer.publication.state in (PublicationState.REUSABLE, PublicationState.FAILED):
        return False
    fresh = world.now_ms + world.config.registration_ttl_ms
    return trainer.separated or trainer.registered_until_ms < fresh


def events_of(world: World, i: int) -> list[str]:
    """The things beside calls that may happen to a trainer's publication now."""
    trainer = world.trainers[i]
    if not trainer.alive:
        return []
    phase, state, names = trainer.publication.phase, trainer.publication.state, list[str]()
    if state is PublicationState.CAPTURING:
        names += ["capture", *(["fail"] if world.config.stray else [])]
    if isinstance(phase, Staged) and not phase.announcing and trainer.registered_until_ms:
        names.append("publish")
    if isinstance(phase, Staged):
        names.append("discard")
    if isinstance(phase, Published | Staged) or (isinstance(phase, Orphaned) and not phase.released):
        names.append("release")
    record = world.store.version
    if isinstance(phase, Published) and not trainer.cut_off and record is not None:
        ending = record.state in (VersionState.RELEASING, VersionState.RETIRED)
        names += ["watch"] if ending and record.sequence == trainer.record else []
    if state is PublicationState.ORPHANED or (world.config.stray and state in _OFFERED):
        names.append("bound")
    if state in _OPEN and trainer.drained_at_ms is not None and world.now_ms >= trainer.drained_at_ms:
        names.append("drained")
    if world.config.stray and state not in (PublicationState.REUSABLE, PublicationState.FAILED):
        names += ["close", "close-deadline"]
    return names
