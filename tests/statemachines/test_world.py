"""The joint machine, explored: P1 to P8 hold in every state that these small worlds can reach.

Each world has one or two things that may go wrong. The usual run looks at the states that are nearest to
the beginning; with EXPLORE=all each exploration goes on until nothing new can happen in that world.
"""

from __future__ import annotations

import os

import pytest

from statemachines import invariants
from statemachines.rundown import Rundown
from statemachines.world import Config, moves, start, step
from statemachines.world_key import key
from tests.statemachines.explorer import explore

ALL = os.environ.get("EXPLORE") == "all"
# The number of states of the usual run; None where that is all of them.
WORLDS: dict[str, tuple[Config, int | None]] = {
    "nothing goes wrong": (Config(), None),
    "timers and commands that stray": (Config(stray=True), 3_000),
    "a read fails": (Config(failed_reads=1), 5_000),
    "a process crashes, and comes back under its name": (Config(crashes=1, restarts=1), 5_000),
    "the trainer is cut off": (Config(cuts=1), 6_000),
    "an answer is missing, or late": (Config(unanswered=1), 8_000),
    "the store is emptied": (Config(flushes=1, creations=1), 8_000),
    "two slots": (Config(slots=("a", "b"), published=True), 2_000),
    "a replica, and a read that fails": (Config(slots=("a", "a"), failed_reads=1, published=True), 4_000),
    "a replica, and one trainer is cut off": (Config(slots=("a", "a"), cuts=1, published=True), 4_000),
    "two generators": (Config(generators=2, published=True), 2_000),
}


@pytest.mark.parametrize(("config", "states"), WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.timeout(7200 if ALL else 180)
def test_every_promise_holds_in_every_state(config: Config, states: int | None) -> None:
    limit = 10**9 if ALL or states is None else states
    found = explore(config, max_states=limit, rundown=Rundown())
    assert not found.broken, (found.broken, found.path)
    assert found.complete or found.states >= limit


def test_worlds_that_differ_in_what_can_no_longer_matter_have_one_key() -> None:
    world = start(Config())
    waited = step(world, ("tick",)).after
    assert (key(waited), waited.now_ms) == (key(world), 1)
    assert key(step(world, ("trainer", 0, "capture")).after) != key(world)


def test_worlds_do_not_mix_in_what_is_remembered() -> None:
    few, more = (start(Config(slots=slots, published=True)) for slots in (("a", "a"), ("a", "b")))
    for world in (few, more, few):
        assert world.store.version is not None
        assert world.store.version.spec == world.config.spec


def test_the_same_moves_are_found_in_the_same_order() -> None:
    world = start(Config(stray=True, cuts=1, crashes=1, unanswered=1, flushes=1))
    assert moves(world) == moves(world)
    assert len(set(moves(world))) == len(moves(world))


def test_the_world_has_no_other_moves() -> None:
    with pytest.raises(ValueError, match="the world has no move"):
        step(start(Config()), ("fly",))


def test_every_promise_has_its_invariant() -> None:
    assert sorted({*invariants.OF_WORLDS, *invariants.OF_DECISIONS}) == [f"P{n}" for n in range(1, 9)]
    for check in (*invariants.OF_WORLDS.values(), *invariants.OF_DECISIONS.values()):
        assert check.__doc__
