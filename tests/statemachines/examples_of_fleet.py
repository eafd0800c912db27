"""Examples of the fleet machine: three generators, of which two are a quorum."""

from __future__ import annotations

from dataclasses import replace

from statemachines import fleet
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
    FleetState,
    Forget,
    Generator,
    GeneratorId,
    Held,
    Idle,
    Install,
    InstallDone,
    InstallFailed,
    Part,
    Phase,
    Resume,
    Resumed,
    ResumeFailed,
    Stage,
    Staged,
    StageDone,
    StageFailed,
    Staging,
    Terms,
    TimePassed,
    Undo,
    UndoFailed,
    Undone,
)
from statemachines.ids import VersionId
from statemachines.kernel import Reason
from tests.statemachines.examples import Example, Machine, refused

IDLE, STAGING, STAGED, COMMITTING, COMMITTED, ABORTING, ABORTED = FleetState
OLD, NEW = VersionId("old"), VersionId("new")
A, B, C = GeneratorId("a"), GeneratorId("b"), GeneratorId("c")
TERMS = Terms(quorum=2, stage_ms=100, decide_ms=100, commit_ms=100, undo_ms=100, grace_ms=10)
PRECONDITION, NOT_FOUND = Reason.PRECONDITION, Reason.NOT_FOUND
NOW, END = 50, 100
HOLDS_OLD, HOLDS_NEW, UNSURE = Held(OLD), Held(NEW), Held(OLD, certain=False)
_HOLDS = {Part.HELD: HOLDS_NEW, Part.RESUMING: HOLDS_NEW, Part.INSTALLING: UNSURE, Part.DOUBTFUL: UNSURE}


def fleet_of(phase: Phase, *parts: Part, current: VersionId = OLD, quorum: int = 2) -> FleetRecord:
    """Generators a, b, c ... in these parts."""
    generators = {
        GeneratorId(name): Generator(part, _HOLDS.get(part, Held(current)))
        for name, part in zip("abc", parts, strict=False)
    }
    if isinstance(phase, (Staging, Staged, Committing)):
        phase = replace(phase, terms=replace(phase.terms, quorum=quorum))
    return FleetRecord(current, generators, phase)


P = Part
_STAGING, _STAGED = Staging(NEW, TERMS, END), Staged(NEW, TERMS, END)
_COMMITTING, _ABORTING = Committing(NEW, TERMS, END), Aborting(NEW, "why", END)
RESTING = {
    IDLE: fleet_of(Idle(), P.SERVING, P.SERVING, P.OUT),
    COMMITTED: fleet_of(Committed(NEW, END), P.SERVING, P.SERVING, P.OUT, current=NEW),
    ABORTED: fleet_of(Aborted(NEW, "why"), P.SERVING, P.SERVING, P.OUT),
}
RESUMING = fleet_of(Committed(NEW, END), P.RESUMING, P.SERVING, P.OUT, current=NEW)
RECORDS = {
    **RESTING,
    STAGING: fleet_of(_STAGING, P.STAGING, P.STAGING, P.STAGING),
    STAGED: fleet_of(_STAGED, P.STAGED, P.STAGED, P.LEFT),
    COMMITTING: fleet_of(_COMMITTING, P.INSTALLING, P.INSTALLING, P.INSTALLING),
    ABORTING: fleet_of(_ABORTING, P.UNDOING, P.UNDOING, P.LEFT),
}
LATER = VersionId("later")
EVENTS: tuple[Event, ...] = (
    Begin(LATER, TERMS),
    StageDone(A, NEW),
    StageFailed(A, NEW, "no memory"),
    Commit(),
    InstallDone(A, NEW),
    InstallFailed(A, NEW, "half of it", UNSURE),
    Resumed(A, NEW),
    ResumeFailed(A, NEW, "dead"),
    Undone(A, NEW, HOLDS_OLD),
    UndoFailed(A, NEW, "dead"),
    TimePassed(),
    Abort("stop"),
    Admit(C, HOLDS_OLD),
    Expel(A, "dead"),
    Forget(A),
)
ANSWERS = EVENTS[1:3] + EVENTS[4:10]


def _begin() -> tuple[Example, ...]:
    examples: list[Example] = []
    for state, record in RESTING.items():
        current = record.current
        assert current is not None
        examples += [
            Example(record, Begin(LATER, TERMS), NOW, STAGING, True, effects=(Stage, Stage)),
            Example(record, Begin(current, TERMS), NOW, state, False, effects=()),
            refused(record, Begin(LATER, replace(TERMS, quorum=3)), NOW, PRECONDITION, "the fleet has 2"),
            refused(record, Begin(LATER, replace(TERMS, quorum=0)), NOW, PRECONDITION, "a quorum of 0"),
            refused(
                replace(RESUMING, phase=record.phase), Begin(LATER, TERMS), NOW, PRECONDITION, "told yet"
            ),
        ]
    return tuple(examples)


def _staging() -> tuple[Example, ...]:
    last = fleet_of(_STAGING, P.STAGING, P.STAGED, P.LEFT)
    two_left = fleet_of(_STAGING, P.STAGING, P.STAGING, P.STAGED)
    return (
        Example(RECORDS[STAGING], StageDone(A, NEW), NOW, STAGING, True, effects=()),
        Example(last, StageDone(A, NEW), NOW, STAGED, True, effects=()),
        Example(last, StageDone(B, NEW), NOW, STAGING, False),
        Example(last, StageDone(A, OLD), NOW, STAGING, False),
        Example(last, StageDone(GeneratorId("z"), NEW), NOW, STAGING, False),
        Example(
            fleet_of(_STAGING, P.STAGING, P.STAGED, P.LEFT, quorum=3), StageDone(A, NEW), NOW, STAGING, True
        ),
        Example(two_left, StageDone(A, NEW), NOW, STAGING, True, effects=()),
        Example(RECORDS[STAGING], StageFailed(A, NEW, "x"), NOW, STAGING, True, effects=(Undo,)),
        Example(two_left, StageFailed(A, NEW, "x"), NOW, STAGING, True, effects=(Undo,)),
        Example(two_left, StageFailed(C, NEW, "x"), NOW, STAGING, False),
        Example(
            two_left, StageFailed(A, NEW, "x", gone=True), NOW, ABORTING, True, effects=(Undo, Undo, Undo)
        ),
        Example(last, StageFailed(A, NEW, "x"), NOW, ABORTING, True, effects=(Undo, Undo)),
        Example(
            fleet_of(_STAGING, P.STAGING, P.STAGED, P.STAGED),
            StageFailed(A, NEW, "x"),
            NOW,
            STAGED,
            True,
            effects=(Undo,),
        ),
        Example(RECORDS[STAGING], TimePassed(), END - 1, STAGING, False),
        Example(RECORDS[STAGING], TimePassed(), END, ABORTING, True, effects=(Undo,) * 3),
        Example(
            fleet_of(_STAGING, P.STAGED, P.STAGED, P.STAGING),
            TimePassed(),
            END,
            STAGED,
            True,
            effects=(Undo,),
        ),
        Example(fleet_of(_STAGING, P.STAGED, P.STAGED, P.STAGING), TimePassed(), END - 1, STAGING, False),
        Example(RECORDS[STAGING], Abort("stop"), NOW, ABORTING, True, effects=(Undo,) * 3),
    )


def _staged() -> tuple[Example, ...]:
    record = RECORDS[STAGED]
    return (
        Example(record, Commit(), END - 1, COMMITTING, True, effects=(Install, Install)),
        refused(record, Commit(), END, PRECONDITION, "had to be committed 0 ms ago"),
        Example(record, TimePassed(), END - 1, STAGED, False),
        Example(record, TimePassed(), END, ABORTING, True, effects=(Undo, Undo)),
        Example(record, Abort("stop"), NOW, ABORTING, True, effects=(Undo, Undo)),
    )


def _committing() -> tuple[Example, ...]:
    record = RECORDS[COMMITTING]
    last = fleet_of(_COMMITTING, P.INSTALLING, P.HELD, P.LEFT)
    quorum = fleet_of(_COMMITTING, P.HELD, P.HELD, P.INSTALLING)
    failed = InstallFailed(A, NEW, "x", UNSURE)
    return (
        Example(record, InstallDone(A, NEW), NOW, COMMITTING, True, effects=()),
        Example(last, InstallDone(B, NEW), NOW, COMMITTING, False),
        Example(last, InstallDone(C, NEW), NOW, COMMITTING, False),
        Example(last, InstallDone(A, NEW), NOW, COMMITTED, True, effects=(Resume, Resume)),
        Example(
            fleet_of(_COMMITTING, P.INSTALLING, P.HELD, quorum=3), InstallDone(A, NEW), NOW, COMMITTING, True
        ),
        Example(record, failed, NOW, COMMITTING, True, effects=()),
        Example(quorum, failed, NOW, COMMITTING, False),
        Example(last, failed, NOW, ABORTING, True, effects=(Undo, Undo)),
        Example(quorum, InstallFailed(C, NEW, "x"), NOW, COMMITTED, True, effects=(Resume, Resume)),
        Example(record, TimePassed(), END - 1, COMMITTING, False),
        Example(record, TimePassed(), END, ABORTING, True, effects=(Undo,) * 3),
        Example(quorum, TimePassed(), END - 1, COMMITTING, False),
        Example(quorum, TimePassed(), END, COMMITTED, True, effects=(Resume, Resume)),
        Example(quorum, Abort("stop"), NOW, ABORTING, True, effects=(Undo,) * 3),
    )


def _verdicts() -> tuple[Example, ...]:
    served = RESTING[COMMITTED]
    back = RECORDS[ABORTING]
    last = fleet_of(_ABORTING, P.UNDOING, P.LEFT, P.OUT)
    return (
        Example(RESUMING, Resumed(A, NEW), NOW, COMMITTED, True, effects=()),
        Example(served, Resumed(A, NEW), NOW, COMMITTED, False),
        Example(served, Resumed(C, NEW), NOW, COMMITTED, False),
        Example(RESUMING, ResumeFailed(A, NEW, "x"), NOW, COMMITTED, True, effects=()),
        Example(served, ResumeFailed(A, NEW, "x"), NOW, COMMITTED, False),
        Example(RESUMING, TimePassed(), END - 1, COMMITTED, False),
        Example(RESUMING, TimePassed(), END, COMMITTED, True, effects=()),
        Example(served, TimePassed(), END, COMMITTED, False),
        *(
            example
            for event in (
                Undone(A, NEW, HOLDS_OLD),
                Undone(A, NEW, HOLDS_NEW),
                UndoFailed(A, NEW, "x", HOLDS_NEW),
            )
            for example in (
                Example(back, event, NOW, ABORTING, True, effects=()),
                Example(last, event, NOW, ABORTED, True, effects=()),
                Example(last, replace(event, name=B), NOW, ABORTING, False),
            )
        ),
        *(
            example
            for phase in (_STAGING, _STAGED, _COMMITTING)
            for event in (Undone(A, NEW, HOLDS_OLD), Undone(A, NEW, UNSURE), UndoFailed(A, NEW, "x"))
            for record in (fleet_of(phase, P.UNDOING, P.STAGED, P.STAGED),)
            for example in (
                Example(record, event, NOW, record.state, True, effects=()),
                Example(record, replace(event, name=B), NOW, record.state, False),
            )
        ),
        Example(back, TimePassed(), END - 1, ABORTING, False),
        Example(back, TimePassed(), END, ABORTED, True, effects=()),
    )


def _membership() -> tuple[Example, ...]:
    examples: list[Example] = []
    for state, record in RESTING.items():
        holds = Held(record.current)
        examples += [
            Example(record, Admit(C, holds), NOW, state, True, effects=()),
            Example(record, Admit(A, holds), NOW, state, False, effects=()),
            Example(record, Admit(GeneratorId("d"), holds), NOW, state, True, effects=()),
            refused(record, Admit(C, Held(LATER)), NOW, PRECONDITION, "generator c holds later"),
            refused(record, Admit(C, replace(holds, certain=False)), NOW, PRECONDITION, "several versions"),
            Example(record, Expel(A, "dead"), NOW, state, True, effects=()),
            refused(record, Expel(GeneratorId("z"), "dead"), NOW, NOT_FOUND, "z is not known"),
            Example(record, Forget(C), NOW, state, True, effects=()),
            refused(record, Forget(GeneratorId("z")), NOW, NOT_FOUND, "z is not known"),
        ]
    return tuple(examples)


FLEET = Machine(
    fleet.TABLE,
    fleet,
    RECORDS,
    {type(event): event for event in EVENTS},
    NOW,
    (*_begin(), *_staging(), *_staged(), *_committing(), *_verdicts(), *_membership()),
)
