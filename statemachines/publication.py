"""A publication, as the trainer process sees it: one per version and slot. It owns the fences.

    CAPTURING -> STAGED -> PUBLISHED -> DRAINING -> REUSABLE        or FAILED, or ORPHANED on the way

`publish_ready` completes when STAGED is entered, `source_reuse_ready` when REUSABLE is entered; FAILED
breaks both, and no path leaves one of them open. What the states protect is a buffer that others read
one-sidedly: it may be written again only in REUSABLE.

ORPHANED means that the control plane can't be asked. It holds the one bound on which a publisher may
rely then: registration TTL + lease TTL + margin after the last renewal that succeeded. By then the
registration has lapsed, so no reader can have confirmed this source since, and every lease under which
one had been confirmed has lapsed too. Times are milliseconds by the process's monotonic clock.
"""

from __future__ import annotations

from statemachines.kernel import Cell, Decision, Guard, Row, Table, cells, stay
from statemachines.publication_records import (
    STATES,
    Announced,
    AnnounceRefused,
    AnnounceShard,
    AnnounceUnknown,
    ArmBound,
    BoundPassed,
    BreakFences,
    Captured,
    CaptureFailed,
    Close,
    CloseDeadlinePassed,
    Discard,
    Drained,
    Draining,
    Effect,
    Event,
    Failed,
    Orphaned,
    Outcome,
    Phase,
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

CAPTURING, STAGED, PUBLISHED, DRAINING, ORPHANED, REUSABLE, FAILED = PublicationState

# Guards.


def is_announcing(record: PublicationRecord, event: Event, now_ms: int) -> bool:
    """Guard: an announcement is under way, so a reader may already have heard of the shard."""
    return isinstance(record.phase, Staged) and record.phase.announcing


def bound_has_passed(record: PublicationRecord, event: BoundPassed, now_ms: int) -> bool:
    """Guard: no reader can be left; false for a timer of an earlier, shorter separation."""
    return isinstance(record.phase, Orphaned) and now_ms >= record.phase.bound_ms


def is_wanted_back(record: PublicationRecord, event: Reachable, now_ms: int) -> bool:
    """Guard: the buffer was released before or during the separation."""
    return isinstance(record.phase, Orphaned) and record.phase.released


# Actions.


def _to(phase: Phase, *effects: Effect) -> Row:
    def act(record: PublicationRecord, event: Event, now_ms: int) -> Outcome:
        return PublicationRecord(record.version_id, record.slot_id, phase), effects

    return Row(STATES[type(phase)], act)


def _when(guard: Guard, row: Row) -> Row:
    return Row(row.target, row.do, guard)


def _orphan(
    record: PublicationRecord, event: VersionLost | RegistrationLost | ServerUnreachable, now_ms: int
) -> Outcome:
    phase = Orphaned(event.bound_ms, isinstance(record.phase, Draining))
    return PublicationRecord(record.version_id, record.slot_id, phase), (ArmBound(event.bound_ms),)


def _want_back(record: PublicationRecord, event: Event, now_ms: int) -> Outcome:
    assert isinstance(record.phase, Orphaned)
    return PublicationRecord(record.version_id, record.slot_id, Orphaned(record.phase.bound_ms, True)), ()


def _fail(record: PublicationRecord, event: CaptureFailed, now_ms: int) -> Outcome:
    failed = PublicationRecord(record.version_id, record.slot_id, Failed(event.reason))
    return failed, (BreakFences(event.reason),)


_REUSE = _to(Reusable(), StopServing(), SignalReuse())
_DRAIN = _to(Draining(), WatchDrain())
_CLOSED = "the trainer was closed before the readers of this version had drained"
_CUT = _to(Failed(_CLOSED), StopServing(), BreakFences(_CLOSED))
_UNFINISHED = "the trainer was closed while the version was being captured"
_ORPHAN = Row(ORPHANED, _orphan)
_OFFERED = (PUBLISHED, DRAINING)
_ENDED = (REUSABLE, FAILED)

TABLE: Table[PublicationRecord, int] = Table(
    "publication",
    PublicationState,
    CAPTURING,
    [
        Cell(CAPTURING, Captured, (_to(Staged(), SignalPublishReady()),)),
        Cell(CAPTURING, CaptureFailed, (Row(FAILED, _fail),)),
        Cell(CAPTURING, Close, (_to(Failed(_UNFINISHED), BreakFences(_UNFINISHED)),)),
        Cell(
            STAGED,
            Publish,
            (_when(is_announcing, Row(STAGED)), _to(Staged(True), ServeManifest(), AnnounceShard())),
        ),
        Cell(STAGED, Announced, (_to(Published(True)),)),
        Cell(STAGED, AnnounceUnknown, (_to(Published(False), AnnounceShard()),)),
        Cell(STAGED, AnnounceRefused, (_REUSE,)),
        *cells((STAGED,), Discard, _when(is_announcing, _DRAIN), _REUSE),
        *cells((STAGED,), Release, _when(is_announcing, _DRAIN), _REUSE),
        *cells((STAGED,), Close, _when(is_announcing, _DRAIN), _REUSE),
        *stay((PUBLISHED,), Publish),
        Cell(PUBLISHED, Announced, (_to(Published(True)),)),
        Cell(PUBLISHED, AnnounceUnknown, (_to(Published(False), AnnounceShard()),)),
        Cell(PUBLISHED, AnnounceRefused, (_DRAIN,)),
        Cell(PUBLISHED, Release, (_DRAIN,)),
        Cell(PUBLISHED, VersionReleased, (_DRAIN,)),
        Cell(PUBLISHED, Close, (_DRAIN,)),
        *cells(_OFFERED, VersionLost, _ORPHAN),
        *cells(_OFFERED, RegistrationLost, _ORPHAN),
        *cells(_OFFERED, ServerUnreachable, _ORPHAN),
        *stay(_OFFERED, Reachable),
        *stay(_OFFERED, BoundPassed),
        Cell(DRAINING, Drained, (_REUSE,)),
        *(one for late in (Release, VersionReleased, Close, Announced) for one in stay((DRAINING,), late)),
        *stay((DRAINING,), AnnounceRefused),
        *stay((DRAINING,), AnnounceUnknown),
        Cell(ORPHANED, BoundPassed, (_when(bound_has_passed, _REUSE), Row(ORPHANED))),
        Cell(ORPHANED, Drained, (_REUSE,)),
        Cell(
            ORPHANED,
            Reachable,
            (_when(is_wanted_back, _DRAIN), _to(Published(False), ServeManifest(), AnnounceShard())),
        ),
        Cell(ORPHANED, Release, (Row(ORPHANED, _want_back),)),
        Cell(ORPHANED, VersionReleased, (Row(ORPHANED, _want_back),)),
        Cell(ORPHANED, Close, (Row(ORPHANED, _want_back),)),
        *(
            one
            for late in (
                Announced,
                AnnounceUnknown,
                AnnounceRefused,
                VersionLost,
                RegistrationLost,
                ServerUnreachable,
            )
            for one in stay((ORPHANED,), late)
        ),
        *cells((CAPTURING, STAGED, *_OFFERED, ORPHANED), CloseDeadlinePassed, _CUT),
        *(
            one
            for late in (
                Announced,
                AnnounceUnknown,
                AnnounceRefused,
                Release,
                Discard,
                VersionReleased,
                VersionLost,
                RegistrationLost,
                ServerUnreachable,
                Reachable,
                Drained,
                BoundPassed,
                Close,
                CloseDeadlinePassed,
            )
            for one in stay(_ENDED, late)
        ),
        *(
            one
            for early in (VersionReleased, VersionLost, RegistrationLost, ServerUnreachable, Reachable)
            for one in stay((CAPTURING, STAGED), early)
        ),
    ],
    state_of=lambda record: record.state,
    name_of=lambda record: f"publication of version {record.version_id} in slot {record.slot_id}",
)


def decide(record: PublicationRecord, event: Event, now_ms: int) -> Decision[PublicationRecord]:
    """Decide what `event` does to the publication at `now_ms`; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, now_ms)


def pending(record: PublicationRecord) -> tuple[Effect, ...]:
    """The effects that must be running in this state; every one may be started twice."""
    match record.phase:
        case Staged(announcing=True) | Published(confirmed=False):
            return ServeManifest(), AnnounceShard()
        case Published():
            return (ServeManifest(),)
        case Draining():
            return ServeManifest(), WatchDrain()
        case Orphaned(bound_ms):
            return ServeManifest(), ArmBound(bound_ms)
        case Reusable():
            return StopServing(), SignalReuse()
        case Failed(reason):
            return StopServing(), BreakFences(reason)
        case _:
            return ()
