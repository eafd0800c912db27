"""Examples of the installation machine."""

from __future__ import annotations

from dataclasses import replace

from statemachines import installation
from statemachines.ids import LeaseId, VersionId, WorkerId
from statemachines.installation_records import (
    Abandoned,
    Event,
    FetchManifests,
    FreeStaging,
    Idle,
    Install,
    InstallationRecord,
    InstallationState,
    Installed,
    InstallFailed,
    Installing,
    Leased,
    LeaseGranted,
    LeaseRenewed,
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
from statemachines.kernel import Reason
from tests.statemachines.examples import Example, Machine, refused

IDLE, LEASED, PLANNED, PULLING, VERIFIED, INSTALLING, SERVING, UNCERTAIN = InstallationState
OLD, NEW, L = VersionId("old"), VersionId("new"), LeaseId("l")
T0, T1, T2 = WorkerId("t0"), WorkerId("t1"), WorkerId("t2")
SOURCES, ALL = frozenset({T0, T1}), frozenset({T0, T1, T2})
PRECONDITION = Reason.PRECONDITION


def at(working: object, resting: object = Idle(), *quarantined: VersionId) -> InstallationRecord:
    return InstallationRecord(resting, working, frozenset(quarantined))  # type: ignore[arg-type]


LEASE = Leased(NEW, L, 100)
PLAN = Planned(NEW, L, 100, SOURCES)
PULL = Pulling(NEW, L, 100, SOURCES, ALL)
RESTING = ((IDLE, Idle()), (SERVING, Serving(OLD)), (UNCERTAIN, Uncertain(OLD)))
WORKING = (LEASE, PLAN, PULL, Verified(NEW))
GRANT = LeaseGranted(NEW, L, 100)
RENEWAL = LeaseRenewed(200, ALL)

RECORDS = {
    IDLE: at(None),
    LEASED: at(LEASE),
    PLANNED: at(PLAN),
    PULLING: at(PULL),
    VERIFIED: at(Verified(NEW)),
    INSTALLING: at(Installing(NEW)),
    SERVING: at(None, Serving(OLD)),
    UNCERTAIN: at(None, Uncertain(OLD)),
}
EVENTS: dict[type, Event] = {
    type(event): event
    for event in (
        GRANT,
        RENEWAL,
        PlanMade(SOURCES, True),
        PullStarted(ALL),
        SourceFailed(T0, frozenset({T1, T2}), False),
        PullVerified(99, True),
        Abandoned("why"),
        ReadsEnded(NEW),
        Install(),
        Installed(),
        InstallFailed("why"),
    )
}
REPLICA = frozenset({T1, T2})

EXAMPLES = (
    *(
        example
        for state, resting in RESTING
        for example in (
            Example(at(None, resting), GRANT, 0, LEASED, True, effects=(FetchManifests,)),
            Example(at(None, resting, OLD), GRANT, 0, LEASED, True),
            refused(at(None, resting, NEW), GRANT, 0, PRECONDITION, "are still in flight"),
            Example(at(None, resting), Abandoned("why"), 0, state, False, effects=()),
        )
    ),
    # LeaseRenewed
    *(
        example
        for working, state in ((LEASE, LEASED), (PLAN, PLANNED), (PULL, PULLING))
        for example in (
            Example(at(working), RENEWAL, 99, state, True, effects=()),
            Example(at(working), RENEWAL, 100, state, False, effects=()),
        )
    ),
    Example(at(replace(LEASE, still_live=SOURCES)), RENEWAL, 0, LEASED, True),
    Example(at(replace(PULL, sources_until_ms=50)), LeaseRenewed(200, SOURCES), 0, PULLING, True),
    # PlanMade, PullStarted
    Example(at(LEASE), PlanMade(SOURCES, True), 99, PLANNED, True),
    refused(at(LEASE), PlanMade(SOURCES, True), 100, PRECONDITION, "lease l on version new ran out 0 ms ago"),
    refused(at(LEASE), PlanMade(SOURCES, False), 99, PRECONDITION, "does not cover every element"),
    Example(at(PLAN), PullStarted(SOURCES), 99, PULLING, True, effects=(PostReads,)),
    Example(at(replace(PLAN, still_live=SOURCES)), PullStarted(ALL), 99, PULLING, True),
    refused(at(PLAN), PullStarted(SOURCES), 100, PRECONDITION, "ran out 0 ms ago"),
    refused(
        at(PLAN), PullStarted(frozenset({T0})), 99, PRECONDITION, "sources t1 of version new were not live"
    ),
    refused(at(replace(PLAN, still_live=frozenset({T0}))), PullStarted(ALL), 99, PRECONDITION, "sources t1"),
    # SourceFailed
    Example(at(PULL), SourceFailed(T0, REPLICA, False), 99, PULLING, True, effects=(PostReads,)),
    Example(at(replace(PULL, sources_until_ms=50)), SourceFailed(T0, REPLICA, False), 49, PULLING, True),
    *(
        example
        for state, resting in RESTING
        for example in (
            Example(
                at(PULL, resting),
                SourceFailed(T0, None, False),
                99,
                state,
                True,
                effects=(FreeStaging, ReturnLease),
            ),
            Example(
                at(PULL, resting),
                SourceFailed(T0, REPLICA, True),
                99,
                state,
                True,
                effects=(QuarantineStaging,),
            ),
            Example(at(PULL, resting), SourceFailed(T0, REPLICA, False), 100, state, True),
            Example(
                at(replace(PULL, sources_until_ms=50), resting),
                SourceFailed(T0, REPLICA, False),
                50,
                state,
                True,
            ),
            Example(
                at(replace(PULL, confirmed=SOURCES), resting),
                SourceFailed(T0, REPLICA, False),
                99,
                state,
                True,
            ),
        )
    ),
    # PullVerified
    Example(at(PULL), PullVerified(99, True), 300, VERIFIED, True, effects=(ReturnLease,)),
    refused(at(PULL), PullVerified(100, True), 300, PRECONDITION, "ended 0 ms after its lease"),
    refused(
        at(replace(PULL, confirmed=REPLICA)),
        PullVerified(99, True),
        99,
        PRECONDITION,
        "sources t0 of version",
    ),
    refused(at(PULL), PullVerified(99, False), 99, PRECONDITION, "is not what was published"),
    # Abandoned
    *(
        example
        for working in WORKING
        for state, resting in RESTING
        for example in (
            Example(
                at(working, resting),
                Abandoned("why"),
                0,
                state,
                True,
                effects=(FreeStaging,) if isinstance(working, Verified) else (FreeStaging, ReturnLease),
            ),
            Example(
                at(working, resting), Abandoned("why", True), 0, state, True, effects=(QuarantineStaging,)
            ),
        )
    ),
    # Install
    Example(at(Verified(NEW), Serving(OLD)), Install(), 0, INSTALLING, True, effects=(WriteParameters,)),
    Example(at(Installing(NEW)), Installed(), 0, SERVING, True, effects=(FreeStaging, ReportServing)),
    Example(
        at(Installing(NEW)), InstallFailed("why"), 0, UNCERTAIN, True, effects=(FreeStaging, ReportServing)
    ),
    # ReadsEnded
    *(
        example
        for state, record in RECORDS.items()
        for example in (
            Example(record, ReadsEnded(OLD), 0, state, False, effects=()),
            Example(
                replace(record, quarantined=frozenset({OLD})),
                ReadsEnded(OLD),
                0,
                state,
                True,
                effects=(FreeStaging,),
            ),
        )
    ),
)
INSTALLATION = Machine(installation.TABLE, installation, RECORDS, EVENTS, 0, EXAMPLES)
