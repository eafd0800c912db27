"""A publication, as the trainer process sees it: one per version and slot. It owns the fences.

    CAPTURING -> STAGED -> PUBLISHED -> DRAINING -> REUSABLE        or FAILED, or ORPHANED on the way

`publish_ready` completes when STAGED is entered, `source_reuse_ready` when REUSABLE is entered; FAILED
breaks both, and no path leaves one of them open. What the states protect is a buffer that others read
one-sidedly: it may be written again only in REUSABLE.

ORPHANED means that the control plane can't be asked, or no longer knows who reads. It holds the one
bound on which a publisher may rely then, `readers_gone_by_ms`: by then no reader can have confirmed
this source for a lease TTL. A later separation moves the bound, never back, and not once the version is
lost. Readers that the control plane has forgotten are waited for even where it answers again and says
that nobody reads.

Times are milliseconds by the process's monotonic clock.
"""

from __future__ import annotations

from dataclasses import replace

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


def readers_gone_by_ms(
    renewal_ended_ms: int, registration_ttl_ms: int, lease_ttl_ms: int, margin_ms: int
) -> int:
    """When no reader can be left of a publisher that the control plane knows no more.

    `renewal_ended_ms` is when the last renewal that may have been applied ended: with a reply, or with
    none where the request may have arrived. So while it is cut off a publisher asks only what changes
    nothing until it is answered, or the bound would move with every attempt. `lease_ttl_ms` is the
    longest lease that the control plane grants.
    """
    return renewal_ended_ms + registration_ttl_ms + lease_ttl_ms + margin_ms


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


def readers_are_forgotten(record: PublicationRecord, event: Drained, now_ms: int) -> bool:
    """Guard: there may be readers of whom the control plane does not know that they read."""
    until_ms = _forgotten_until_ms(record.phase)
    return until_ms is not None and now_ms < until_ms


def _forgotten_until_ms(phase: Phase) -> int | None:
    if isinstance(phase, Orphaned):
        return phase.bound_ms if phase.forgotten else None
    return phase.forgotten_until_ms if isinstance(phase, Published | Draining) else None


# Actions.


def _to(phase: Phase, *effects: Effect) -> Row:
    def act(record: PublicationRecord, event: Event, now_ms: int) -> Outcome:
        return _in(record, phase), effects

    return Row(STATES[type(phase)], act)


def _in(record: PublicationRecord, phase: Phase) -> PublicationRecord:
    return replace(record, phase=phase)


def _when(guard: Guard, row: Row) -> Row:
    return Row(row.target, row.do, guard)


def _confirm(record: PublicationRecord, event: Announced, now_ms: int) -> Outcome:
    return _in(record, Published(True, _forgotten_until_ms(record.phase))), ()


def _announce_again(record: PublicationRecord, event: Event, now_ms: int) -> Outcome:
    effects = (ServeManifest(), AnnounceShard()) if isinstance(event, Reachable) else (AnnounceShard(),)
    return _in(record, Published(False, _forgotten_until_ms(record.phase))), effects


def _drain(record: PublicationRecord, event: Event, now_ms: int) -> Outcome:
    return _in(record, Draining(_forgotten_until_ms(record.phase))), (WatchDrain(),)


def _orphan(
    record: PublicationRecord, event: VersionLost | RegistrationLost | ServerUnreachable, now_ms: int
) -> Outcome:
    before, until_ms = record.phase, _forgotten_until_ms(record.phase)
    if isinstance(before, Orphaned) and before.forgotten:
        return record, ()  # nobody can have come since: later separations are not waited for
    earlier_ms = before.bound_ms if isinstance(before, Orphaned) else until_ms
    after = Orphaned(
        bound_ms=event.bound_ms if earlier_ms is None else max(event.bound_ms, earlier_ms),
        released=isinstance(before, Draining) or (isinstance(before, Orphaned) and before.released),
        forgotten=isinstance(event, VersionLost) or (until_ms is not None and now_ms < until_ms),
    )
    return (record, ()) if after == before else (_in(record, after), (ArmBound(after.bound_ms),))


def _wait_for_forgotten(record: PublicationRecord, event: Drained, now_ms: int) -> Outcome:
    assert isinstance(record.phase, Draining)
    assert record.phase.forgotten_until_ms is not None
    bound_ms = record.phase.forgotten_until_ms
    return _in(record, Orphaned(bound_ms, released=True, forgotten=True)), (ArmBound(bound_ms),)


def _want_back(record: PublicationRecord, event: Event, now_ms: int) -> Outcome:
    assert isinstance(record.phase, Orphaned)
    return _in(record, replace(record.phase, released=True)), ()


def _fail(record: PublicationRecord, event: CaptureFailed, now_ms: int) -> Outcome:
    return _in(record, Failed(event.reason)), (BreakFences(event.reason),)


_REUSE = _to(Reusable(), StopServing(), SignalReuse())
_DRAIN = Row(DRAINING, _drain)
_AGAIN = Row(PUBLISHED, _announce_again)
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
        Cell(STAGED, Announced, (Row(PUBLISHED, _confirm),)),
        Cell(STAGED, AnnounceUnknown, (_AGAIN,)),
        Cell(STAGED, AnnounceRefused, (_REUSE,)),
        *(
            one
            for given_up in (Discard, Release, Close)
            for one in cells((STAGED,), given_up, _when(is_announcing, _DRAIN), _REUSE)
        ),
        *(
            one
            for cut_off in (VersionLost, RegistrationLost, ServerUnreachable)
            for one in (
                *cells((STAGED,), cut_off, _when(is_announcing, _ORPHAN), Row(STAGED)),
                *cells((*_OFFERED, ORPHANED), cut_off, _ORPHAN),
            )
        ),
        Cell(PUBLISHED, Announced, (Row(PUBLISHED, _confirm),)),
        Cell(PUBLISHED, AnnounceUnknown, (_AGAIN,)),
        Cell(PUBLISHED, AnnounceRefused, (_DRAIN,)),
        *(
            one
            for given_up in (Discard, Release, VersionReleased, Close)
            for one in (
                *cells((PUBLISHED,), given_up, _DRAIN),
                *stay((DRAINING,), given_up),
                *cells((ORPHANED,), given_up, Row(ORPHANED, _want_back)),
            )
        ),
        Cell(DRAINING, Drained, (_when(readers_are_forgotten, Row(ORPHANED, _wait_for_forgotten)), _REUSE)),
        Cell(ORPHANED, Drained, (_when(readers_are_forgotten, Row(ORPHANED)), _REUSE)),
        Cell(ORPHANED, BoundPassed, (_when(bound_has_passed, _REUSE), Row(ORPHANED))),
        Cell(ORPHANED, Reachable, (_when(is_wanted_back, _DRAIN), _AGAIN)),
        *stay((PUBLISHED, DRAINING, ORPHANED), Publish),
        *stay(_OFFERED, Reachable),
        *stay(_OFFERED, BoundPassed),
        *(
            one
            for late in (Announced, AnnounceUnknown, AnnounceRefused)
            for one in stay((DRAINING, ORPHANED), late)
        ),
        *cells((CAPTURING, STAGED, *_OFFERED, ORPHANED), CloseDeadlinePassed, _CUT),
        *(
            one
            for late in (
                Captured,
                CaptureFailed,
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
            for early in (VersionLost, RegistrationLost, ServerUnreachable)
            for one in stay((CAPTURING,), early)
        ),
        *(one for early in (VersionReleased, Reachable) for one in stay((CAPTURING, STAGED), early)),
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
