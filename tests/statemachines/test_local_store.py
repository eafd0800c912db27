"""Random walks of the local store machine over a disk in memory, with crashes between any two effects."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from statemachines.ids import VersionId
from statemachines.kernel import Refused
from statemachines.local_store import decide
from statemachines.local_store_records import (
    Activate,
    Begin,
    Building,
    Damaged,
    DiscardBuilding,
    DropFile,
    Effect,
    Event,
    Evict,
    FileDamaged,
    FileDurable,
    Found,
    MakeFolder,
    PointActive,
    Promote,
    Seal,
    Sealed,
    StoredRecord,
    StoredState,
    Withdraw,
)

FILES = ("a", "b")
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Begin, st.sampled_from("st"), st.just(frozenset(FILES))),
    st.builds(FileDurable, st.sampled_from(FILES)),
    st.builds(FileDamaged, st.sampled_from(FILES)),
    st.just(Seal()),
    st.just(Activate()),
    st.just(Damaged()),
    st.builds(Evict, st.booleans(), st.booleans()),
)


@dataclass
class Disk:
    """What is there, as the effects leave it."""

    sealed: Sealed | None = None
    building: Building | None = None
    active: bool = False

    def perform(self, effect: Effect) -> None:
        match effect:
            case MakeFolder(source, files):
                assert self.building is None
                self.building = Building(source, files)
            case DropFile(name):
                assert self.building is not None
                self.building = Building(
                    self.building.source, self.building.files, self.building.durable - {name}
                )
            case DiscardBuilding():
                self.building = None
            case Promote():
                assert self.building is not None
                assert self.building.durable == self.building.files
                assert self.sealed is None
                self.sealed, self.building = Sealed(self.building.source), None
            case PointActive():
                assert self.sealed is not None
                self.active = True
            case Withdraw():
                self.sealed = None

    def record(self) -> StoredRecord:
        """What a process that knows nothing makes of it."""
        decision = decide(StoredRecord(VersionId("v")), Found(self.sealed, self.building))
        for effect in decision.effects:
            self.perform(effect)
        return decision.record


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=30))
def test_a_crash_between_any_two_effects_leaves_what_another_process_understands(
    steps: list[tuple[Event, int]],
) -> None:
    """And what is sealed leaves only when it was damaged, or nobody needed it."""
    disk = Disk()
    record = disk.record()
    for event, performed in steps:
        sealed = disk.sealed
        try:
            decision = decide(record, event)
        except Refused:
            continue
        if isinstance(event, FileDurable) and disk.building is not None:
            was = disk.building
            disk.building = Building(was.source, was.files, was.durable | {event.name})
        for effect in decision.effects[:performed]:
            disk.perform(effect)
        record = decision.record if performed >= len(decision.effects) else disk.record()
        assert record == disk.record()
        if sealed is not None and disk.sealed is None:
            assert event in (Damaged(), Evict(active=False, read=False))
        assert (record.state is StoredState.SEALED) == (disk.sealed is not None)
