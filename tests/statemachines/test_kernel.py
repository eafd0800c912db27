"""The kernel: what a table may not be, and what a decision may not do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import pytest

from statemachines.kernel import Cell, IllegalTransition, Reason, Refused, Row, Table, TableError, cells, stay


class Light(StrEnum):
    RED = "RED"
    GREEN = "GREEN"


class Foreign(StrEnum):
    BLUE = "BLUE"


@dataclass(frozen=True)
class Lamp:
    state: Light = Light.RED


@dataclass(frozen=True)
class Switch:
    allowed: bool = True


class Other: ...


def turn(record: Lamp, event: Switch, moment: int) -> tuple[Lamp, tuple[str, ...]]:
    return replace(record, state=Light.GREEN if record.state is Light.RED else Light.RED), ("clicked",)


def allowed(record: Lamp, event: Switch, moment: int) -> bool:
    return event.allowed


def before_ten(record: Lamp, event: Switch, moment: int) -> None:
    if moment >= 10:
        raise Refused(Reason.PRECONDITION, "it is late")


BOTH = cells((Light.GREEN,), Switch, Row(Light.RED, turn))


def table(*more: Cell) -> Table[Lamp, int]:
    return Table(
        "lamp", Light, Light.RED, more, state_of=lambda lamp: lamp.state, name_of=lambda lamp: "the lamp"
    )


GUARDED = table(Cell(Light.RED, Switch, (Row(Light.GREEN, turn, allowed),), (before_ten,)), *BOTH)


def test_a_decision_is_the_next_record_and_the_effects() -> None:
    decision = GUARDED.decide(Lamp(), Switch(), 0)
    assert (decision.record, decision.effects) == (Lamp(Light.GREEN), ("clicked",))
    assert GUARDED.edges[Light.RED, Switch] == {Light.GREEN}


def test_a_check_refuses_before_any_guard_is_asked() -> None:
    with pytest.raises(Refused, match="it is late") as caught:
        GUARDED.decide(Lamp(), Switch(allowed=False), 10)
    assert caught.value.reason is Reason.PRECONDITION


def test_where_no_guard_holds_the_event_is_illegal() -> None:
    with pytest.raises(IllegalTransition, match="the lamp is RED: no guard allows Switch now"):
        GUARDED.decide(Lamp(), Switch(allowed=False), 0)


def test_where_there_is_no_cell_the_event_is_illegal() -> None:
    with pytest.raises(IllegalTransition, match="the lamp is RED: Other is not possible then, only Switch"):
        GUARDED.decide(Lamp(), Other(), 0)
    dead_end = table(Cell(Light.RED, Switch, (Row(Light.GREEN, turn),)))
    with pytest.raises(IllegalTransition, match="only nothing"):
        dead_end.decide(Lamp(Light.GREEN), Switch(), 0)


def test_an_action_must_make_a_record_of_the_state_that_its_row_names() -> None:
    lying = table(Cell(Light.RED, Switch, (Row(Light.GREEN),)))
    with pytest.raises(TableError, match="a row to GREEN made a RED record"):
        lying.decide(Lamp(), Switch(), 0)


def test_staying_keeps_the_record() -> None:
    lazy = table(*stay((Light.RED,), Other), Cell(Light.RED, Switch, (Row(Light.GREEN, turn),)))
    lamp = Lamp()
    assert lazy.decide(lamp, Other(), 0).record is lamp


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((*BOTH, *BOTH), "GREEN x Switch is given twice"),
        ((Cell(Light.RED, Switch, ()),), "RED x Switch has no row"),
        (
            (Cell(Light.RED, Switch, (Row(Light.GREEN, turn), Row(Light.RED))),),
            "RED x Switch has a row after one that is always taken",
        ),
        ((*stay((Light.RED,), Switch),), "nothing leads to GREEN"),
        ((*GUARDED.cells, Cell(Light.RED, Other, (Row(Foreign.BLUE),))), "BLUE are not states of it"),
        ((*GUARDED.cells, *stay((Foreign.BLUE,), Other)), "BLUE are not states of it"),
    ],
)
def test_a_table_that_contradicts_itself_is_not_made(wrong: tuple[Any, ...], words: str) -> None:
    with pytest.raises(TableError, match=words):
        table(*wrong)
