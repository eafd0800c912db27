"""A version in the store of a host: made once by whoever comes first, used by all ranks.

    ABSENT -> BUILDING -> SEALED -> ABSENT

The disk is the record. Each effect is one that a crash leaves either undone or done, or undone in a way
that the next one undoes; `Found` tells a record that knows nothing what lies there, so there is no state
that only a restart or a person heals. A version is visible exactly from `Promote` to `Withdraw`; before
it, files that are durable are kept for whoever goes on.
"""

from __future__ import annotations

from dataclasses import replace

from statemachines.kernel import Cell, Decision, Reason, Refused, Row, Table, stay
from statemachines.local_store_records import (
    Absent,
    Activate,
    Begin,
    Building,
    Damaged,
    DiscardBuilding,
    DropFile,
    Event,
    Evict,
    FileDamaged,
    FileDurable,
    Found,
    MakeFolder,
    Outcome,
    PointActive,
    Promote,
    Seal,
    Sealed,
    StoredRecord,
    StoredState,
    Withdraw,
)

# Guards and checks.


def found_sealed(record: StoredRecord, event: Found, moment: None) -> bool:
    """Guard: the version lies there."""
    return event.sealed is not None


def found_building(record: StoredRecord, event: Found, moment: None) -> bool:
    """Guard: there is an unfinished folder that says what it holds."""
    return event.building is not None


def is_the_same(record: StoredRecord, event: Begin, moment: None) -> bool:
    """Guard: what is being made is what is wanted."""
    phase = _building(record)
    return (phase.source, phase.files) == (event.source, event.files)


def is_of_this_source(record: StoredRecord, event: Begin, moment: None) -> None:
    """Check: a version is immutable, so it can't be wanted from two sources."""
    if isinstance(record.phase, Sealed) and record.phase.source != event.source:
        raise Refused(
            Reason.EXISTS,
            f"{_name(record)} was made from {record.phase.source}, it can't be made from {event.source}",
        )


def is_one_of_its_files(record: StoredRecord, event: FileDurable, moment: None) -> None:
    """Check: only the files that were announced are made."""
    if event.name not in _building(record).files:
        raise Refused(Reason.INVALID, f"{_name(record)} has no file {event.name!r}")


def all_files_are_durable(record: StoredRecord, event: Seal, moment: None) -> None:
    """Check: no file is missing."""
    phase = _building(record)
    if missing := sorted(phase.files - phase.durable):
        raise Refused(Reason.PRECONDITION, f"{_name(record)} lacks {', '.join(missing)}")


def nobody_needs_it(record: StoredRecord, event: Evict, moment: None) -> None:
    """Check: what is served, read or replayed stays."""
    if event.active or event.read:
        why = "active" if event.active else "being read"
        raise Refused(Reason.PRECONDITION, f"{_name(record)} is {why}")


# Actions.


def _found_sealed(record: StoredRecord, event: Found, moment: None) -> Outcome:
    assert event.sealed is not None
    leftovers = (DiscardBuilding(),) if event.building is not None or event.junk else ()
    return replace(record, phase=event.sealed), leftovers


def _found_building(record: StoredRecord, event: Found, moment: None) -> Outcome:
    assert event.building is not None
    return replace(record, phase=event.building), ()


def _found_nothing(record: StoredRecord, event: Found, moment: None) -> Outcome:
    return record, (DiscardBuilding(),) if event.junk else ()


def _begin(record: StoredRecord, event: Begin, moment: None) -> Outcome:
    building = Building(event.source, event.files)
    return replace(record, phase=building), (MakeFolder(event.source, event.files),)


def _begin_anew(record: StoredRecord, event: Begin, moment: None) -> Outcome:
    begun, effects = _begin(record, event, moment)
    return begun, (DiscardBuilding(), *effects)


def _add(record: StoredRecord, event: FileDurable, moment: None) -> Outcome:
    phase = _building(record)
    return replace(record, phase=replace(phase, durable=phase.durable | {event.name})), ()


def _drop(record: StoredRecord, event: FileDamaged, moment: None) -> Outcome:
    phase = _building(record)
    kept = replace(phase, durable=phase.durable - {event.name})
    return replace(record, phase=kept), (DropFile(event.name),)


def _seal(record: StoredRecord, event: Seal, moment: None) -> Outcome:
    return replace(record, phase=Sealed(_building(record).source)), (Promote(),)


def _activate(record: StoredRecord, event: Activate, moment: None) -> Outcome:
    return record, (PointActive(),)


def _withdraw(record: StoredRecord, event: Damaged | Evict, moment: None) -> Outcome:
    return replace(record, phase=Absent()), (Withdraw(),)


def _discard(record: StoredRecord, event: Evict, moment: None) -> Outcome:
    return replace(record, phase=Absent()), (DiscardBuilding(),)


def _building(record: StoredRecord) -> Building:
    assert isinstance(record.phase, Building)
    return record.phase


def _name(record: StoredRecord) -> str:
    return f"version {record.version_id}"


ABSENT, BUILDING, SEALED = StoredState

TABLE: Table[StoredRecord, None] = Table(
    "local_store",
    StoredState,
    ABSENT,
    [
        Cell(
            ABSENT,
            Found,
            (
                Row(SEALED, _found_sealed, when=found_sealed),
                Row(BUILDING, _found_building, when=found_building),
                Row(ABSENT, _found_nothing),
            ),
        ),
        Cell(ABSENT, Begin, (Row(BUILDING, _begin),)),
        Cell(BUILDING, Begin, (Row(BUILDING, when=is_the_same), Row(BUILDING, _begin_anew))),
        Cell(SEALED, Begin, (Row(SEALED),), checks=(is_of_this_source,)),
        Cell(BUILDING, FileDurable, (Row(BUILDING, _add),), checks=(is_one_of_its_files,)),
        Cell(BUILDING, FileDamaged, (Row(BUILDING, _drop),)),
        Cell(BUILDING, Seal, (Row(SEALED, _seal),), checks=(all_files_are_durable,)),
        *stay((SEALED,), Seal),
        Cell(SEALED, Activate, (Row(SEALED, _activate),)),
        Cell(SEALED, Damaged, (Row(ABSENT, _withdraw),)),
        *stay((ABSENT,), Damaged),
        Cell(SEALED, Evict, (Row(ABSENT, _withdraw),), checks=(nobody_needs_it,)),
        Cell(BUILDING, Evict, (Row(ABSENT, _discard),), checks=(nobody_needs_it,)),
        *stay((ABSENT,), Evict),
    ],
    state_of=lambda record: record.state,
    name_of=_name,
)


def decide(record: StoredRecord, event: Event) -> Decision[StoredRecord]:
    """Decide what `event` does to the version; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, None)
