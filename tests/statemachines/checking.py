"""Running examples against a table, with a note of every row, guard and check that they use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from statemachines.kernel import Cell, Refused, Row, Table
from tests.statemachines.examples import Example, Machine
from tests.statemachines.examples_of_fleet import FLEET
from tests.statemachines.examples_of_generation import GENERATION
from tests.statemachines.examples_of_installation import INSTALLATION
from tests.statemachines.examples_of_local_store import LOCAL_STORE
from tests.statemachines.examples_of_publication import PUBLICATION
from tests.statemachines.examples_of_version import VERSION
from tests.statemachines.examples_of_workers import LEASE, WORKER

MACHINES: tuple[Machine, ...] = (
    VERSION,
    WORKER,
    LEASE,
    PUBLICATION,
    GENERATION,
    INSTALLATION,
    FLEET,
    LOCAL_STORE,
)


def rebuilt(table: Table[Any, Any], cells: Iterable[Cell]) -> Table[Any, Any]:
    """The same machine with other cells."""
    return Table(
        table.name,
        table.states,
        table.initial,
        tuple(cells),
        state_of=table._state_of,
        name_of=table._name_of,
    )


def noted(table: Table[Any, Any], use: Counter[Any]) -> Table[Any, Any]:
    """The same machine, which counts in `use` each row that is taken and each check that refuses."""

    def row(cell: Cell, n: int, one: Row) -> Row:
        def do(record: Any, event: Any, moment: Any) -> Any:
            use[cell.state, cell.event, n] += 1
            return one.do(record, event, moment)

        return Row(one.target, do, one.when)

    def check(cell: Cell, one: Callable[..., None]) -> Callable[..., None]:
        def run(record: Any, event: Any, moment: Any) -> None:
            try:
                one(record, event, moment)
            except Refused:
                use[cell.state, cell.event, one.__name__] += 1
                raise

        return run

    return rebuilt(
        table,
        (
            Cell(
                cell.state,
                cell.event,
                tuple(row(cell, n, one) for n, one in enumerate(cell.rows)),
                tuple(check(cell, one) for one in cell.checks),
            )
            for cell in table.cells
        ),
    )


def wrong(table: Table[Any, Any], example: Example) -> str | None:
    """What is wrong with the machine by this example; None where it does what the example says."""
    try:
        decision = table.decide(example.record, example.event, example.moment)
    except Refused as refusal:
        if example.refused is None:
            return f"refused: {refusal}"
        if (refusal.reason, example.words in refusal.message) != (example.refused, True):
            return f"refused for {refusal.reason.name}: {refusal}"
        return None
    if example.refused is not None:
        return f"not refused for {example.refused.name}: {example.words}"
    if decision.record.state is not example.to:
        return f"leads to {decision.record.state}, not to {example.to}"
    if example.changes is not None and (decision.record != example.record) is not example.changes:
        return f"{'changes nothing' if example.changes else 'changes the record'}: {decision.record}"
    effects = tuple(type(effect) for effect in decision.effects)
    if example.effects is not None and effects != example.effects:
        return f"asks for {effects}, not for {example.effects}"
    return None


def first_wrong(machine: Machine, table: Table[Any, Any]) -> str | None:
    """The first example of a machine that a table doesn't follow, in words."""
    for example in (*machine.examples, *machine.plain()):
        try:
            words = wrong(table, example)
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            words = f"{type(error).__name__}: {error}"
        if words is not None:
            return f"{type(example.event).__name__} in {example.record.state.value}: {words}"
    return None
