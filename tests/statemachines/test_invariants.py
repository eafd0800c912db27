"""The invariants themselves: each sees what it is there to see, in a world made wrong by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from statemachines import version
from statemachines.ids import LeaseId, SlotId, VersionId
from statemachines.installation_records import (
    InstallationRecord,
    Leased,
    LeaseRenewed,
    Planned,
    Pulling,
    Serving,
    Verified,
)
from statemachines.invariants import OF_DECISIONS, OF_WORLDS, broken_by, broken_in, violations
from statemachines.lease import LeaseRecord
from statemachines.publication_records import Publish, Published, Reachable, begin
from statemachines.rundown import Rundown
from statemachines.version_records import (
    AcquireLease,
    Degraded,
    LeaseLapsed,
    Moment,
    Publication,
    Ready,
    Releasing,
    RenewLease,
    ReturnLease,
)
from statemachines.world import Config, World, start, step
from statemachines.world_records import UID, Bytes, Decided, Generator, Machine, Step
from tests.statemachines import examples_of_publication as pub
from tests.statemachines import examples_of_version as ver

L = LeaseId("l")


def published(config: Config = Config(slots=("a", "a"), published=True)) -> World:  # noqa: B008
    return start(replace(config, published=True))


def with_phase(world: World, phase: object) -> World:
    assert world.store.version is not None
    record = replace(world.store.version, phase=phase)  # type: ignore[arg-type]
    return world._replace(store=world.store._replace(version=record))


def overwritten(world: World, i: int = 0) -> World:
    trainers = list(world.trainers)
    trainers[i] = trainers[i]._replace(overwritten=True)
    return world._replace(trainers=tuple(trainers))


def reader(world: World, **fields: object) -> World:
    generator = world.generators[0]._replace(**fields)  # type: ignore[arg-type]
    return world._replace(generators=(generator,))


def test_a_world_that_is_right() -> None:
    assert broken_in(published()) == ()


def test_p1_no_reader_is_sent_to_a_buffer_that_is_written_again() -> None:
    world = overwritten(published())
    assert broken_in(world) == ("P1: t0 has written its buffer again, and readers are still sent to it",)
    assert OF_WORLDS["P1"](with_phase(world, Degraded({}, {}))) is None


T0, T1 = (trainer.worker_id for trainer in start(Config(slots=("a", "a"))).trainers)


@pytest.mark.parametrize(
    ("working", "may_read"),
    [
        (Leased(UID, L, 1), True),
        (Leased(UID, L, 0), False),
        (Leased(UID, L, 1, still_live=frozenset({T1})), False),
        (Planned(UID, L, 1, frozenset({T0})), True),
        (Planned(UID, L, 1, frozenset({T1})), False),
        (Pulling(UID, L, 1, frozenset({T0}), frozenset({T0})), True),
        (Pulling(UID, L, 1, frozenset({T0}), frozenset({T1})), False),
        (Pulling(UID, L, 2, frozenset({T0}), frozenset({T1}), sources_until_ms=1), True),
        (Pulling(UID, L, 2, frozenset({T0}), frozenset({T1}), sources_until_ms=0), False),
        (Verified(UID), False),
    ],
)
def test_p1_who_may_read(working: object, may_read: bool) -> None:
    world = with_phase(overwritten(published()), Degraded({}, {}))
    record = InstallationRecord(working=working)  # type: ignore[arg-type]
    world = reader(world, installation=record, granted=frozenset({(T0, 0), (T1, 0)}))
    assert (OF_WORLDS["P1"](world) is not None) is may_read
    assert OF_WORLDS["P1"](reader(world, alive=False)) is None


def test_p2_and_p6_rubbish_and_mixtures_are_seen() -> None:
    world = published()
    good, bad = frozenset({Bytes.GOOD}), frozenset({Bytes.BAD})
    serving = InstallationRecord(Serving(UID))
    assert broken_in(reader(world, installation=serving, parameters=good)) == ()
    assert broken_in(reader(world, installation=serving, parameters=bad)) == (
        "P2: g0 took rubbish for the version",
    )
    assert OF_WORLDS["P2"](reader(world, installation=InstallationRecord(working=Verified(UID)), staging=bad))
    assert OF_WORLDS["P6"](reader(world, installation=serving, parameters=good | bad)) == (
        "g0 says that it serves, and its parameters are mixed"
    )

    class Silent(InstallationRecord):
        @property
        def serving(self) -> VersionId | None:
            return None

    assert OF_WORLDS["P6"](reader(world, installation=Silent(Serving(UID)))) == (
        "g0 serves, and doesn't say what"
    )


def test_p3_completeness_and_life_are_seen() -> None:
    world = published()
    assert world.store.version is not None
    shards = world.store.version.publications
    assert OF_WORLDS["P3"](with_phase(world, Ready({}, {}, 0))) == (
        "the version is READY without a live publication of slot a"
    )
    assert OF_WORLDS["P3"](with_phase(world, Degraded(shards, {}))) == (
        "the version is DEGRADED, and every slot has a live publication"
    )
    old = Publication(SlotId("a"), T0, 1, 1, "7", "endpoint", 1)
    assert OF_WORLDS["P3"](with_phase(world, Ready({**shards, old.key: old}, {}, 0))) == (
        "t0 counts as live for a publication of an earlier process"
    )


def test_p4_and_p5_what_stays_too_long_is_seen() -> None:
    world = published()
    assert world.store.version is not None
    held = {L: LeaseRecord(L, T0, 4)}
    shards = world.store.version.publications
    assert OF_WORLDS["P4"](with_phase(world, Releasing(shards, held, 1, 9, 1))) == (
        "lease l outlives the drain deadline by more than a TTL"
    )
    late = with_phase(world, Ready(shards, held, 0))._replace(now_ms=4)
    assert OF_WORLDS["P5"](late) == "lease l is on file after its deadline"
    assert OF_WORLDS["P5"](with_phase(late, Ready(shards, {}, 0))) == (
        "the publication of t0 is on file after its registration"
    )
    assert OF_WORLDS["P5"](with_phase(world, Releasing({}, {}, 1, 9, 1))) == (
        "nobody reads or publishes the version, and it is not RETIRED"
    )


def test_p4_what_is_wanted_back_is_not_offered_again() -> None:
    shown = pub.in_phase(Published(False))
    for before, fine in ((pub.APART, True), (pub.APART_AND_WANTED, False), (pub.WAITING, False)):
        one = Decided(Machine.PUBLICATION, before, Reachable(), 0, shown)
        assert (OF_DECISIONS["P4"](one) is None) is fine
    assert OF_DECISIONS["P4"](Decided(Machine.PUBLICATION, pub.WAITING, Reachable(), 0, pub.WAITING)) is None


def decided(before: object, event: object, after: object, now_ms: int = 100) -> Decided:
    return Decided(Machine.VERSION, before, event, Moment(now_ms, ver.WORKERS), after)


UNREAD, READ = ver.ALL, ver.READ
RENEWED = ver.in_phase(Ready(ver.BOTH, ver.held((ver.G0, 300)), 50))


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (decided(READ, ReturnLease(ver.lease_id(ver.G0), ver.G0), UNREAD), None),
        (decided(READ, LeaseLapsed(ver.lease_id(ver.G0)), UNREAD, 200), None),
        (decided(READ, LeaseLapsed(ver.lease_id(ver.G0)), UNREAD), "went before its deadline"),
        (decided(READ, ReturnLease(ver.lease_id(ver.G0), ver.G1), UNREAD), "g0 did not return it"),
        (decided(RENEWED, RenewLease(ver.G0, 1), READ), "was shortened"),
        (decided(READ, RenewLease(ver.G0, 100), RENEWED, 200), "had lapsed, and was renewed"),
        (decided(READ, AcquireLease(ver.G0, 100), RENEWED, 200), None),
        (decided(UNREAD, AcquireLease(ver.G0, 100), READ), None),
        (decided(UNREAD, RenewLease(ver.G0, 100), READ), "came by RenewLease"),
    ],
)
def test_p7_every_end_of_a_lease_is_looked_at(one: Decided, words: str | None) -> None:
    found = OF_DECISIONS["P7"](one)
    assert (found is None) if words is None else (found is not None and words in found)


def test_p7_a_reader_does_not_revive_its_own_lease() -> None:
    held = InstallationRecord(working=Leased(UID, L, 100))
    longer = InstallationRecord(working=Leased(UID, L, 200))
    renewed = Decided(Machine.INSTALLATION, held, LeaseRenewed(200, frozenset()), 99, longer)
    assert OF_DECISIONS["P7"](renewed) is None
    late = Decided(Machine.INSTALLATION, held, LeaseRenewed(200, frozenset()), 100, longer)
    assert OF_DECISIONS["P7"](late) == "a reader's lapsed lease was renewed"


def test_p8_a_repeat_that_changes_something_is_seen() -> None:
    assert OF_DECISIONS["P8"](decided(UNREAD, AcquireLease(ver.G0, 100), UNREAD)) == (
        "AcquireLease twice is not AcquireLease once"
    )
    new = begin(UID, SlotId("a"))
    refused = Decided(Machine.PUBLICATION, new, Publish(), 0, new)
    assert OF_DECISIONS["P8"](refused) is None
    assert broken_by(decided(UNREAD, AcquireLease(ver.G0, 100), UNREAD))[0].startswith("P8: ")


def test_a_step_breaks_what_its_decisions_and_its_world_break() -> None:
    wrong = decided(READ, LeaseLapsed(ver.lease_id(ver.G0)), UNREAD)
    world = overwritten(published())
    assert [words[:2] for words in violations(Step(("tick",), world, world, (wrong,)))] == ["P7", "P1"]


def test_a_rundown_that_never_ends_is_seen() -> None:
    world = published(Config())
    apart = world.trainers[0]._replace(separated=True, cut_off=True, readers_gone_by_ms=5_000)
    stuck = world._replace(trainers=(apart,))
    broken = Rundown().broken_in(stuck)
    assert broken[0].startswith("P4: a fence takes for ever after its release, the bound is ")
    kept = with_phase(published(Config()), Releasing({}, {}, 10_000, 10_000, 10_000))
    assert any(words.startswith("P5: a released version is kept for ") for words in Rundown().broken_in(kept))


def test_a_generator_that_has_crashed_hears_nothing() -> None:
    world = published(Config(unanswered=1, crashes=1))
    world = step(world, ("call", "acquire", 0, "carried out, answered late")).after
    world = step(world, ("crash-generator", 0)).after
    assert world.generators[0] == Generator(world.generators[0].worker_id, alive=False)
    assert step(world, ("deliver", 0)).after.generators == world.generators
    assert version.READY is world.store.version.state if world.store.version else False
