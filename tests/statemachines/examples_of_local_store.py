"""Examples of the local store machine."""

from __future__ import annotations

from statemachines import local_store
from statemachines.ids import VersionId
from statemachines.kernel import Reason
from statemachines.local_store_records import (
    Absent,
    Activate,
    Begin,
    Building,
    Damaged,
    DiscardBuilding,
    DropFile,
    Evict,
    FileDamaged,
    FileDurable,
    Found,
    MakeFolder,
    Phase,
    PointActive,
    Promote,
    Seal,
    Sealed,
    StoredRecord,
    StoredState,
    Withdraw,
)
from tests.statemachines.examples import Example, Machine, refused

ABSENT, BUILDING, SEALED = StoredState
FILES = frozenset({"a", "b"})


def at(phase: Phase) -> StoredRecord:
    return StoredRecord(VersionId("v"), phase)


NOTHING, BEGUN, HALF, WHOLE, DONE = (
    at(Absent()),
    at(Building("s", FILES)),
    at(Building("s", FILES, frozenset({"a"}))),
    at(Building("s", FILES, FILES)),
    at(Sealed("s")),
)


def example(record: StoredRecord, event: object, to: StoredState, changes: bool, *effects: type) -> Example:
    return Example(record, event, None, to, changes, effects=effects)


UNFINISHED = Building("s", FILES, frozenset({"a"}))

LOCAL_STORE = Machine(
    local_store.TABLE,
    local_store,
    {ABSENT: NOTHING, BUILDING: HALF, SEALED: DONE},
    {
        type(event): event
        for event in (
            Found(None, None),
            Begin("s", FILES),
            FileDurable("b"),
            FileDamaged("a"),
            Seal(),
            Activate(),
            Damaged(),
            Evict(False, False),
        )
    },
    None,
    (
        example(NOTHING, Found(None, None), ABSENT, False),
        example(NOTHING, Found(None, None, junk=True), ABSENT, False, DiscardBuilding),
        example(NOTHING, Found(None, UNFINISHED), BUILDING, True),
        example(NOTHING, Found(Sealed("s"), None), SEALED, True),
        example(NOTHING, Found(Sealed("s"), UNFINISHED), SEALED, True, DiscardBuilding),
        example(NOTHING, Found(Sealed("s"), None, junk=True), SEALED, True, DiscardBuilding),
        example(NOTHING, Begin("s", FILES), BUILDING, True, MakeFolder),
        example(HALF, Begin("s", FILES), BUILDING, False),
        example(HALF, Begin("other", FILES), BUILDING, True, DiscardBuilding, MakeFolder),
        example(HALF, Begin("s", frozenset({"a"})), BUILDING, True, DiscardBuilding, MakeFolder),
        example(DONE, Begin("s", FILES), SEALED, False),
        refused(DONE, Begin("other", FILES), None, Reason.EXISTS, "version v was made from s, it can't"),
        example(HALF, FileDurable("b"), BUILDING, True),
        example(HALF, FileDurable("a"), BUILDING, False),
        refused(HALF, FileDurable("c"), None, Reason.INVALID, "version v has no file 'c'"),
        example(HALF, FileDamaged("a"), BUILDING, True, DropFile),
        example(BEGUN, FileDamaged("a"), BUILDING, False, DropFile),
        refused(HALF, Seal(), None, Reason.PRECONDITION, "version v lacks b"),
        refused(BEGUN, Seal(), None, Reason.PRECONDITION, "version v lacks a, b"),
        example(WHOLE, Seal(), SEALED, True, Promote),
        example(DONE, Seal(), SEALED, False),
        example(DONE, Activate(), SEALED, False, PointActive),
        refused(WHOLE, Activate(), None, Reason.PRECONDITION, "version v is BUILDING: Activate is not"),
        example(DONE, Damaged(), ABSENT, True, Withdraw),
        example(NOTHING, Damaged(), ABSENT, False),
        example(DONE, Evict(False, False), ABSENT, True, Withdraw),
        example(HALF, Evict(False, False), ABSENT, True, DiscardBuilding),
        example(NOTHING, Evict(False, False), ABSENT, False),
        refused(DONE, Evict(True, False), None, Reason.PRECONDITION, "version v is active"),
        refused(DONE, Evict(False, True), None, Reason.PRECONDITION, "version v is being read"),
        refused(HALF, Evict(False, True), None, Reason.PRECONDITION, "version v is being read"),
    ),
)
