"""When two worlds are the same world: what can still matter of each, in a form that can be hashed.

Times count from now, and those that have passed are all alike, because machines only ever ask whether a
deadline has passed. Numbers of lives and of records count only as "the present one" or not. So an
exploration that waits and repeats comes back to where it was, and ends.
"""

from __future__ import annotations

from collections.abc import Hashable

from statemachines.ids import WorkerId
from statemachines.installation_records import InstallationRecord, Leased, Pulling
from statemachines.publication_records import Draining, Orphaned, PublicationRecord, Published
from statemachines.version_records import Releasing, Retired, VersionRecord
from statemachines.world_records import Generator, OnTheWay, Store, Trainer, World


def key(world: World) -> Hashable:
    """A value that is equal for two worlds exactly when the same can happen in both from now on."""
    now_ms, born = world.now_ms, world.store.version.sequence if world.store.version else None
    return (
        _store(world.store, now_ms),
        tuple(_trainer(one, born, now_ms) for one in world.trainers),
        tuple(_generator(one, now_ms) for one in world.generators),
        tuple(_post(item, born, now_ms) for item in world.post),
        world.unanswered,
        world.cuts,
        world.crashes,
        world.restarts,
        world.flushes,
        world.failed_reads,
        world.creations,
    )


def _left_ms(at_ms: int | None, now_ms: int) -> int | None:
    return None if at_ms is None else max(at_ms - now_ms, 0)


def _store(store: Store, now_ms: int) -> Hashable:
    lives = {record.worker_id: record.life for record in store.workers if record is not None}
    workers = tuple(
        record and (record.state, _left_ms(record.deadline_ms, now_ms)) for record in store.workers
    )
    return workers, store.version and _version(store.version, lives, now_ms)


def _version(record: VersionRecord, lives: dict[WorkerId, int], now_ms: int) -> Hashable:
    phase, times = record.phase, tuple[int | None, ...]()
    if isinstance(phase, Releasing):
        times = (_left_ms(phase.drain_deadline_ms, now_ms), _left_ms(phase.abandon_at_ms, now_ms))
    elif isinstance(phase, Retired):
        times = (_left_ms(phase.forget_at_ms, now_ms),)
    return (
        record.state,
        times,
        frozenset(
            (shard.key, shard.manifest_digest, shard.life == lives.get(shard.worker_id))
            for shard in record.publications.values()
        ),
        frozenset((lease_id, _left_ms(held.deadline_ms, now_ms)) for lease_id, held in record.leases.items()),
        frozenset((slot, worker) for slot, worker, life in record.left if life == lives.get(worker)),
    )


def _trainer(trainer: Trainer, born: int | None, now_ms: int) -> Hashable:
    if not trainer.alive:
        return trainer.incarnation
    return (
        _publication(trainer.publication, now_ms),
        _left_ms(trainer.registered_until_ms, now_ms),
        trainer.registered_until_ms > 0,
        _left_ms(trainer.readers_gone_by_ms, now_ms),
        _left_ms(trainer.drained_at_ms, now_ms),
        trainer.record == born,
        trainer.separated,
        trainer.waiting,
        trainer.incarnation,
        trainer.overwritten,
        trainer.cut_off,
    )


def _publication(record: PublicationRecord, now_ms: int) -> Hashable:
    phase = record.phase
    match phase:
        case Published(confirmed, until_ms):
            return confirmed, _left_ms(until_ms or 0, now_ms)
        case Draining(until_ms):
            return "draining", _left_ms(until_ms or 0, now_ms)
        case Orphaned(bound_ms, released, forgotten):
            return _left_ms(bound_ms, now_ms), released, forgotten
        case _:
            return phase


def _generator(generator: Generator, now_ms: int) -> Hashable:
    if not generator.alive:
        return "dead"
    return (
        _installation(generator.installation, generator.last_read_ms, now_ms),
        generator.granted,
        generator.reads,
        generator.staging,
        generator.late,
        generator.parameters,
        _left_ms(generator.returning_until_ms, now_ms),
        _left_ms(generator.acquire_from_ms, now_ms),
        generator.waiting,
    )


def _installation(record: InstallationRecord, last_read_ms: int, now_ms: int) -> Hashable:
    working = record.working
    if not isinstance(working, Leased):
        return record
    left_ms = _left_ms(working.lease_deadline_ms, now_ms)
    known: Hashable = (record.state, record.resting, record.quarantined, left_ms, working.still_live)
    if not isinstance(working, Pulling):
        return known, getattr(working, "sources", None)
    protected = last_read_ms < working.lease_deadline_ms
    until_ms = _left_ms(working.sources_until_ms, now_ms)
    return known, working.sources, working.confirmed, until_ms, protected


def _post(item: OnTheWay, born: int | None, now_ms: int) -> Hashable:
    call, reply = item.call, item.reply
    body = reply and (
        reply.refused and reply.refused.message,
        reply.record == born,
        reply.record is None,
        reply.state,
        reply.live,
        reply.readers_gone_in_ms,
    )
    return call.kind, call.who, call.incarnation, now_ms - call.sent_ms, item.until_ms - now_ms, body
