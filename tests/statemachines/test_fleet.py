"""The fleet machine against generators that fail, die, answer late or twice; F1 to F6 hold all the way."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from statemachines import fleet
from statemachines.fleet_invariants import broken_by, broken_in
from statemachines.fleet_records import (
    Abort,
    Admit,
    Answer,
    Begin,
    Commit,
    Committed,
    Effect,
    Event,
    Expel,
    FleetRecord,
    Forget,
    Generator,
    GeneratorId,
    Held,
    Install,
    InstallDone,
    InstallFailed,
    Part,
    Resume,
    Resumed,
    ResumeFailed,
    Stage,
    StageDone,
    StageFailed,
    Terms,
    TimePassed,
    Undo,
    UndoFailed,
    Undone,
)
from statemachines.ids import VersionId
from statemachines.kernel import Refused
from tests.statemachines.examples_of_fleet import COMMITTED, FLEET, NEW, OLD, RECORDS, RESTING, A, B

WALKS = int(os.environ.get("WALKS", "80"))
SPAN = st.integers(1, 5)


class Real:
    """What one generator really does and holds, whatever its orchestrator knows."""

    def __init__(self, version: VersionId | None) -> None:
        self.holds = Held(version)
        self.staged: VersionId | None = None
        self.serves = True

    def carry_out(self, call: Effect, *, half_way: bool) -> Answer:
        match call:
            case Stage(name, version):
                self.staged = version
                return StageDone(name, version)
            case Install(name, version):
                if self.staged != version and self.holds != Held(version):
                    return InstallFailed(name, version, "not staged", self.holds)
                self.serves, self.staged = False, None
                self.holds = Held(version, certain=not half_way)
                return (
                    InstallFailed(name, version, "half of it", self.holds)
                    if half_way
                    else InstallDone(name, version)
                )
            case Resume(name, version):
                self.serves = True
                return Resumed(name, version)
            case Undo(name, version, back_to):
                self.staged = None
                if self.holds == Held(version) or not self.holds.certain:
                    if half_way:  # it says what it holds, and that isn't it
                        return Undone(name, version, self.holds)
                    self.holds = Held(back_to)
                self.serves = True
                return Undone(name, version, self.holds)


class Walk(RuleBasedStateMachine):
    """Random updates of a fleet. Calls are carried out, lost, refused; answers come late, twice, never."""

    @initialize(size=st.integers(1, 4), version=st.sampled_from([None, VersionId("v0")]))
    def begin(self, size: int, version: VersionId | None) -> None:
        self.now_ms = 0
        self.made = 0
        self.record = FleetRecord(version)
        self.real = {GeneratorId(f"g{n}"): Real(version) for n in range(size)}
        self.calls: list[Effect] = []
        self.answers: list[Answer] = []
        self.ghosts: list[Effect] = []
        for name in self.real:
            self._feed(Admit(name, Held(version)))

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """What brings an update on is likely, what goes wrong is not: else no walk would get anywhere."""
        resting = self.record.state in RESTING
        moves = [self.wait, self.abort]
        moves += [self.update] * 8 + [self.change_membership] * 3 if resting else []
        moves += [self.carry_out] * 24 + [self.fail] * 2 if self.calls else []
        moves += [self.commit] * 8 if self.record.state is fleet.STAGED else []
        moves += [self.hear_late] * 2 if self.answers else []
        moves += [self.carry_out_what_was_given_up] if self.ghosts else []
        data.draw(st.sampled_from(moves), label="move")(data)

    def update(self, data: st.DataObject) -> None:
        terms = data.draw(st.builds(Terms, st.integers(1, 4), SPAN, SPAN, SPAN, SPAN, st.integers(0, 2)))
        quorum = data.draw(st.sampled_from([min(terms.quorum, len(self.record.members)), terms.quorum]))
        again = data.draw(st.integers(0, 9)) == 0 and self.record.current is not None
        self.made += not again
        version = self.record.current if again else VersionId(f"v{self.made}")
        assert version is not None
        self._try(Begin(version, replace(terms, quorum=quorum)))

    def carry_out(self, data: st.DataObject) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        half_way = data.draw(st.integers(0, 9)) == 0
        answer = self.real[call.name].carry_out(call, half_way=half_way)
        if data.draw(st.integers(0, 9)) > 0:
            self._feed(answer)
        else:
            self.answers.append(answer)

    def fail(self, data: st.DataObject) -> None:
        """A call is lost, or the generator refuses it, and it hears of nothing."""
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        failures: dict[type, Event] = {
            Stage: StageFailed(call.name, call.version_id, "x", gone=data.draw(st.booleans())),
            Install: InstallFailed(call.name, call.version_id, "x"),
            Resume: ResumeFailed(call.name, call.version_id, "x"),
            Undo: UndoFailed(call.name, call.version_id, "x"),
        }
        self._feed(failures[type(call)])

    def carry_out_what_was_given_up(self, data: st.DataObject) -> None:
        """An install whose caller has gone on may still happen, until the generator is told otherwise."""
        ghost = self.ghosts.pop(data.draw(st.integers(0, len(self.ghosts) - 1)))
        self.real[ghost.name].carry_out(ghost, half_way=False)

    def hear_late(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.answers) - 1))
        self._feed(self.answers[at] if data.draw(st.booleans()) else self.answers.pop(at))

    def commit(self, data: st.DataObject) -> None:
        self._try(Commit())

    def abort(self, data: st.DataObject) -> None:
        self._try(Abort("enough"))

    def wait(self, data: st.DataObject) -> None:
        self.now_ms += data.draw(st.integers(1, 4))
        self._feed(TimePassed())

    def change_membership(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.real)))
        real = self.real[name]
        kind = data.draw(st.sampled_from([Admit, Admit, Admit, Admit, Expel, Forget]))
        if kind is Admit:
            if name not in self.record.members and data.draw(st.booleans()):  # it is brought there first
                real.holds, real.staged, real.serves = Held(self.record.current), None, True
                self.calls = [call for call in self.calls if call.name != name]
            if real.serves or name in self.record.members:
                self._try(Admit(name, real.holds))
        else:
            self._try(Expel(name, "dead") if kind is Expel else Forget(name))

    @invariant()
    def one_version_is_served(self) -> None:
        """Whoever is in the fleet and serves, serves the fleet's version; nobody in it serves a mixture."""
        if not hasattr(self, "record"):
            return
        assert broken_in(self.record) == ()
        for name in self.record.members:
            if self.real[name].serves:
                assert self.real[name].holds == Held(self.record.current), (name, self.record)

    def _try(self, event: Event) -> None:
        before = self.record
        try:
            self._feed(event)
        except Refused:
            assert self.record is before

    def _feed(self, event: Event) -> None:
        decision = fleet.decide(self.record, event, self.now_ms)
        assert broken_by(self.record, event, decision.record, decision.effects) == ()
        self.record = decision.record
        # As the driver does: one call at a time to each, and none that nobody waits for.
        waited_for = set(fleet.pending(self.record))
        self.ghosts += [call for call in self.calls if isinstance(call, Install) and call not in waited_for]
        self.calls = [call for call in (*self.calls, *decision.effects) if call in waited_for]


def test_walks() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Walk,
        settings=settings(
            max_examples=WALKS,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize="WALKS" not in os.environ,
        ),
    )


def test_the_samples_are_sound() -> None:
    for record in RECORDS.values():
        assert broken_in(record) == ()
    for event in FLEET.events.values():
        for record in RECORDS.values():
            if (record.state, type(event)) in fleet.TABLE.edges:
                try:
                    decision = fleet.decide(record, event, FLEET.moment)
                except Refused:
                    continue
                assert broken_by(record, event, decision.record, decision.effects) == ()
                assert broken_in(decision.record) == ()


def test_what_is_broken_is_seen() -> None:
    resting = RESTING[COMMITTED]

    def with_part(part: Part, holds: Held) -> FleetRecord:
        return replace(resting, generators={**resting.generators, A: Generator(part, holds)})

    assert broken_in(with_part(Part.SERVING, Held(OLD))) == ("F1: a is SERVING without new",)
    assert broken_in(with_part(Part.HELD, Held(NEW))) == ("F3: a is HELD in COMMITTED",)
    [words] = broken_in(with_part(Part.UNDOING, Held(NEW)))[1:]
    assert words.startswith("F4: COMMITTED waits for")
    other = replace(resting, current=OLD)
    assert "F2: new became old in COMMITTED" in broken_by(resting, Abort("x"), other, ())
    given_up = replace(RESTING[fleet.ABORTED], current=VersionId("x"))
    assert "F3" in " ".join(broken_by(RESTING[fleet.ABORTED], Abort("x"), given_up, ()))
    back = replace(resting, generators={name: Generator(Part.SERVING, Held(NEW)) for name in (A, B, "c")})  # type: ignore[dict-item]
    assert broken_by(resting, TimePassed(), back, ()) == ("F5: c came back by TimePassed",)
    lost = fleet.decide(RECORDS[fleet.STAGED], Abort("x"), 0).record
    unsure = {**lost.generators, A: replace(lost.generators[A], holds=Held(OLD, certain=False))}
    words = " ".join(broken_by(RECORDS[fleet.STAGED], Abort("x"), replace(lost, generators=unsure), ()))
    assert "F6: a was never told to install" in words
    assert "F4: somebody waits for a call that was not asked for" in words
    assert "F4: {Stage" in broken_by(resting, Abort("x"), resting, (Stage(A, NEW),))[0]


def test_a_fleet_that_never_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statemachines.fleet_invariants._MOST_PHASES", 1)
    assert broken_in(RECORDS[fleet.STAGING]) == ("F4: time alone doesn't end STAGING",)


def test_what_is_pending_is_what_was_asked_for() -> None:
    asked = fleet.decide(RESTING[COMMITTED], Begin(VersionId("v9"), Terms(2, 1, 1, 1, 1, 1)), 0)
    assert fleet.pending(asked.record) == asked.effects
    assert fleet.pending(FleetRecord(OLD)) == ()


def test_the_last_to_be_told_have_a_deadline() -> None:
    assert RESTING[COMMITTED].deadline_ms is None
    assert isinstance(RESTING[COMMITTED].phase, Committed)
