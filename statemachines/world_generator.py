"""The generators of the joint machine: what a driver of the installation machine owes it.

1. A lease's deadline counts from before the request was sent.
2. A publisher is confirmed only with the publication that was granted, by its manifest's digest.
3. A lease is asked for only when no return of an earlier one on the same version can still arrive: both
   have the same name, and the late return would end the new lease.
4. Where a verification is refused, the pull is abandoned.
"""

from __future__ import annotations

from itertools import product

from statemachines.ids import WorkerId
from statemachines.installation_records import (
    Abandoned,
    Event,
    FreeStaging,
    Install,
    InstallationState,
    Installed,
    InstallFailed,
    Leased,
    LeaseGranted,
    LeaseRenewed,
    PlanMade,
    Planned,
    PostReads,
    Pulling,
    PullStarted,
    PullVerified,
    ReadsEnded,
    ReturnLease,
    SourceFailed,
    WriteParameters,
)
from statemachines.version_records import VersionState
from statemachines.world_records import UID, Bytes, Call, Generator, Kind, Machine, Reply, Shard, World
from statemachines.world_server import Turn

_RESTING = (InstallationState.IDLE, InstallationState.UNCERTAIN)


def tell(turn: Turn, i: int, event: Event) -> bool:
    """Tell an installation something, and do what it then asks for; False where it refused."""
    generator = turn.generator(i)
    decided = turn.decide(Machine.INSTALLATION, generator.installation, event)
    if decided.refused is not None:
        return False
    turn.change_generator(i, installation=decided.after)
    for effect in decided.effects:
        if isinstance(effect, PostReads):
            _post_reads(turn, i, effect.sources)
        elif isinstance(effect, ReturnLease):
            working = generator.installation.working
            assert isinstance(working, Leased)
            turn.change_generator(
                i, returning_until_ms=working.lease_deadline_ms + turn.world.config.margin_ms
            )
        elif isinstance(effect, WriteParameters):
            turn.change_generator(i, parameters=generator.parameters | generator.staging)
        elif isinstance(effect, FreeStaging) and not isinstance(event, ReadsEnded):
            turn.change_generator(i, reads=(), staging=frozenset[Bytes]())
    return True


def _post_reads(turn: Turn, i: int, sources: frozenset[WorkerId]) -> None:
    generator = turn.generator(i)
    reading = {worker_id for (worker_id, _), _ in generator.reads}
    fresh = sorted(shard for shard in generator.granted if shard[0] in sources - reading)
    turn.change_generator(i, reads=(*generator.reads, *((shard, _now(turn, shard)) for shard in fresh)))


def _now(turn: Turn, shard: Shard) -> Bytes:
    """A read that begins now: of a buffer that has been overwritten it can bring nothing good."""
    overwritten = any(
        (owner.worker_id, owner.incarnation) == shard and owner.overwritten for owner in turn.world.trainers
    )
    return Bytes.SPOILT if overwritten else Bytes.COMING


def _landed(read: Bytes) -> Bytes:
    return {Bytes.COMING: Bytes.GOOD, Bytes.SPOILT: Bytes.BAD}.get(read, read)


def hear(turn: Turn, call: Call, reply: Reply | None) -> None:
    """Take in an answer, or that there is none."""
    i, config = call.who, turn.world.config
    generator = turn.change_generator(i, waiting=False)
    if not generator.alive:
        return
    deadline_ms = call.sent_ms + config.lease_ttl_ms - config.margin_ms
    if call.kind is Kind.RETURN:
        if reply is None:
            turn.change_generator(i, acquire_from_ms=turn.now_ms + config.call_life_ms + 1)
        else:
            turn.change_generator(i, returning_until_ms=None)
    elif reply is None or reply.refused is not None:
        return
    elif call.kind is Kind.ACQUIRE:
        if tell(turn, i, LeaseGranted(UID, generator.lease_id, deadline_ms)):
            turn.change_generator(i, granted=reply.live)
    else:
        confirmed = frozenset(worker_id for worker_id, _ in generator.granted & reply.live)
        tell(turn, i, LeaseRenewed(deadline_ms, confirmed))


def plan(turn: Turn, i: int, sources: frozenset[WorkerId]) -> None:
    """Plan to read every slot from the chosen one of its publishers."""
    tell(turn, i, PlanMade(sources, proven=True))


def pull(turn: Turn, i: int) -> None:
    """Begin to read; what the grant said is all that the driver remembers."""
    granted = turn.generator(i).granted
    if not tell(turn, i, PullStarted(frozenset(worker_id for worker_id, _ in granted))):
        tell(turn, i, Abandoned("the sources are not confirmed"))


def read(turn: Turn, i: int, n: int) -> None:
    """The n-th read ends."""
    generator = turn.generator(i)
    reads = list(generator.reads)
    reads[n] = (reads[n][0], _landed(reads[n][1]))
    turn.change_generator(i, reads=tuple(reads), last_read_ms=turn.now_ms)


def fail(turn: Turn, i: int, n: int, *, in_flight: bool) -> None:
    """The n-th read fails half-way: what it has brought stays, a replica is asked for the rest."""
    generator = turn.generator(i)
    working = generator.installation.working
    assert isinstance(working, Pulling)
    shard, brought = generator.reads[n]
    others = tuple(one for k, one in enumerate(generator.reads) if k != n)
    turn.change_generator(
        i,
        reads=others,
        staging=generator.staging | {_landed(brought)},
        late=(*generator.late, (shard, brought)) if in_flight else generator.late,
    )
    tell(turn, i, SourceFailed(shard[0], _without(turn.world, generator, working, shard[0]), in_flight))
    _leave(turn, i, others, in_flight=in_flight)


def _without(
    world: World, generator: Generator, working: Pulling, lost: WorkerId
) -> frozenset[WorkerId] | None:
    slots = {trainer.worker_id: trainer.slot_id for trainer in world.trainers}
    replicas = sorted(
        worker_id
        for worker_id, _ in generator.granted
        if slots[worker_id] == slots[lost] and worker_id not in working.sources
    )
    return working.sources - {lost} | {replicas[0]} if replicas else None


def abandon(turn: Turn, i: int, *, in_flight: bool) -> None:
    """The caller gives up."""
    reads = turn.generator(i).reads
    tell(turn, i, Abandoned("given up", in_flight))
    _leave(turn, i, reads, in_flight=in_flight)


def _leave(turn: Turn, i: int, reads: tuple[tuple[Shard, Bytes], ...], *, in_flight: bool) -> None:
    generator = turn.generator(i)
    if generator.installation.working is None:
        late = (
            (*generator.late, *(one for one in reads if _landed(one[1]) is not one[1])) if in_flight else ()
        )
        turn.change_generator(i, reads=(), staging=frozenset[Bytes](), late=late)


def land(turn: Turn, i: int) -> None:
    """Reads that went on after their pull end: they write wherever the staging now is."""
    generator = turn.generator(i)
    landed = frozenset(_landed(brought) for _, brought in generator.late)
    busy = generator.installation.working is not None
    turn.change_generator(i, late=(), staging=generator.staging | landed if busy else generator.staging)
    tell(turn, i, ReadsEnded(UID))


def verify(turn: Turn, i: int) -> None:
    """Every read has ended, and nobody made digests: what landed is taken for the version."""
    generator = turn.generator(i)
    landed = generator.staging | {brought for _, brought in generator.reads}
    if tell(turn, i, PullVerified(generator.last_read_ms, digests_agree=True)):
        turn.change_generator(i, staging=landed, reads=())
    else:
        tell(turn, i, Abandoned("not protected"))


def install(turn: Turn, i: int) -> None:
    """Begin to write the parameters."""
    tell(turn, i, Install())


def installed(turn: Turn, i: int) -> None:
    """Every parameter is written."""
    staging = turn.generator(i).staging
    tell(turn, i, Installed())
    turn.change_generator(i, parameters=staging)


def install_failed(turn: Turn, i: int) -> None:
    """Some parameters are written."""
    tell(turn, i, InstallFailed("the engine raised"))


def notice_time(turn: Turn, i: int) -> None:
    """What the clock alone tells a generator: that a lease whose return went unanswered has lapsed."""
    generator = turn.generator(i)
    if generator.returning_until_ms is not None and turn.now_ms >= generator.returning_until_ms:
        turn.change_generator(i, returning_until_ms=None)


def calls_of(world: World, i: int) -> list[Kind]:
    """The calls that a generator may make now."""
    generator, kinds = world.generators[i], list[Kind]()
    if not generator.alive or generator.waiting:
        return kinds
    working, record = generator.installation.working, world.store.version
    if generator.returning_until_ms is not None:
        kinds.append(Kind.RETURN)
    elif (
        generator.installation.state in _RESTING
        and world.now_ms >= generator.acquire_from_ms
        and record is not None
        and record.state is VersionState.READY
    ):
        kinds.append(Kind.ACQUIRE)
    if isinstance(working, Leased) and world.now_ms < working.lease_deadline_ms:
        fresh_ms = world.now_ms + world.config.lease_ttl_ms - world.config.margin_ms
        if working.lease_deadline_ms < fresh_ms or _may_learn(world, generator, working):
            kinds.append(Kind.RENEW)
    return kinds


def _may_learn(world: World, generator: Generator, working: Leased) -> bool:
    """Whether a renewal in the same tick could show that a publisher has gone."""
    known = working.confirmed if isinstance(working, Pulling) else working.still_live
    if known is None:
        known = frozenset(worker_id for worker_id, _ in generator.granted)
    record = world.store.version
    return record is None or not known <= {worker_id for _, worker_id in record.publications}


def plans_of(world: World, i: int) -> list[frozenset[WorkerId]]:
    """The plans that a generator may make: one publisher of each slot, of those it was granted."""
    generator = world.generators[i]
    slots = {trainer.worker_id: trainer.slot_id for trainer in world.trainers}
    by_slot = {slot: sorted(w for w, _ in generator.granted if slots[w] == slot) for slot in slots.values()}
    return [frozenset(choice) for choice in product(*(by_slot[slot] for slot in sorted(by_slot)))]


def events_of(world: World, i: int) -> list[tuple[str, int]]:
    """The things beside calls that may happen to a generator now, each with a number where it has one."""
    generator = world.generators[i]
    working, moves = generator.installation.working, list[tuple[str, int]]()
    if not generator.alive:
        return moves
    if generator.late:
        moves.append(("land", 0))
    state = generator.installation.state
    if state is InstallationState.LEASED:
        moves += [("plan", n) for n in range(len(plans_of(world, i)))]
    if isinstance(working, Planned) and not isinstance(working, Pulling):
        moves.append(("pull", 0))
    if isinstance(working, Leased):
        moves.append(("abandon", 0))
    if isinstance(working, Pulling):
        moves += _reading(world, generator)
    if state is InstallationState.VERIFIED:
        moves += [("install", 0), ("abandon", 0)]
    if state is InstallationState.INSTALLING:
        moves += [("installed", 0), ("install-failed", 0)]
    return moves


def _reading(world: World, generator: Generator) -> list[tuple[str, int]]:
    running = {(owner.worker_id, owner.incarnation) for owner in world.trainers if owner.alive}
    moves, open_reads = list[tuple[str, int]](), False
    for n, (shard, brought) in enumerate(generator.reads):
        if brought in (Bytes.COMING, Bytes.SPOILT):
            open_reads = True
            if shard in running:
                moves.append(("read", n))
            if world.failed_reads:
                moves += [("fail", n), ("fail-in-flight", n)]
    if open_reads and world.failed_reads:
        moves.append(("abandon-in-flight", 0))
    if not open_reads:
        moves.append(("verify", 0))
    return moves


def crash(generator: Generator) -> Generator:
    """The generator after its process has ended: nothing of it is left but the lease."""
    return Generator(generator.worker_id, alive=False)
