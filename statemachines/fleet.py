"""A fleet, as its orchestrator sees it: all its generators go to a new version together, or none does.

    IDLE -> STAGING -> STAGED -> COMMITTING -> COMMITTED
                 \\        |         /
                   -> ABORTING -> ABORTED

In STAGING each generator transfers the version beside what it serves. STAGED: a quorum has it, and the
others are left behind. In COMMITTING generators stop serving, install, and wait without serving. Once a
quorum holds the version it is the fleet's current one (COMMITTED), those who hold it serve it, and all
others are OUT. If a quorum can't be reached, those that installed go back (ABORTING); who can't is OUT,
and says what it holds. So the generators of the fleet that serve, serve one version at any time.

Whoever is OUT comes back by Admit alone, which asks that it holds the current version. An answer that
nobody waits for any more changes nothing. Each phase has a deadline: TimePassed leaves it (P4).
Times are monotonic milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable

from statemachines.fleet_actions import (
    abort,
    admit,
    all_back,
    all_staged,
    begin,
    commit,
    decide_for_it,
    doubt,
    forget,
    go_back,
    install_done,
    install_hopeless,
    install_without,
    last_back,
    last_lost,
    leave_behind,
    lose,
    lose_doubtful,
    lose_untold,
    note_installed,
    note_staged,
    serve,
    stage_done,
    stage_hopeless,
    stage_without,
    too_late,
)
from statemachines.fleet_guards import (
    commit_is_hopeless,
    everyone_has_resumed,
    holds_the_current_version,
    is_current,
    is_known,
    is_last_of_quorum_to_install,
    is_last_of_quorum_to_stage,
    is_last_to_go_back,
    is_late,
    no_install_is_awaited,
    no_staging_is_awaited,
    quorum_can_be_reached,
    quorum_has_staged,
    quorum_holds_it,
    staging_is_hopeless,
    staging_is_kept,
    too_early,
)
from statemachines.fleet_records import (
    Abort,
    Admit,
    Begin,
    Commit,
    Effect,
    Event,
    Expel,
    FleetRecord,
    FleetState,
    Forget,
    GeneratorId,
    Idle,
    Install,
    InstallDone,
    InstallFailed,
    Part,
    Resume,
    Resumed,
    ResumeFailed,
    Stage,
    StageDone,
    StageFailed,
    TimePassed,
    Undo,
    UndoFailed,
    Undone,
)
from statemachines.kernel import Cell, Decision, Row, Table, cells, stay

IDLE, STAGING, STAGED, COMMITTING, COMMITTED, ABORTING, ABORTED = FleetState
_RESTING = (IDLE, COMMITTED, ABORTED)
_ALL = tuple(FleetState)


def _but(*states: FleetState) -> tuple[FleetState, ...]:
    return tuple(state for state in _ALL if state not in states)


TABLE: Table[FleetRecord, int] = Table(
    "fleet",
    FleetState,
    IDLE,
    [
        *(
            Cell(
                state,
                Begin,
                (Row(state, when=is_current), Row(STAGING, begin)),
                (everyone_has_resumed, quorum_can_be_reached),
            )
            for state in _RESTING
        ),
        Cell(
            STAGING,
            StageDone,
            (
                Row(STAGING, when=is_late),
                Row(STAGED, stage_done, is_last_of_quorum_to_stage),
                Row(STAGING, note_staged),
            ),
        ),
        Cell(
            STAGING,
            StageFailed,
            (
                Row(STAGING, when=is_late),
                Row(ABORTING, stage_hopeless, staging_is_hopeless),
                Row(STAGED, stage_without, no_staging_is_awaited),
                Row(STAGING, leave_behind),
            ),
        ),
        Cell(
            STAGING,
            TimePassed,
            (
                Row(STAGING, when=too_early),
                Row(STAGED, all_staged, quorum_has_staged),
                Row(ABORTING, too_late),
            ),
        ),
        Cell(STAGED, Commit, (Row(COMMITTING, commit),), (staging_is_kept,)),
        Cell(STAGED, TimePassed, (Row(STAGED, when=too_early), Row(ABORTING, too_late))),
        Cell(
            COMMITTING,
            InstallDone,
            (
                Row(COMMITTING, when=is_late),
                Row(COMMITTED, install_done, is_last_of_quorum_to_install),
                Row(COMMITTING, note_installed),
            ),
        ),
        Cell(
            COMMITTING,
            InstallFailed,
            (
                Row(COMMITTING, when=is_late),
                Row(ABORTING, install_hopeless, commit_is_hopeless),
                Row(COMMITTED, install_without, no_install_is_awaited),
                Row(COMMITTING, doubt),
            ),
        ),
        Cell(
            COMMITTING,
            TimePassed,
            (
                Row(COMMITTING, when=too_early),
                Row(COMMITTED, decide_for_it, quorum_holds_it),
                Row(ABORTING, too_late),
            ),
        ),
        Cell(COMMITTED, Resumed, (Row(COMMITTED, when=is_late), Row(COMMITTED, serve))),
        Cell(COMMITTED, ResumeFailed, (Row(COMMITTED, when=is_late), Row(COMMITTED, lose))),
        Cell(COMMITTED, TimePassed, (Row(COMMITTED, when=too_early), Row(COMMITTED, lose_untold))),
        *(
            Cell(state, kind, (Row(state, when=is_late), Row(state, act)))
            for state in (STAGING, STAGED, COMMITTING)
            for kind, act in ((Undone, go_back), (UndoFailed, lose_doubtful))
        ),
        *(
            Cell(
                ABORTING,
                kind,
                (Row(ABORTING, when=is_late), Row(ABORTED, last, is_last_to_go_back), Row(ABORTING, act)),
            )
            for kind, last, act in (
                (Undone, last_back, go_back),
                (UndoFailed, last_lost, lose_doubtful),
            )
        ),
        Cell(ABORTING, TimePassed, (Row(ABORTING, when=too_early), Row(ABORTED, all_back))),
        *cells((STAGING, STAGED, COMMITTING), Abort, Row(ABORTING, abort)),
        *(Cell(state, Admit, (Row(state, admit),), (holds_the_current_version,)) for state in _RESTING),
        *(Cell(state, Expel, (Row(state, lose),), (is_known,)) for state in _RESTING),
        *(Cell(state, Forget, (Row(state, forget),), (is_known,)) for state in _RESTING),
        # Repeats, and answers that come when the phase that waited for them is over.
        *stay((*_RESTING, ABORTING), Abort),
        *(cell for kind in (StageDone, StageFailed) for cell in stay(_but(STAGING), kind)),
        *(cell for kind in (InstallDone, InstallFailed) for cell in stay(_but(COMMITTING), kind)),
        *(cell for kind in (Resumed, ResumeFailed) for cell in stay(_but(COMMITTED), kind)),
        *(cell for kind in (Undone, UndoFailed) for cell in stay(_RESTING, kind)),
        *stay((IDLE, ABORTED), TimePassed),
    ],
    state_of=lambda record: record.state,
    name_of=lambda record: f"fleet with version {record.current}",
)


def decide(record: FleetRecord, event: Event, now_ms: int) -> Decision[FleetRecord]:
    """Decide what `event` does to the fleet at `now_ms`; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, now_ms)


def pending(record: FleetRecord) -> tuple[Effect, ...]:
    """The calls that must be running in this state; every one may be made twice."""
    if isinstance(record.phase, Idle):
        return ()
    version_id = record.phase.version_id
    calls: dict[Part, Callable[[GeneratorId], Effect]] = {
        Part.STAGING: lambda name: Stage(name, version_id),
        Part.INSTALLING: lambda name: Install(name, version_id),
        Part.RESUMING: lambda name: Resume(name, version_id),
        Part.UNDOING: lambda name: Undo(name, version_id, record.current),
    }
    return tuple(calls[one.part](name) for name, one in record.generators.items() if one.part in calls)
