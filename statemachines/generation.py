"""A generation: memory of a trainer into which versions are copied, one after the other.

    FREE -> CAPTURING -> SERVING -> DRAINING -> FREE ...      or STOPPING after CAPTURING; RETIRED for good

What the states protect is memory that others read one-sidedly. It is written only while a copy runs, a
copy begins only in CAPTURING, nothing is readable before SERVING, and SERVING is entered only once the
copy has ended and is whole. STOPPING is a capture that was given up while its copy still runs: the memory
is handed to nobody before that has ended. A trainer has several generations, so that version n + 1 is
captured into one while n is read from another.

Each time that a generation is handed out is a *use* with a number of its own. What is said about an
earlier use comes too late and changes nothing: it can't free what another version has now.
"""

from __future__ import annotations

from dataclasses import replace

from statemachines.generation_records import (
    Acquire,
    BeginCopy,
    Capturing,
    Close,
    Deregister,
    Draining,
    EndCopy,
    Event,
    Free,
    GenerationRecord,
    GenerationState,
    LetGo,
    OfAUse,
    Outcome,
    Retire,
    Retired,
    Serve,
    Serving,
    Stopping,
    TellFree,
    WantBack,
)
from statemachines.ids import VersionId
from statemachines.kernel import Cell, Decision, Reason, Refused, Row, Table, cells, stay

# Guards and checks.


def is_of_an_earlier_use(record: GenerationRecord, event: OfAUse, moment: None) -> bool:
    """Guard: it is about a version that had the memory before."""
    return event.use != record.use


def is_being_copied(record: GenerationRecord, event: Event, moment: None) -> bool:
    """Guard: something writes the memory now."""
    return isinstance(record.phase, Capturing) and record.phase.copying


def is_this_use(record: GenerationRecord, event: BeginCopy | Serve, moment: None) -> None:
    """Check: only the version that has the memory now may write it, or be read from it."""
    if event.use != record.use:
        raise Refused(
            Reason.PRECONDITION,
            f"{_name(record)} is in its use {record.use}, use {event.use} of it is over",
        )


def nothing_writes(record: GenerationRecord, event: Event, moment: None) -> None:
    """Check: no copy runs."""
    if is_being_copied(record, event, moment):
        raise Refused(Reason.PRECONDITION, f"{_name(record)} is being written")


def copy_is_whole(record: GenerationRecord, event: Serve, moment: None) -> None:
    """Check: all of the version has been written."""
    if not (isinstance(record.phase, Capturing) and record.phase.whole):
        raise Refused(Reason.PRECONDITION, f"{_name(record)} does not hold all of the version yet")


# Actions.


def _acquire(record: GenerationRecord, event: Acquire, moment: None) -> Outcome:
    return replace(record, use=record.use + 1, phase=Capturing(event.version_id)), ()


def _begin_copy(record: GenerationRecord, event: BeginCopy, moment: None) -> Outcome:
    return replace(record, phase=Capturing(_version_of(record), copying=True)), ()


def _end_copy(record: GenerationRecord, event: EndCopy, moment: None) -> Outcome:
    return replace(record, phase=Capturing(_version_of(record), whole=event.whole)), ()


def _serve(record: GenerationRecord, event: Serve, moment: None) -> Outcome:
    return replace(record, phase=Serving(_version_of(record))), ()


def _drain(record: GenerationRecord, event: WantBack, moment: None) -> Outcome:
    return replace(record, phase=Draining(_version_of(record))), ()


def _stop(record: GenerationRecord, event: Event, moment: None) -> Outcome:
    return replace(record, phase=Stopping()), ()


def _free(record: GenerationRecord, event: Event, moment: None) -> Outcome:
    return replace(record, phase=Free()), (TellFree(),)


def _retire(record: GenerationRecord, event: Event, moment: None) -> Outcome:
    return replace(record, phase=Retired()), (Deregister(),)


def _version_of(record: GenerationRecord) -> VersionId:
    version_id = record.version_id
    assert version_id is not None
    return version_id


def _name(record: GenerationRecord) -> str:
    held = record.version_id
    return f"generation {record.number}" + ("" if held is None else f" (version {held})")


FREE, CAPTURING, STOPPING, SERVING, DRAINING, RETIRED = GenerationState
_LATE = Row(CAPTURING, when=is_of_an_earlier_use)
_FREED = Row(FREE, _free)
_GONE = Row(RETIRED, _retire)

TABLE: Table[GenerationRecord, None] = Table(
    "generation",
    GenerationState,
    FREE,
    [
        Cell(FREE, Acquire, (Row(CAPTURING, _acquire),)),
        Cell(CAPTURING, BeginCopy, (Row(CAPTURING, _begin_copy),), checks=(is_this_use, nothing_writes)),
        Cell(CAPTURING, EndCopy, (_LATE, Row(CAPTURING, _end_copy))),
        Cell(CAPTURING, Serve, (Row(SERVING, _serve),), checks=(is_this_use, copy_is_whole)),
        Cell(CAPTURING, LetGo, (_LATE, Row(STOPPING, _stop, when=is_being_copied), _FREED)),
        Cell(STOPPING, EndCopy, (Row(STOPPING, when=is_of_an_earlier_use), _FREED)),
        Cell(SERVING, WantBack, (Row(SERVING, when=is_of_an_earlier_use), Row(DRAINING, _drain))),
        Cell(SERVING, LetGo, (Row(SERVING, when=is_of_an_earlier_use), _FREED)),
        Cell(DRAINING, LetGo, (Row(DRAINING, when=is_of_an_earlier_use), _FREED)),
        Cell(FREE, Retire, (_GONE,)),
        *cells((FREE, SERVING, DRAINING), Close, _GONE),
        Cell(CAPTURING, Close, (Row(STOPPING, _stop, when=is_being_copied), _GONE)),
        *stay((STOPPING, RETIRED), Close),
        *stay((RETIRED,), Retire),
        *(one for late in (EndCopy, WantBack, LetGo) for one in stay((FREE, RETIRED), late)),
        *stay((SERVING, DRAINING), EndCopy),
        *(one for late in (WantBack, LetGo) for one in stay((STOPPING,), late)),
        *stay((CAPTURING, DRAINING), WantBack),
    ],
    state_of=lambda record: record.state,
    name_of=_name,
)


def decide(record: GenerationRecord, event: Event) -> Decision[GenerationRecord]:
    """Decide what `event` does to the generation; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, None)
