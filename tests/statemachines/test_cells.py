"""Every cell of every machine: followed or refused, and no row, guard or check that nothing uses."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest

from statemachines.kernel import IllegalTransition
from tests.statemachines.checking import MACHINES, first_wrong, noted, wrong
from tests.statemachines.examples import Example, Machine

MACHINE = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.table.name)


@MACHINE
def test_every_example_is_followed(machine: Machine) -> None:
    for example in (*machine.examples, *machine.plain()):
        before = deepcopy(example.record)
        assert wrong(machine.table, example) is None, example
        assert example.record == before, "a decision changed the record that it was given"
    assert first_wrong(machine, machine.table) is None


@MACHINE
def test_what_has_no_cell_is_refused(machine: Machine) -> None:
    for state, record in machine.records.items():
        assert record.state is state
        for kind, event in machine.events.items():
            if (state, kind) in machine.table.edges:
                continue
            before = deepcopy(record)
            with pytest.raises(IllegalTransition, match=f"{kind.__name__} is not possible then"):
                machine.table.decide(record, event, machine.moment)
            assert record == before


@MACHINE
def test_every_state_and_every_event_has_a_sample(machine: Machine) -> None:
    assert set(machine.records) == set(machine.table.states)
    assert {event for _, event in machine.table.edges} == set(machine.events)


@MACHINE
def test_examples_take_every_row_and_meet_every_check(machine: Machine) -> None:
    use: Counter[Any] = Counter()
    table = noted(machine.table, use)
    for example in (*machine.examples, *machine.plain()):
        wrong(table, example)
    rows = {(c.state, c.event, n) for c in table.cells for n in range(len(c.rows))}
    checks = {(c.state, c.event, check.__name__) for c in machine.table.cells for check in c.checks}
    assert not (rows | checks) - set(use)


def test_an_example_that_is_wrong_is_found() -> None:
    machine = MACHINES[2]
    held = machine.records[machine.table.initial]
    good = next(example for example in machine.examples if example.refused is not None)
    assert wrong(machine.table, Example(good.record, good.event, good.moment, machine.table.initial))
    assert wrong(machine.table, Example(held, machine.examples[0].event, 0, machine.examples[3].to))
