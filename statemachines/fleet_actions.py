"""What the fleet machine does to its record, and which calls to generators it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from statemachines.fleet_records import (
    Abort,
    Aborted,
    Aborting,
    Admit,
    Begin,
    Commit,
    Committed,
    Committing,
    Event,
    Expel,
    FleetRecord,
    Forget,
    Generator,
    GeneratorId,
    Held,
    Install,
    InstallDone,
    InstallFailed,
    Outcome,
    Part,
    Resume,
    Resumed,
    ResumeFailed,
    Stage,
    Staged,
    StageDone,
    StageFailed,
    Staging,
    TimePassed,
    Undo,
    UndoFailed,
    Undone,
)

_Generators: TypeAlias = Mapping[GeneratorId, Generator]
_UNTOUCHED = (Part.STAGING, Part.STAGED)
_TOUCHED = (Part.INSTALLING, Part.DOUBTFUL, Part.HELD)
_LATE = "was not done in time"
_UNTOLD = "did not answer in time, when it was told to {}"

# Actions: first those that change one generator, then those that end a phase.


def begin(record: FleetRecord, event: Begin, now_ms: int) -> Outcome:
    generators = _each(record, {Part.SERVING: lambda one: replace(one, part=Part.STAGING, why="")})
    phase = Staging(event.version_id, event.terms, now_ms + event.terms.stage_ms)
    after = replace(record, generators=generators, phase=phase)
    return after, tuple(Stage(name, event.version_id) for name in after.of(Part.STAGING))


def note_staged(record: FleetRecord, event: StageDone, now_ms: int) -> Outcome:
    after = _put(record, event.name, Part.STAGED)
    return _hurry(after, Part.STAGED, now_ms), ()


def note_installed(record: FleetRecord, event: InstallDone, now_ms: int) -> Outcome:
    assert isinstance(record.phase, Committing)
    after = _put(record, event.name, Part.HELD, Held(record.phase.version_id))
    return _hurry(after, Part.HELD, now_ms), ()


def leave_behind(record: FleetRecord, event: StageFailed, now_ms: int) -> Outcome:
    assert isinstance(record.phase, Staging)
    after = _put(record, event.name, Part.UNDOING, why=event.why)
    return after, (Undo(event.name, record.phase.version_id, record.current),)


def doubt(record: FleetRecord, event: InstallFailed, now_ms: int) -> Outcome:
    return _put(record, event.name, Part.DOUBTFUL, event.holds, event.why), ()


def serve(record: FleetRecord, event: Resumed, now_ms: int) -> Outcome:
    return _put(record, event.name, Part.SERVING), ()


def lose(record: FleetRecord, event: ResumeFailed | Expel, now_ms: int) -> Outcome:
    return _put(record, event.name, Part.OUT, why=event.why), ()


def lose_untold(record: FleetRecord, event: TimePassed, now_ms: int) -> Outcome:
    lose = _out(_UNTOLD.format("serve"))
    return replace(record, generators=_each(record, {Part.RESUMING: lose})), ()


def go_back(record: FleetRecord, event: Undone, now_ms: int) -> Outcome:
    if event.holds == Held(record.current):
        return _put(record, event.name, Part.LEFT, event.holds), ()
    return _put(record, event.name, Part.OUT, event.holds), ()


def lose_doubtful(record: FleetRecord, event: UndoFailed, now_ms: int) -> Outcome:
    before = record.generators[event.name].why
    why = f"{before}; then: {event.why}" if before else event.why
    return _put(record, event.name, Part.OUT, event.holds, why), ()


def admit(record: FleetRecord, event: Admit, now_ms: int) -> Outcome:
    return _with(record, event.name, Generator(Part.SERVING, event.holds)), ()


def forget(record: FleetRecord, event: Forget, now_ms: int) -> Outcome:
    left = {name: one for name, one in record.generators.items() if name != event.name}
    return replace(record, generators=MappingProxyType(left)), ()


def stage_done(record: FleetRecord, event: StageDone, now_ms: int) -> Outcome:
    return all_staged(note_staged(record, event, now_ms)[0], event, now_ms)


def stage_without(record: FleetRecord, event: StageFailed, now_ms: int) -> Outcome:
    left, undo = leave_behind(record, event, now_ms)
    after, more = all_staged(left, event, now_ms)
    return after, undo + more


def all_staged(record: FleetRecord, event: Event, now_ms: int) -> Outcome:
    """Whoever is not done by now is left behind."""
    phase = record.phase
    assert isinstance(phase, Staging)
    late = record.of(Part.STAGING)
    generators = _each(record, {Part.STAGING: lambda one: replace(one, part=Part.UNDOING, why=_LATE)})
    staged = Staged(phase.version_id, phase.terms, now_ms + phase.terms.decide_ms)
    undo = tuple(Undo(name, phase.version_id, record.current) for name in late)
    return replace(record, generators=generators, phase=staged), undo


def commit(record: FleetRecord, event: Commit, now_ms: int) -> Outcome:
    phase = record.phase
    assert isinstance(phase, Staged)
    unsure = Held(record.current, certain=False)
    generators = _each(
        record, {Part.STAGED: lambda one: replace(one, part=Part.INSTALLING, holds=unsure, why="")}
    )
    committing = Committing(phase.version_id, phase.terms, now_ms + phase.terms.commit_ms)
    after = replace(record, generators=generators, phase=committing)
    return after, tuple(Install(name, phase.version_id) for name in after.of(Part.INSTALLING))


def install_done(record: FleetRecord, event: InstallDone, now_ms: int) -> Outcome:
    return decide_for_it(note_installed(record, event, now_ms)[0], event, now_ms)


def install_without(record: FleetRecord, event: InstallFailed, now_ms: int) -> Outcome:
    return decide_for_it(doubt(record, event, now_ms)[0], event, now_ms)


def decide_for_it(record: FleetRecord, event: Event, now_ms: int) -> Outcome:
    """The one moment at which the fleet's version changes."""
    phase = record.phase
    assert isinstance(phase, Committing)
    generators = _each(
        record,
        {
            Part.HELD: lambda one: replace(one, part=Part.RESUMING, why=""),
            Part.INSTALLING: _out(f"version {phase.version_id}: {_LATE}"),
            Part.UNDOING: _out(f"version {phase.version_id}"),
            Part.LEFT: _out(f"version {phase.version_id}"),
            Part.DOUBTFUL: _out(f"version {phase.version_id}"),
        },
    )
    committed = Committed(phase.version_id, now_ms + phase.terms.undo_ms)
    after = replace(record, current=phase.version_id, generators=generators, phase=committed)
    return after, tuple(Resume(name, phase.version_id) for name in after.of(Part.RESUMING))


def stage_hopeless(record: FleetRecord, event: StageFailed, now_ms: int) -> Outcome:
    left, undo = leave_behind(record, event, now_ms)
    after, more = _decide_against(left, f"generator {event.name}: {event.why}", now_ms)
    return after, undo + more


def install_hopeless(record: FleetRecord, event: InstallFailed, now_ms: int) -> Outcome:
    doubted, _ = doubt(record, event, now_ms)
    return _decide_against(doubted, f"generator {event.name}: {event.why}", now_ms)


def too_late(record: FleetRecord, event: TimePassed, now_ms: int) -> Outcome:
    waiting = record.of(Part.STAGING, Part.INSTALLING)
    missing = f"{', '.join(waiting)} {_LATE}" if waiting else "the orchestrator did not commit in time"
    return _decide_against(record, missing, now_ms)


def abort(record: FleetRecord, event: Abort, now_ms: int) -> Outcome:
    return _decide_against(record, event.why, now_ms)


def _decide_against(record: FleetRecord, why: str, now_ms: int) -> Outcome:
    phase = record.phase
    assert isinstance(phase, (Staging, Staged, Committing))
    unsettled = (*_UNTOUCHED, *_TOUCHED)

    def undo(one: Generator) -> Generator:
        sure = one.holds if one.part in _UNTOUCHED else replace(one.holds, certain=False)
        return replace(one, part=Part.UNDOING, holds=sure) if one.part in unsettled else one

    generators = MappingProxyType({name: undo(one) for name, one in record.generators.items()})
    aborting = Aborting(phase.version_id, why, now_ms + phase.terms.undo_ms)
    calls = tuple(Undo(name, phase.version_id, record.current) for name in record.of(*unsettled))
    return replace(record, generators=generators, phase=aborting), calls


def last_back(record: FleetRecord, event: Undone, now_ms: int) -> Outcome:
    return all_back(go_back(record, event, now_ms)[0], event, now_ms)


def last_lost(record: FleetRecord, event: UndoFailed, now_ms: int) -> Outcome:
    return all_back(lose_doubtful(record, event, now_ms)[0], event, now_ms)


def all_back(record: FleetRecord, event: Event, now_ms: int) -> Outcome:
    phase = record.phase
    assert isinstance(phase, Aborting)
    generators = _each(
        record,
        {
            Part.UNDOING: _out(_UNTOLD.format("go back")),
            Part.LEFT: lambda one: replace(one, part=Part.SERVING),
        },
    )
    return replace(record, generators=generators, phase=Aborted(phase.version_id, phase.why)), ()


# Parts of records.


def _each(record: FleetRecord, change: Mapping[Part, Callable[[Generator], Generator]]) -> _Generators:
    same: Callable[[Generator], Generator] = lambda one: one  # noqa: E731
    return MappingProxyType(
        {name: change.get(one.part, same)(one) for name, one in record.generators.items()}
    )


def _out(why: str) -> Callable[[Generator], Generator]:
    def lose(one: Generator) -> Generator:
        return replace(one, part=Part.OUT, why=f"{why}: {one.why}" if one.why else why)

    return lose


def _put(
    record: FleetRecord, name: GeneratorId, part: Part, holds: Held | None = None, why: str | None = None
) -> FleetRecord:
    one = record.generators[name]
    after = Generator(part, one.holds if holds is None else holds, one.why if why is None else why)
    return _with(record, name, after)


def _with(record: FleetRecord, name: GeneratorId, one: Generator) -> FleetRecord:
    return replace(record, generators=MappingProxyType({**record.generators, name: one}))


def _hurry(record: FleetRecord, done: Part, now_ms: int) -> FleetRecord:
    """Where a quorum is done, the others have the time of grace, and no more."""
    phase = record.phase
    assert isinstance(phase, (Staging, Committing))
    if len(record.of(done)) != phase.terms.quorum:
        return record
    deadline_ms = min(phase.deadline_ms, now_ms + phase.terms.grace_ms)
    return replace(record, phase=replace(phase, deadline_ms=deadline_ms))
