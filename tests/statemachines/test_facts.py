"""What is due when, what must be running, and the records that exploring does not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemachines import installation, publication, version
from statemachines.ids import SlotId, VersionId, WorkerId
from statemachines.installation_records import (
    FetchManifests,
    Idle,
    InstallationRecord,
    PostReads,
    Pulling,
    Serving,
    Uncertain,
    WriteParameters,
)
from statemachines.publication_records import (
    AnnounceShard,
    ArmBound,
    BreakFences,
    Captured,
    Effect,
    Orphaned,
    Phase,
    Published,
    ServeManifest,
    SignalReuse,
    Staged,
    StopServing,
    VersionLost,
    WatchDrain,
)
from statemachines.version_records import (
    Event,
    Forgotten,
    LeaseLapsed,
    Moment,
    Ready,
    Releasing,
    RenewLease,
    RetentionOver,
    Retired,
    Staging,
    WorkerExpired,
)
from tests.statemachines import examples_of_installation as inst
from tests.statemachines import examples_of_publication as pub
from tests.statemachines import examples_of_version as ver
from tests.statemachines.examples_of_version import (
    ALL,
    BOTH,
    DRAINING,
    G0,
    GONE,
    NOW,
    STORED,
    T0,
    UID,
    WORKERS,
    A,
    held,
    in_phase,
    lease_id,
    published,
    shard,
)


@pytest.mark.parametrize(
    ("record", "now_ms", "due"),
    [
        (ALL, 100, ()),
        (ver.READ, 199, ()),
        (ver.READ, 200, (LeaseLapsed(lease_id(G0)),)),
        (in_phase(Staging(published(shard(A, GONE)))), 100, (WorkerExpired(GONE),)),
        (DRAINING, 100, (RetentionOver(),)),
        (ver.KEPT, 100, (RetentionOver(),)),
        (
            DRAINING,
            1000,
            (LeaseLapsed(lease_id(G0)), WorkerExpired(T0), WorkerExpired(ver.T1), RetentionOver()),
        ),
    ],
)
def test_due(record: version.VersionRecord, now_ms: int, due: tuple[Event, ...]) -> None:
    assert version.due(record, Moment(now_ms, WORKERS)) == due


def test_settling_ends_what_is_over_and_decides_against_what_is_true() -> None:
    settled = version.settle(DRAINING, Moment(1000, WORKERS)).record
    assert settled.state is version.VersionState.RETIRED
    forgotten = version.settle(settled, Moment(2000, WORKERS))
    assert forgotten.record.state is version.VersionState.FORGOTTEN
    assert version.settle(ALL, Moment(1000, WORKERS)).record.state is version.VersionState.DEGRADED
    assert version.settle(ALL, NOW) == version.settle(ALL, NOW)
    assert version.settle(ALL, NOW).record is ALL


def test_a_publisher_that_nobody_knows_is_gone() -> None:
    assert version.settle(ALL, Moment(100, {})).record.publications == {}
    assert version.missing_slots(ALL, BOTH, Moment(100, {})) == (ver.A, ver.B)


@pytest.mark.parametrize(
    ("record", "now_ms", "wake_at_ms"),
    [
        (ver.EMPTY, 100, None),
        (ALL, 100, 1000),
        (ver.READ, 100, 200),
        (in_phase(Staging(published(shard(A, GONE)))), 100, None),
        (in_phase(Releasing(BOTH, {}, 150, 250, 100)), 100, 250),
        (in_phase(Releasing(BOTH, held((G0, 300)), 150, 250, 100)), 250, 300),
        (ver.KEPT, 100, 101),
        (in_phase(Forgotten()), 100, None),
    ],
)
def test_wake_at(record: version.VersionRecord, now_ms: int, wake_at_ms: int | None) -> None:
    assert version.wake_at_ms(record, Moment(now_ms, WORKERS)) == wake_at_ms


def test_a_version_begins_in_staging_or_ready_and_has_nothing_once_it_is_retired() -> None:
    assert version.begin(UID, ver.SPEC, 5, 1).phase == Staging()
    assert version.begin(UID, replace(STORED, starts_ready=True), 5, 1).phase == Ready({}, {}, 5)
    gone = in_phase(Retired(1))
    assert (gone.publications, gone.leases, gone.left) == ({}, {}, frozenset())
    assert version.live_leases(ver.READ, 199)
    assert not version.live_leases(ver.READ, 200)


def test_a_renewal_in_the_last_moment_ends_within_the_drain_deadline_and_one_ttl() -> None:
    last = Moment(149, WORKERS)
    renewed = version.decide(DRAINING, RenewLease(G0, 100), last).record
    assert renewed.leases[lease_id(G0)].deadline_ms == 249 <= 150 + 100


PENDING: tuple[tuple[Phase, tuple[Effect, ...]], ...] = (
    (Staged(), ()),
    (Staged(True), (ServeManifest(), AnnounceShard())),
    (Published(False), (ServeManifest(), AnnounceShard())),
    (Published(True), (ServeManifest(),)),
    (pub.WAITING.phase, (ServeManifest(), WatchDrain())),
    (Orphaned(7, released=True), (ServeManifest(), ArmBound(7))),
    (pub.RECORDS[pub.REUSABLE].phase, (StopServing(), SignalReuse())),
    (pub.RECORDS[pub.FAILED].phase, (StopServing(), BreakFences("why"))),
)


@pytest.mark.parametrize(("phase", "effects"), PENDING)
def test_what_a_publication_must_have_running(phase: Phase, effects: tuple[Effect, ...]) -> None:
    assert publication.pending(pub.in_phase(phase)) == effects


def test_a_publication_begins_with_its_capture() -> None:
    from statemachines.publication_records import begin

    new = begin(VersionId("v"), SlotId("a"))
    assert publication.pending(new) == ()
    assert publication.decide(new, Captured(), 0).record == pub.NEW


def test_the_bound_is_a_ttl_of_each_kind_and_the_margin_after_the_last_renewal() -> None:
    assert publication.readers_gone_by_ms(1_000, 90_000, 60_000, 500) == 151_500


def test_a_lost_version_is_waited_for_once_and_kept_in_mind_until_then() -> None:
    from statemachines.publication_records import Drained, Reachable, Release, ServerUnreachable

    def after(record: object, event: object, now_ms: int) -> object:
        return publication.TABLE.decide(record, event, now_ms).record  # type: ignore[arg-type]

    lost = after(pub.SHOWN, VersionLost(100), 0)
    again = after(after(lost, VersionLost(500), 10), Reachable(), 20)
    assert again == pub.in_phase(Published(False, 100))
    draining = after(again, Release(), 30)
    assert after(draining, Drained(), 50) == pub.in_phase(Orphaned(100, released=True, forgotten=True))
    # Cut off anew after the forgotten readers are gone: from then on the control plane's word counts.
    late = after(draining, ServerUnreachable(300), 150)
    assert late == pub.in_phase(Orphaned(300, released=True, forgotten=False))
    assert after(draining, ServerUnreachable(90), 50) == pub.in_phase(Orphaned(100, True, forgotten=True))


def test_what_an_installation_must_have_running() -> None:
    assert installation.pending(inst.RECORDS[inst.LEASED]) == (FetchManifests(inst.NEW),)
    assert installation.pending(inst.RECORDS[inst.PULLING]) == (PostReads(inst.NEW, inst.SOURCES),)
    assert installation.pending(inst.RECORDS[inst.INSTALLING]) == (WriteParameters(inst.NEW),)
    assert installation.pending(inst.RECORDS[inst.IDLE]) == ()


def test_a_generator_serves_what_it_has_installed_and_nothing_while_it_writes() -> None:
    assert InstallationRecord(Serving(inst.OLD)).serving == inst.OLD
    assert InstallationRecord(Serving(inst.OLD), inst.PULL).serving == inst.OLD
    assert InstallationRecord(Serving(inst.OLD), inst.RECORDS[inst.INSTALLING].working).serving is None
    assert InstallationRecord(Uncertain(inst.OLD)).serving is None
    assert InstallationRecord(Idle()).serving is None


def test_a_publisher_that_was_missing_once_is_never_confirmed_again() -> None:
    def after(record: object, *events: object) -> object:
        for event in events:
            record = installation.TABLE.decide(record, event, 0).record  # type: ignore[arg-type]
        return record

    few, everyone = frozenset({inst.T1, inst.T2}), inst.ALL
    renew = installation.LeaseRenewed
    pulling = after(inst.at(inst.PULL), renew(200, few), renew(300, everyone))
    assert pulling == inst.at(Pulling(inst.NEW, inst.L, 300, inst.SOURCES, few, sources_until_ms=100))
    planned = after(
        inst.at(inst.LEASE), renew(200, few), inst.EVENTS[installation.PlanMade], renew(300, everyone)
    )
    assert planned == inst.at(replace(inst.PLAN, lease_deadline_ms=300, still_live=few))
    leased = after(inst.at(inst.LEASE), renew(200, few), renew(50, everyone))
    assert leased == inst.at(replace(inst.LEASE, lease_deadline_ms=200, still_live=few))


def test_worker_ids_and_slots_are_text() -> None:
    assert isinstance(WorkerId("w"), str)
