"""Long random walks through worlds in which everything may go wrong at once; P1 to P8 hold all the way."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from statemachines.invariants import violations
from statemachines.rundown import Rundown
from statemachines.world import Config, moves, start, step

WALKS = int(os.environ.get("WALKS", "60"))
CONFIGS = st.builds(
    Config,
    slots=st.sampled_from([("a",), ("a", "a"), ("a", "b"), ("a", "a", "b")]),
    generators=st.integers(1, 2),
    registration_ttl_ms=st.integers(2, 4),
    lease_ttl_ms=st.integers(2, 4),
    margin_ms=st.integers(0, 1),
    drain_ms=st.integers(0, 3),
    retention_ms=st.just(5),
    unanswered=st.integers(0, 4),
    cuts=st.integers(0, 3),
    crashes=st.integers(0, 1),
    restarts=st.integers(0, 1),
    flushes=st.integers(0, 2),
    failed_reads=st.integers(0, 2),
    creations=st.integers(0, 2),
    stray=st.booleans(),
)


class Walk(RuleBasedStateMachine):
    """One way through one world. Hypothesis chooses the world and each move, and shortens what fails."""

    @initialize(config=CONFIGS)
    def begin(self, config: Config) -> None:
        self.world = start(config)
        for i in range(len(config.slots)):  # what every walk would do first
            for move in (("call", "register", i, "ok"), ("trainer", i, "capture"), ("trainer", i, "publish")):
                self.world = step(self.world, move).after

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self._take(data.draw(st.sampled_from(moves(self.world)), label="move"))

    @rule()
    def wait(self) -> None:
        if ("tick",) in moves(self.world):
            self._take(("tick",))

    def _take(self, move: tuple[str | int, ...]) -> None:
        taken = step(self.world, move)
        assert not violations(taken)
        self.world = taken.after

    def teardown(self) -> None:
        if hasattr(self, "world"):
            assert not Rundown().broken_in(self.world)


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
