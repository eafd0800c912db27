"""Examples of the publication machine."""

from __future__ import annotations

from statemachines import publication
from statemachines.ids import SlotId, VersionId
from statemachines.publication_records import (
    Announced,
    AnnounceRefused,
    AnnounceShard,
    AnnounceUnknown,
    ArmBound,
    BoundPassed,
    BreakFences,
    Captured,
    CaptureFailed,
    Capturing,
    Close,
    CloseDeadlinePassed,
    Discard,
    Drained,
    Draining,
    Event,
    Failed,
    Orphaned,
    PublicationRecord,
    PublicationState,
    Publish,
    Published,
    Reachable,
    RegistrationLost,
    Release,
    Reusable,
    ServeManifest,
    ServerUnreachable,
    SignalPublishReady,
    SignalReuse,
    Staged,
    StopServing,
    VersionLost,
    VersionReleased,
    WatchDrain,
)
from tests.statemachines.examples import Example, Machine

CAPTURING, STAGED, PUBLISHED, DRAINING, ORPHANED, REUSABLE, FAILED = PublicationState


def in_phase(phase: object) -> PublicationRecord:
    return PublicationRecord(VersionId("v"), SlotId("a"), phase)  # type: ignore[arg-type]


NEW = in_phase(Staged())
ANNOUNCING = in_phase(Staged(True))
SHOWN = in_phase(Published(True))
SHOWN_AGAIN = in_phase(Published(True, 100))
WAITING = in_phase(Draining())
WAITING_FOR_FORGOTTEN = in_phase(Draining(100))
APART = in_phase(Orphaned(100, released=False))
APART_AND_WANTED = in_phase(Orphaned(100, released=True))
LOST = in_phase(Orphaned(100, released=False, forgotten=True))
SEPARATIONS = (RegistrationLost(200), ServerUnreachable(200), VersionLost(200))
REUSE = (StopServing, SignalReuse)

RECORDS = {
    CAPTURING: in_phase(Capturing()),
    STAGED: NEW,
    PUBLISHED: SHOWN,
    DRAINING: WAITING,
    ORPHANED: APART,
    REUSABLE: in_phase(Reusable()),
    FAILED: in_phase(Failed("why")),
}
EVENTS: dict[type, Event] = {
    type(event): event
    for event in (
        Captured(),
        CaptureFailed("why"),
        Publish(),
        Announced(),
        AnnounceUnknown(),
        AnnounceRefused(),
        Discard(),
        Release(),
        VersionReleased(),
        *SEPARATIONS,
        Reachable(),
        Drained(),
        BoundPassed(),
        Close(),
        CloseDeadlinePassed(),
    )
}
GIVE_UP = (Discard(), Release(), Close())

EXAMPLES = (
    Example(RECORDS[CAPTURING], Captured(), 0, STAGED, True, effects=(SignalPublishReady,)),
    Example(RECORDS[CAPTURING], CaptureFailed("why"), 0, FAILED, True, effects=(BreakFences,)),
    Example(RECORDS[CAPTURING], Close(), 0, FAILED, True, effects=(BreakFences,)),
    Example(NEW, Publish(), 0, STAGED, True, effects=(ServeManifest, AnnounceShard)),
    Example(ANNOUNCING, Publish(), 0, STAGED, False, effects=()),
    Example(ANNOUNCING, Announced(), 0, PUBLISHED, True, effects=()),
    Example(ANNOUNCING, AnnounceUnknown(), 0, PUBLISHED, True, effects=(AnnounceShard,)),
    Example(ANNOUNCING, AnnounceRefused(), 0, REUSABLE, True, effects=REUSE),
    *(Example(NEW, event, 0, REUSABLE, True, effects=REUSE) for event in GIVE_UP),
    *(Example(ANNOUNCING, event, 0, DRAINING, True, effects=(WatchDrain,)) for event in GIVE_UP),
    *(Example(NEW, event, 0, STAGED, False, effects=()) for event in SEPARATIONS),
    *(Example(ANNOUNCING, event, 0, ORPHANED, True, effects=(ArmBound,)) for event in SEPARATIONS),
    Example(in_phase(Published(False)), Announced(), 0, PUBLISHED, True, effects=()),
    Example(SHOWN, AnnounceUnknown(), 0, PUBLISHED, True, effects=(AnnounceShard,)),
    Example(SHOWN, AnnounceRefused(), 0, DRAINING, True, effects=(WatchDrain,)),
    *(
        Example(SHOWN, event, 0, DRAINING, True, effects=(WatchDrain,))
        for event in (*GIVE_UP, VersionReleased())
    ),
    *(
        Example(record, event, 0, ORPHANED, True, effects=(ArmBound,))
        for record in (SHOWN, WAITING, APART)
        for event in SEPARATIONS
    ),
    # The word of a control plane ends a publication, but not for readers that it has forgotten.
    Example(WAITING, Drained(), 0, REUSABLE, True, effects=REUSE),
    Example(WAITING_FOR_FORGOTTEN, Drained(), 99, ORPHANED, True, effects=(ArmBound,)),
    Example(WAITING_FOR_FORGOTTEN, Drained(), 100, REUSABLE, True, effects=REUSE),
    Example(APART_AND_WANTED, Drained(), 0, REUSABLE, True, effects=REUSE),
    Example(LOST, Drained(), 99, ORPHANED, False, effects=()),
    Example(LOST, Drained(), 100, REUSABLE, True, effects=REUSE),
    # The bound.
    Example(APART, BoundPassed(), 99, ORPHANED, False, effects=()),
    Example(APART, BoundPassed(), 100, REUSABLE, True, effects=REUSE),
    Example(APART, ServerUnreachable(50), 0, ORPHANED, False, effects=()),
    *(Example(LOST, event, 0, ORPHANED, False, effects=()) for event in SEPARATIONS),
    # Back again.
    Example(APART, Reachable(), 0, PUBLISHED, True, effects=(ServeManifest, AnnounceShard)),
    Example(APART_AND_WANTED, Reachable(), 0, DRAINING, True, effects=(WatchDrain,)),
    *(
        Example(APART, event, 0, ORPHANED, True, effects=())
        for event in (*GIVE_UP, VersionReleased())
    ),
    *(
        Example(record, CloseDeadlinePassed(), 0, FAILED, True, effects=(StopServing, BreakFences))
        for state, record in RECORDS.items()
        if state not in (REUSABLE, FAILED)
    ),
)  # fmt: skip
PUBLICATION = Machine(publication.TABLE, publication, RECORDS, EVENTS, 0, EXAMPLES)
