"""What the machines promise together: P1 to P8, each a function that finds the words for its violation.

They look at what is true (which buffer was overwritten, what was read) and at plain deadlines; none of
them asks a machine's own guard whether the machine is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from statemachines import version, worker
from statemachines.installation_records import Leased, LeaseRenewed, Planned, Pulling
from statemachines.kernel import Refused
from statemachines.publication_records import Draining, Orphaned, Published
from statemachines.version_records import (
    AcquireLease,
    Releasing,
    RenewLease,
    ReturnLease,
    VersionState,
)
from statemachines.world_records import DECIDE, Bytes, Decided, Generator, Machine, Shard, Step, World


def p1_no_reuse_under_a_reader(world: World) -> str | None:
    """A buffer is written again only when nobody who may still read it holds a live lease.

    Nor may anybody be sent to it then: no live publication names it.
    """
    for owner in world.trainers:
        if not (owner.alive and owner.overwritten):
            continue
        shard = (owner.worker_id, owner.incarnation)
        for reader in world.generators:
            if shard in _may_read(reader, world.now_ms):
                return f"{owner.worker_id} has written its buffer again while {reader.worker_id} may read it"
        if shard in _offered(world):
            return f"{owner.worker_id} has written its buffer again, and readers are still sent to it"
    return None


def _may_read(reader: Generator, now_ms: int) -> frozenset[Shard]:
    working = reader.installation.working
    if not reader.alive or not isinstance(working, Leased) or now_ms >= working.lease_deadline_ms:
        return frozenset()
    workers = frozenset(worker_id for worker_id, _ in reader.granted)
    if isinstance(working, Pulling):
        workers = working.confirmed
        if working.sources_until_ms is not None and now_ms < working.sources_until_ms:
            workers |= working.sources
    elif working.still_live is not None:
        workers &= working.still_live
    if isinstance(working, Planned) and not isinstance(working, Pulling):
        workers &= working.sources
    return frozenset(shard for shard in reader.granted if shard[0] in workers)


def _offered(world: World) -> frozenset[Shard]:
    record = world.store.version
    if record is None or record.state is not VersionState.READY:
        return frozenset()
    return frozenset(
        (shard.worker_id, int(shard.manifest_digest))
        for shard in record.publications.values()
        if _is_live(world, shard.worker_id, shard.life)
    )


def _is_live(world: World, worker_id: str, life: int) -> bool:
    return any(
        known is not None
        and known.worker_id == worker_id
        and known.life == life
        and known.state is worker.WorkerState.LIVE
        and world.now_ms < known.deadline_ms
        for known in world.store.workers
    )


def p2_no_torn_install(world: World) -> str | None:
    """What is served, or verified and about to be, is the version and nothing else."""
    for reader in world.generators:
        serves = reader.installation.serving is not None and Bytes.BAD in reader.parameters
        if serves or (reader.installation.state == "VERIFIED" and Bytes.BAD in reader.staging):
            return f"{reader.worker_id} took rubbish for the version"
    return None


def p3_ready_is_complete_and_alive(world: World) -> str | None:
    """READY means that every expected slot has a publication of a live worker, and the other way round.

    A live publication is that of the process that runs under the worker's name, or ran there last.
    """
    record = world.store.version
    if record is None or record.state not in (version.STAGING, version.READY, version.DEGRADED):
        return None
    live = [s for s in record.publications.values() if _is_live(world, s.worker_id, s.life)]
    missing = set(record.spec.expected_slots) - {shard.slot_id for shard in live}
    if record.state is VersionState.READY and missing:
        return f"the version is READY without a live publication of slot {min(missing)}"
    if record.state is not VersionState.READY and not missing:
        return f"the version is {record.state.value}, and every slot has a live publication"
    for shard in live:
        owner = next(t for t in world.trainers if t.worker_id == shard.worker_id)
        if int(shard.manifest_digest) != owner.incarnation:
            return f"{owner.worker_id} counts as live for a publication of an earlier process"
    return None


def p4_leases_end(world: World) -> str | None:
    """After a release no lease outlives the drain deadline by more than its TTL.

    That everything ends is more than one state can show: see `rundown.py`.
    """
    record = world.store.version
    if record is None or not isinstance(record.phase, Releasing):
        return None
    limit_ms = record.phase.drain_deadline_ms + world.config.lease_ttl_ms
    late = [held.lease_id for held in record.leases.values() if held.deadline_ms > limit_ms]
    return f"lease {late[0]} outlives the drain deadline by more than a TTL" if late else None


def p4_wanted_back_is_never_offered_again(one: Decided) -> str | None:
    """A buffer that its owner wants back is on its way to the end, whatever comes between."""
    before, after = one.before, one.after
    if one.machine is not Machine.PUBLICATION or not isinstance(after.phase, Published):
        return None
    wanted = isinstance(before.phase, Draining) or (
        isinstance(before.phase, Orphaned) and before.phase.released
    )
    return f"{after.slot_id} was wanted back, and is offered again" if wanted else None


def p5_nothing_is_for_ever(world: World) -> str | None:
    """What is over by its deadline is not on file any more, once the clock has been looked at."""
    record = world.store.version
    if record is None:
        return None
    for held in record.leases.values():
        if world.now_ms >= held.deadline_ms:
            return f"lease {held.lease_id} is on file after its deadline"
    for shard in record.publications.values():
        if not _is_live(world, shard.worker_id, shard.life):
            return f"the publication of {shard.worker_id} is on file after its registration"
    if record.state is VersionState.RELEASING and not record.leases and not record.publications:
        return "nobody reads or publishes the version, and it is not RETIRED"
    return None


def p6_one_version_is_served(world: World) -> str | None:
    """A generator says that it serves a version only where every parameter is that version's."""
    for reader in world.generators:
        mixed = len(reader.parameters) != 1
        if reader.installation.serving is not None and mixed:
            return f"{reader.worker_id} says that it serves, and its parameters are mixed"
        if reader.installation.state == "SERVING" and reader.installation.serving is None:
            return f"{reader.worker_id} serves, and doesn't say what"
    return None


def p7_one_lease_one_end(one: Decided) -> str | None:
    """A lease goes by its holder's return or by its deadline, and a lapsed one is not renewed.

    The reader's own lease lapses by the reader's clock, and is not revived by a reply that comes late.
    """
    if one.machine is Machine.INSTALLATION:
        before, after = one.before.working, one.after.working
        revived = isinstance(one.event, LeaseRenewed) and isinstance(before, Leased) and before != after
        return (
            "a reader's lapsed lease was renewed"
            if revived and one.moment >= before.lease_deadline_ms
            else None
        )
    if one.machine is not Machine.VERSION:
        return None
    before, after, now_ms = one.before.leases, one.after.leases, one.moment.now_ms
    for lease_id, held in before.items():
        now = after.get(lease_id)
        if now is None and now_ms < held.deadline_ms:
            if not isinstance(one.event, ReturnLease) or one.event.worker_id != held.worker_id:
                return f"lease {lease_id} went before its deadline, and {held.worker_id} did not return it"
        elif now is not None and now.deadline_ms < held.deadline_ms:
            return f"lease {lease_id} was shortened"
        elif now not in (None, held) and now_ms >= held.deadline_ms and isinstance(one.event, RenewLease):
            return f"lease {lease_id} had lapsed, and was renewed"
    for lease_id in after.keys() - before.keys():
        if not isinstance(one.event, AcquireLease):
            return f"lease {lease_id} came by {type(one.event).__name__}"
    return None


def p8_repeats_are_harmless(one: Decided) -> str | None:
    """The same command again, at the same moment, changes nothing more or is refused."""
    if one.refused is not None:
        return None
    try:
        again = DECIDE[one.machine](one.after, one.event, one.moment).record
    except Refused:
        return None
    name = type(one.event).__name__
    return None if again == one.after else f"{name} twice is not {name} once"


OF_WORLDS: Mapping[str, Callable[[World], str | None]] = {
    "P1": p1_no_reuse_under_a_reader,
    "P2": p2_no_torn_install,
    "P3": p3_ready_is_complete_and_alive,
    "P4": p4_leases_end,
    "P5": p5_nothing_is_for_ever,
    "P6": p6_one_version_is_served,
}
OF_DECISIONS: Mapping[str, Callable[[Decided], str | None]] = {
    "P4": p4_wanted_back_is_never_offered_again,
    "P7": p7_one_lease_one_end,
    "P8": p8_repeats_are_harmless,
}


def broken_in(world: World) -> tuple[str, ...]:
    """What is broken in a world, each with the promise's name; nothing where all hold."""
    found = ((name, check(world)) for name, check in OF_WORLDS.items())
    return tuple(f"{name}: {words}" for name, words in found if words is not None)


@cache
def broken_by(one: Decided) -> tuple[str, ...]:
    """What a decision breaks, likewise."""
    found = ((name, check(one)) for name, check in OF_DECISIONS.items())
    return tuple(f"{name}: {words}" for name, words in found if words is not None)


def violations(step: Step) -> tuple[str, ...]:
    """What a step breaks: by its decisions, or in the world that it leads to."""
    return (*(words for one in step.log for words in broken_by(one)), *broken_in(step.after))
