"""An installation, as a generator rank sees it: from the weights it serves to those it serves next.

    IDLE -> LEASED -> PLANNED -> PULLING -> VERIFIED -> INSTALLING -> SERVING

The live weights are untouched until INSTALLING. Whatever fails before it leads back to what was
served: IDLE, SERVING, or UNCERTAIN. What fails within it leads to UNCERTAIN, never to "serving" (P6).

Staged bytes count only when their last read completed while the lease was provably live, by this
process's own clock, and when coverage and digests have been checked (P2). Buffers with reads in flight
are quarantined until the transport says that those have ended. Times are monotonic milliseconds.
"""

from __future__ import annotations

from dataclasses import replace

from statemachines.ids import VersionId, WorkerId
from statemachines.installation_records import (
    Abandoned,
    Effect,
    Event,
    FetchManifests,
    FreeStaging,
    Install,
    InstallationRecord,
    InstallationState,
    Installed,
    InstallFailed,
    Installing,
    Leased,
    LeaseGranted,
    LeaseRenewed,
    Outcome,
    PlanMade,
    Planned,
    PostReads,
    Pulling,
    PullStarted,
    PullVerified,
    QuarantineStaging,
    ReadsEnded,
    ReportServing,
    ReturnLease,
    Serving,
    SourceFailed,
    Uncertain,
    Verified,
    WriteParameters,
)
from statemachines.kernel import Action, Cell, Decision, Reason, Refused, Row, Table, cells, stay

# Checks: why a step is refused.


def staging_is_free(record: InstallationRecord, event: LeaseGranted, now_ms: int) -> None:
    """Check: no read into the staging of an earlier pull of this version is still in flight."""
    if event.version_id in record.quarantined:
        raise Refused(
            Reason.PRECONDITION,
            f"reads of an earlier pull of version {event.version_id} are still in flight: its staging is "
            "quarantined until the transport says that they ended",
        )


def lease_holds(record: InstallationRecord, event: Event, now_ms: int) -> None:
    """Check: by our own clock the lease is live, so nobody may have overwritten what we read."""
    working = _leased(record)
    if now_ms >= working.lease_deadline_ms:
        raise Refused(
            Reason.PRECONDITION,
            f"lease {working.lease_id} on version {working.version_id} ran out "
            f"{now_ms - working.lease_deadline_ms} ms ago: nothing more may be read under it",
        )


def coverage_is_proven(record: InstallationRecord, event: PlanMade, now_ms: int) -> None:
    """Check: the plan brings every element that the engine loads, exactly once."""
    if not event.proven:
        raise Refused(
            Reason.PRECONDITION,
            f"the plan of version {_leased(record).version_id} does not cover every element exactly once",
        )


def sources_are_confirmed(record: InstallationRecord, event: PullStarted, now_ms: int) -> None:
    """Check: every source was live at the grant and ever since; else it may count itself free."""
    _require_confirmed(record, _planned(record).sources, _confirmed(record, event))


def last_read_was_protected(record: InstallationRecord, event: PullVerified, now_ms: int) -> None:
    """Check: the lease was live when the last read ended, whatever the time is now."""
    working = _leased(record)
    if event.last_read_ms >= working.lease_deadline_ms:
        raise Refused(
            Reason.PRECONDITION,
            f"the last read of version {working.version_id} ended "
            f"{event.last_read_ms - working.lease_deadline_ms} ms after its lease: the bytes may have been "
            "overwritten while they were read",
        )


def every_source_was_live(record: InstallationRecord, event: PullVerified, now_ms: int) -> None:
    """Check: no source that was read from has dropped out of the last renewal."""
    working = _pulling(record)
    _require_confirmed(record, working.sources, working.confirmed)


def digests_agree(record: InstallationRecord, event: PullVerified, now_ms: int) -> None:
    """Check: what landed is what was published."""
    if not event.digests_agree:
        raise Refused(
            Reason.PRECONDITION,
            f"what landed of version {_leased(record).version_id} is not what was published",
        )


def _require_confirmed(
    record: InstallationRecord, sources: frozenset[str], confirmed: frozenset[str]
) -> None:
    if missing := sources - confirmed:
        raise Refused(
            Reason.PRECONDITION,
            f"sources {', '.join(sorted(missing))} of version {_leased(record).version_id} were not live at "
            "the last renewal: they may count their buffers as free",
        )


# Guards.


def has_another_source(record: InstallationRecord, event: SourceFailed, now_ms: int) -> bool:
    """Guard: live replicas have what the lost source had, and what it has delivered is good.

    It is not while reads from the lost source are in flight, which may land on top of a replica's; nor
    once that source has been without protection.
    """
    working = _pulling(record)
    until_ms = working.lease_deadline_ms if working.sources_until_ms is None else working.sources_until_ms
    if event.sources is None or event.reads_in_flight or now_ms >= until_ms:
        return False
    return event.sources <= working.confirmed


def lease_is_live(record: InstallationRecord, event: LeaseRenewed, now_ms: int) -> bool:
    """Guard: the renewal came while the lease was live; a lapsed one is never revived."""
    return now_ms < _leased(record).lease_deadline_ms


def rests_serving(record: InstallationRecord, event: Event, now_ms: int) -> bool:
    """Guard: a version is served, so that is where a failure leads back to."""
    return isinstance(record.resting, Serving)


def rests_uncertain(record: InstallationRecord, event: Event, now_ms: int) -> bool:
    """Guard: an earlier install failed half-way, and a failure before the next one changes nothing."""
    return isinstance(record.resting, Uncertain)


# Actions.


def _lease(record: InstallationRecord, event: LeaseGranted, now_ms: int) -> Outcome:
    working = Leased(event.version_id, event.lease_id, event.lease_deadline_ms)
    return replace(record, working=working), (FetchManifests(event.version_id),)


def _renew(record: InstallationRecord, event: LeaseRenewed, now_ms: int) -> Outcome:
    working = _leased(record)
    deadline = max(working.lease_deadline_ms, event.lease_deadline_ms)
    # A publisher that was missing once may have counted itself free in between: it never comes back.
    if isinstance(working, Pulling):
        confirmed, until_ms = working.confirmed & event.confirmed, working.sources_until_ms
        if until_ms is None and not working.sources <= confirmed:
            until_ms = working.lease_deadline_ms
        working = replace(working, confirmed=confirmed, sources_until_ms=until_ms)
    else:
        known = working.still_live
        working = replace(working, still_live=event.confirmed if known is None else known & event.confirmed)
    return replace(record, working=replace(working, lease_deadline_ms=deadline)), ()


def _plan(record: InstallationRecord, event: PlanMade, now_ms: int) -> Outcome:
    at = _leased(record)
    working = Planned(
        at.version_id, at.lease_id, at.lease_deadline_ms, event.sources, still_live=at.still_live
    )
    return replace(record, working=working), ()


def _pull(record: InstallationRecord, event: PullStarted, now_ms: int) -> Outcome:
    at = _planned(record)
    confirmed = _confirmed(record, event)
    working = Pulling(at.version_id, at.lease_id, at.lease_deadline_ms, at.sources, confirmed)
    return replace(record, working=working), (PostReads(at.version_id, at.sources),)


def _fail_over(record: InstallationRecord, event: SourceFailed, now_ms: int) -> Outcome:
    working = _pulling(record)
    assert event.sources is not None
    moved = replace(working, sources=event.sources, sources_until_ms=None)
    return replace(record, working=moved), (PostReads(working.version_id, event.sources),)


def _verify(record: InstallationRecord, event: PullVerified, now_ms: int) -> Outcome:
    at = _leased(record)
    return replace(record, working=Verified(at.version_id)), (ReturnLease(at.version_id, at.lease_id),)


def _install(record: InstallationRecord, event: Install, now_ms: int) -> Outcome:
    assert isinstance(record.working, Verified)
    version_id = record.working.version_id
    return replace(record, working=Installing(version_id)), (WriteParameters(version_id),)


def _serve(record: InstallationRecord, event: Installed, now_ms: int) -> Outcome:
    version_id = _written(record)
    after = replace(record, resting=Serving(version_id), working=None)
    return after, (FreeStaging(version_id), ReportServing(version_id))


def _doubt(record: InstallationRecord, event: InstallFailed, now_ms: int) -> Outcome:
    version_id = _written(record)
    after = replace(record, resting=Uncertain(version_id), working=None)
    return after, (FreeStaging(version_id), ReportServing(None))


def _give_up(record: InstallationRecord, event: Abandoned | SourceFailed, now_ms: int) -> Outcome:
    working = record.working
    assert isinstance(working, Leased | Verified)
    after = replace(record, working=None)
    effects: tuple[Effect, ...] = (FreeStaging(working.version_id),)
    if event.reads_in_flight:
        after = replace(after, quarantined=record.quarantined | {working.version_id})
        effects = (QuarantineStaging(working.version_id),)
    if isinstance(working, Leased) and not event.reads_in_flight:
        effects = (*effects, ReturnLease(working.version_id, working.lease_id))
    return after, effects


def _unquarantine(record: InstallationRecord, event: ReadsEnded, now_ms: int) -> Outcome:
    if event.version_id not in record.quarantined:
        return record, ()
    after = replace(record, quarantined=record.quarantined - {event.version_id})
    return after, (FreeStaging(event.version_id),)


def _leased(record: InstallationRecord) -> Leased:
    assert isinstance(record.working, Leased)
    return record.working


def _planned(record: InstallationRecord) -> Planned:
    assert isinstance(record.working, Planned)
    return record.working


def _pulling(record: InstallationRecord) -> Pulling:
    assert isinstance(record.working, Pulling)
    return record.working


def _confirmed(record: InstallationRecord, event: PullStarted) -> frozenset[WorkerId]:
    still_live = _planned(record).still_live
    return event.confirmed if still_live is None else event.confirmed & still_live


def _written(record: InstallationRecord) -> VersionId:
    assert isinstance(record.working, Installing)
    return record.working.version_id


# The table.

IDLE, LEASED, PLANNED, PULLING, VERIFIED, INSTALLING, SERVING, UNCERTAIN = InstallationState
_RESTING = (IDLE, SERVING, UNCERTAIN)


def _back(do: Action) -> tuple[Row, ...]:
    """Rows that lead back to whatever the weights are."""
    return (
        Row(SERVING, do, rests_serving),
        Row(UNCERTAIN, do, rests_uncertain),
        Row(IDLE, do),
    )


TABLE: Table[InstallationRecord, int] = Table(
    "installation",
    InstallationState,
    IDLE,
    [
        *cells(_RESTING, LeaseGranted, Row(LEASED, _lease), checks=(staging_is_free,)),
        *(
            Cell(state, LeaseRenewed, (Row(state, _renew, lease_is_live), Row(state)))
            for state in (LEASED, PLANNED, PULLING)
        ),
        Cell(LEASED, PlanMade, (Row(PLANNED, _plan),), (lease_holds, coverage_is_proven)),
        Cell(PLANNED, PullStarted, (Row(PULLING, _pull),), (lease_holds, sources_are_confirmed)),
        Cell(PULLING, SourceFailed, (Row(PULLING, _fail_over, has_another_source), *_back(_give_up))),
        Cell(
            PULLING,
            PullVerified,
            (Row(VERIFIED, _verify),),
            (last_read_was_protected, every_source_was_live, digests_agree),
        ),
        *cells((LEASED, PLANNED, PULLING, VERIFIED), Abandoned, *_back(_give_up)),
        Cell(VERIFIED, Install, (Row(INSTALLING, _install),)),
        Cell(INSTALLING, Installed, (Row(SERVING, _serve),)),
        Cell(INSTALLING, InstallFailed, (Row(UNCERTAIN, _doubt),)),
        *stay((*_RESTING, VERIFIED, INSTALLING), LeaseRenewed),
        *stay(tuple(InstallationState), ReadsEnded, _unquarantine),
        *stay(_RESTING, Abandoned),
    ],
    state_of=lambda record: record.state,
    name_of=lambda record: f"installation of version {getattr(record.working, 'version_id', '(none)')}",
)


def decide(record: InstallationRecord, event: Event, now_ms: int) -> Decision[InstallationRecord]:
    """Decide what `event` does to the installation at `now_ms`; see `kernel.Table.decide`."""
    return TABLE.decide(record, event, now_ms)


def pending(record: InstallationRecord) -> tuple[Effect, ...]:
    """The effects that must be running in this state; every one may be started twice."""
    match record.working:
        case Pulling(version_id=version_id, sources=sources):
            return (PostReads(version_id, sources),)
        case Leased(version_id=version_id):
            return (FetchManifests(version_id),)
        case Installing(version_id=version_id):
            return (WriteParameters(version_id),)
        case _:
            return ()
