"""Each guard and each check is taken away, and something fails: an example always, a promise where told.

`python -m tests.statemachines.mutate` prints the whole table.
"""

from __future__ import annotations

import pytest

from statemachines import lease, version
from tests.statemachines.checking import MACHINES, first_wrong
from tests.statemachines.examples import Machine
from tests.statemachines.mutate import BEYOND_THE_WORLD, Mutant, Story, in_force, mutants, stories

ALL = [mutant for machine in MACHINES for mutant in mutants(machine, by_cell=False)]
STORIES = stories()
# What the promises rest on: the issue's own list, and what each of them must break.
RESTS_ON = {
    "version.completes always": "P3",
    "version.completes never": "P3",
    "version.leaves_a_gap always": "P3",
    "version.leaves_a_gap never": "P3",
    "version.publisher_may absent": "P5",
    "version.has_not_left absent": "P1",
    "version.nobody_reads absent": "P1",
    "version.lease_is_live absent": "P7",
    "version.drain_is_open absent": "P4",
    "version.holder_returns absent": "P7",
    "version.nobody_is_left always": "P7",
    "version.is_abandoned always": "P7",
    "version.retention_is_over never": "P5",
    "publication.is_announcing never": "P1",
    "publication.readers_are_forgotten never": "P1",
    "publication.bound_has_passed always": "P1",
    "publication.bound_has_passed never": "P4",
    "publication.is_wanted_back never": "P4",
    "installation.last_read_was_protected absent": "P2",
    "installation.every_source_was_live absent": "P2",
    "installation.has_another_source always": "P2",
    "installation.lease_is_live always": "P7",
    "installation.staging_is_free absent": "P2",
}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.table.name)
def test_no_mutant_of_any_cell_survives_the_examples(machine: Machine) -> None:
    survivors = [
        mutant.name
        for mutant in mutants(machine, by_cell=True)
        if first_wrong(machine, mutant.table()) is None
    ]
    assert survivors == []


@pytest.mark.parametrize("name", sorted(STORIES))
def test_a_promise_breaks_without_it(name: str) -> None:
    mutant = next(one for one in ALL if one.name == name)
    story = STORIES[name]
    with in_force(mutant):
        broken = story.tell()
    assert broken is not None, f"nothing notices any more that {name}: look for another story with --search"
    assert broken.startswith(story.breaks)
    assert story.tell() is None, "the machines as they are break a promise"


def test_what_the_promises_rest_on_has_its_story() -> None:
    assert {name: STORIES[name].breaks for name in RESTS_ON if name in STORIES} == RESTS_ON


def test_stories_are_of_mutants_that_exist() -> None:
    assert set(STORIES) <= {mutant.name for mutant in ALL}
    assert {mutant.function for mutant in ALL} >= BEYOND_THE_WORLD


def test_a_mutant_decides_only_while_it_is_in_force() -> None:
    before = lease.TABLE
    mutant = next(one for one in ALL if one.name == "lease.not_lapsed absent")
    with in_force(mutant):
        assert lease.TABLE is not before
    assert lease.TABLE is before


def test_a_story_that_can_not_go_on_tells_nothing() -> None:
    usual = Story("P1", next(iter(STORIES.values())).config, (("deliver", 0),))
    assert usual.tell() is None
    assert isinstance(ALL[0], Mutant)
    assert ALL[0].machine.module is version
