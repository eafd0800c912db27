"""The machines joined: a version, its trainers and generators, a lossy network, and time.

`moves(world)` are all the things that may happen next, `step(world, move)` is what then happens. Both are
pure, so the world can be explored state by state; `invariants.py` has the promises that hold in each.
The processes do what drivers of the machines must do and no more: `world_trainer.py` and
`world_generator.py` list it. What the machines ask for as effects becomes an event of another machine.
"""

from __future__ import annotations

from typing import TypeAlias

from statemachines import version
from statemachines import world_generator as generators
from statemachines import world_trainer as trainers
from statemachines.ids import LeaseId
from statemachines.version_records import (
    LeaseLapsed,
    Release,
    RetentionOver,
    ReturnLease,
    WorkerExpired,
)
from statemachines.worker import Expire
from statemachines.world_records import (
    UID,
    Call,
    Config,
    Kind,
    OnTheWay,
    Outcome,
    Step,
    World,
    fresh,
)
from statemachines.world_server import Turn, decide_version, decide_worker, serve, settle

__all__ = ["Config", "Move", "Step", "World", "moves", "start", "step"]

Move: TypeAlias = tuple[str | int, ...]
_OF_GENERATORS = (Kind.ACQUIRE, Kind.RENEW, Kind.RETURN)


def start(config: Config) -> World:
    """The world at its beginning."""
    world = fresh(config)
    for i in range(len(config.slots) if config.published else 0):
        for move in _PUBLISHING:
            world = step(world, tuple(i if part == "i" else part for part in move)).after
    return world


_PUBLISHING: tuple[Move, ...] = (
    ("call", Kind.REGISTER, "i", Outcome.OK),
    ("trainer", "i", "capture"),
    ("trainer", "i", "publish"),
    ("call", Kind.ANNOUNCE, "i", Outcome.OK),
)


def moves(world: World) -> list[Move]:
    """Everything that may happen next, in an order that depends on the world alone."""
    found: list[Move] = []
    for i, trainer in enumerate(world.trainers):
        for kind in trainers.calls_of(world, i):
            found += _outcomes(world, kind, i, cut_off=trainer.cut_off)
        found += [("trainer", i, name) for name in trainers.events_of(world, i)]
        if trainer.alive and world.cuts and not trainer.cut_off:
            found.append(("cut", i))
        if trainer.cut_off:
            found.append(("mend", i))
        if trainer.alive and world.crashes:
            found.append(("crash-trainer", i))
        if not trainer.alive and world.restarts and not any(i == item.call.who for item in world.post):
            found.append(("restart", i))
    for j, generator in enumerate(world.generators):
        for kind in generators.calls_of(world, j):
            found += _outcomes(world, kind, j, cut_off=False)
        found += [("generator", j, name, n) for name, n in generators.events_of(world, j)]
        if generator.alive and world.crashes:
            found.append(("crash-generator", j))
    for n, item in enumerate(world.post):
        found.append(("deliver", n))
        if item.reply is not None:
            found.append(("drop", n))
    found += _moves_of_server(world)
    if not any(item.until_ms <= world.now_ms for item in world.post):
        found.append(("tick",))
    return found


def _outcomes(world: World, kind: Kind, who: int, *, cut_off: bool) -> list[Move]:
    if cut_off:
        return [("call", kind, who, Outcome.LOST)]
    found: list[Move] = [("call", kind, who, Outcome.OK)]
    if world.unanswered:
        found += [("call", kind, who, outcome) for outcome in Outcome if outcome is not Outcome.OK]
    return found


def _moves_of_server(world: World) -> list[Move]:
    record, found = world.store.version, list[Move]()
    if record is None:
        # Retention is longer than a call can be under way: nothing sent to the old record arrives later.
        silent = not any(item.reply is None for item in world.post)
        return [("create",)] if world.creations and silent else []
    if record.state in (version.STAGING, version.READY, version.DEGRADED):
        found.append(("release",))
    if world.flushes:
        found.append(("flush",))
    if world.config.stray:
        found += [("stray-lapse", j) for j in range(len(world.generators))]
        found += [("stray-expiry", i) for i in range(len(world.trainers))]
        found += [("stray-return", j) for j in range(len(world.generators))]
        found += [("stray-retention",), ("stray-release",)]
    return found


def step(world: World, move: Move) -> Step:
    """The world after one of its moves."""
    turn = Turn(world)
    match move:
        case ("tick",):
            _tick(turn)
        case ("call", str(kind), int(who), str(outcome)):
            _call(turn, Kind(kind), who, Outcome(outcome))
        case ("trainer", int(i), str(name)):
            trainers.tell(turn, i, trainers.SIMPLE[name])
        case ("generator", int(j), str(name), int(n)):
            _generator(turn, j, name, n)
        case ("deliver" | "drop", int(n)):
            _arrive(turn, n, dropped=move[0] == "drop")
        case ("cut", int(i)):
            turn.change_trainer(i, cut_off=True)
            turn.change(cuts=world.cuts - 1)
        case ("mend", int(i)):
            turn.change_trainer(i, cut_off=False)
        case ("crash-trainer", int(i)):
            turn.change_trainer(i, alive=False, cut_off=False)
            turn.change(crashes=world.crashes - 1)
        case ("crash-generator", int(j)):
            gone = generators.crash(world.generators[j])
            turn.change(
                crashes=world.crashes - 1,
                generators=(*world.generators[:j], gone, *world.generators[j + 1 :]),
            )
        case ("restart", int(i)):
            trainers.restart(turn, i)
            turn.change(restarts=world.restarts - 1)
        case _:
            _server(turn, move)
    return turn.step(move)


def _tick(turn: Turn) -> None:
    """Time passes: timers that are due fire, and every process looks at its clock."""
    turn.change(now_ms=turn.now_ms + 1)
    settle(turn)
    for i in range(len(turn.world.trainers)):
        trainers.notice_time(turn, i)
    for j in range(len(turn.world.generators)):
        generators.notice_time(turn, j)


def _call(turn: Turn, kind: Kind, who: int, outcome: Outcome) -> None:
    hear = generators.hear if kind in _OF_GENERATORS else trainers.hear
    incarnation = 0 if kind in _OF_GENERATORS else turn.trainer(who).incarnation
    call = Call(kind, who, turn.now_ms, incarnation)
    until_ms = turn.now_ms + turn.world.config.call_life_ms
    if outcome is not Outcome.OK and turn.world.unanswered:
        turn.change(unanswered=turn.world.unanswered - 1)
    if outcome is Outcome.OK:
        hear(turn, call, serve(turn, call))
    elif outcome is Outcome.LOST:
        hear(turn, call, None)
    elif outcome is Outcome.UNHEARD:
        serve(turn, call)
        hear(turn, call, None)
    elif outcome is Outcome.LATE:
        hear(turn, call, None)
        turn.send(OnTheWay(call, until_ms))
    else:
        turn.send(OnTheWay(call, until_ms, serve(turn, call)))
        if kind in _OF_GENERATORS:
            turn.change_generator(who, waiting=True)
        else:
            turn.change_trainer(who, waiting=True)


def _arrive(turn: Turn, n: int, *, dropped: bool) -> None:
    item = turn.world.post[n]
    turn.change(post=(*turn.world.post[:n], *turn.world.post[n + 1 :]))
    if item.reply is None:
        serve(turn, item.call)
        return
    hear = generators.hear if item.call.kind in _OF_GENERATORS else trainers.hear
    cut_off = item.call.kind not in _OF_GENERATORS and turn.trainer(item.call.who).cut_off
    hear(turn, item.call, None if dropped or cut_off else item.reply)


def _generator(turn: Turn, j: int, name: str, n: int) -> None:
    if name in ("fail", "fail-in-flight", "abandon-in-flight"):
        turn.change(failed_reads=turn.world.failed_reads - 1)
    match name:
        case "plan":
            generators.plan(turn, j, generators.plans_of(turn.world, j)[n])
        case "read":
            generators.read(turn, j, n)
        case "fail" | "fail-in-flight":
            generators.fail(turn, j, n, in_flight=name == "fail-in-flight")
        case "abandon" | "abandon-in-flight":
            generators.abandon(turn, j, in_flight=name == "abandon-in-flight")
        case _:
            _PLAIN[name](turn, j)


_PLAIN = {
    "pull": generators.pull,
    "land": generators.land,
    "verify": generators.verify,
    "install": generators.install,
    "installed": generators.installed,
    "install-failed": generators.install_failed,
}


def _server(turn: Turn, move: Move) -> None:
    config, store = turn.world.config, turn.store
    match move:
        case ("create",):
            births = store.births + 1
            turn.change(creations=turn.world.creations - 1)
            turn.change_store(version=version.begin(UID, config.spec, turn.now_ms, births), births=births)
        case ("release",) | ("stray-release",):
            decide_version(turn, Release(config.drain_ms, config.retention_ms))
        case ("flush",):
            # What is under way to the control plane goes down with it.
            turn.change(post=tuple(i for i in turn.world.post if i.reply), flushes=turn.world.flushes - 1)
            turn.change_store(version=None, workers=(None,) * len(store.workers))
        case ("stray-lapse", int(j)):
            decide_version(turn, LeaseLapsed(turn.generator(j).lease_id))
        case ("stray-expiry", int(i)):
            if store.workers[i] is not None:
                decide_worker(turn, i, Expire())
            decide_version(turn, WorkerExpired(turn.trainer(i).worker_id))
        case ("stray-return", int(j)):
            other = turn.trainer(0).worker_id
            decide_version(turn, ReturnLease(LeaseId(turn.generator(j).lease_id), other))
        case ("stray-retention",):
            decide_version(turn, RetentionOver())
        case _:
            raise ValueError(f"the world has no move {move!r}")
