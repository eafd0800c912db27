"""How every machine here decides: a table of cells, compiled and validated with `transitions`.

    decide(record, event, moment) -> Decision(next record, effects)

A `Cell` says what one event does in one state: first its checks run, any of which may refuse the
command with words; then its rows are tried in order, and the first whose guard holds names the next
state and builds the next record and the effects. A decision never does I/O. Illegal input raises and
leaves the record as it was, because records are immutable.

`transitions` compiles the cells, so that an unknown state or a row that nothing can take is an error
at import, and the diagrams are drawn from the same object that decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from transitions import Machine

# `transitions` logs every callback at INFO: a dozen lines a decision would drown a caller's own log.
logging.getLogger("transitions.core").setLevel(logging.WARNING)

R = TypeVar("R")
M = TypeVar("M")


class Reason(Enum):
    """Why a command is refused; a server maps it to a status code of its wire."""

    INVALID = "invalid argument"
    NOT_FOUND = "not found"
    EXISTS = "already exists"
    PRECONDITION = "failed precondition"


class Refused(Exception):
    """A command that must not be carried out; the record is unchanged."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class IllegalTransition(Refused):
    """The table has no cell for this event in this state, or no row of the cell applies."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PRECONDITION, message)


class TableError(Exception):
    """A table contradicts itself: a fault of the programmer, found at import or at once."""


Guard = Callable[[Any, Any, Any], bool]
Check = Callable[[Any, Any, Any], None]
Action = Callable[[Any, Any, Any], tuple[Any, tuple[Any, ...]]]


def always(record: Any, event: Any, moment: Any) -> bool:
    """The guard of a row that is taken when none above it was."""
    return True


def keep(record: Any, event: Any, moment: Any) -> tuple[Any, tuple[Any, ...]]:
    """The action of an edge that is legal and changes nothing: a repeat, or a late message."""
    return record, ()


@dataclass(frozen=True, slots=True)
class Row:
    """One edge: the state it leads to, when it is taken, and what it does."""

    target: StrEnum
    do: Action = keep
    when: Guard = always


@dataclass(frozen=True, slots=True)
class Cell:
    """What `event` does in `state`: checks that may refuse it, then rows of which the first applies."""

    state: StrEnum
    event: type
    rows: tuple[Row, ...]
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """The record after an event, and the effects to perform once it is committed."""

    record: R
    effects: tuple[Any, ...]


def cells(
    states: Sequence[StrEnum], event: type, *rows: Row, checks: tuple[Check, ...] = ()
) -> tuple[Cell, ...]:
    """The same cell in several states."""
    return tuple(Cell(state, event, rows, checks) for state in states)


def stay(states: Sequence[StrEnum], event: type, do: Action = keep) -> tuple[Cell, ...]:
    """Cells whose event leaves each of `states` as it is."""
    return tuple(Cell(state, event, (Row(state, do),)) for state in states)


class _Cursor:
    """The throw-away model of one decision; `transitions` moves its `state`."""

    __slots__ = ("effects", "event", "moment", "record", "state")

    def __init__(self, state: str, record: Any, event: Any, moment: Any) -> None:
        self.state = state
        self.record = record
        self.event = event
        self.moment = moment
        self.effects: tuple[Any, ...] = ()


class Table(Generic[R, M]):
    """A machine: its states and cells, compiled.

    `state_of` reads the state of a record, `name_of` the words that errors use for it. `edges` maps
    (state, event type) to the states that it may lead to.

    Raises:
        TableError: a cell is given twice or has no row, a row follows one that is always taken, a
            state can't be reached from `initial`, or a state is not one of `states`.
    """

    def __init__(
        self,
        name: str,
        states: type[StrEnum],
        initial: StrEnum,
        table: Sequence[Cell],
        *,
        state_of: Callable[[R], StrEnum],
        name_of: Callable[[R], str],
    ) -> None:
        self.name = name
        self.states = states
        self.initial = initial
        self.cells = tuple(table)
        self._state_of = state_of
        self._name_of = name_of
        self.edges: Mapping[tuple[StrEnum, type], frozenset[StrEnum]] = MappingProxyType(self._validate())
        self.machine = self._compile()

    def decide(self, record: R, event: object, moment: M) -> Decision[R]:
        """Decide what `event` does to `record` at `moment`; the record itself is never changed.

        Raises:
            IllegalTransition: the event is not possible in the record's state.
            Refused: a check refuses it; the reason and the message say why.
        """
        state = self._state_of(record)
        if (state, type(event)) not in self.edges:
            possible = sorted(e.__name__ for s, e in self.edges if s is state)
            raise IllegalTransition(
                f"{self._name_of(record)} is {state.value}: {type(event).__name__} is not possible then, "
                f"only {', '.join(possible) or 'nothing'}"
            )
        cursor = _Cursor(state.value, record, event, moment)
        if not self.machine.events[type(event).__name__].trigger(cursor):
            raise IllegalTransition(
                f"{self._name_of(record)} is {state.value}: no guard allows {type(event).__name__} now"
            )
        reached = self._state_of(cursor.record)
        if reached.value != cursor.state:
            raise TableError(
                f"{self.name}: the action of a row to {cursor.state} made a {reached.value} record"
            )
        return Decision(cursor.record, cursor.effects)

    def _validate(self) -> dict[tuple[StrEnum, type], frozenset[StrEnum]]:
        edges: dict[tuple[StrEnum, type], frozenset[StrEnum]] = {}
        for cell in self.cells:
            at = f"{self.name}: {cell.state.value} x {cell.event.__name__}"
            if (cell.state, cell.event) in edges:
                raise TableError(f"{at} is given twice")
            if not cell.rows:
                raise TableError(f"{at} has no row")
            if any(row.when is always for row in cell.rows[:-1]):
                raise TableError(f"{at} has a row after one that is always taken")
            edges[cell.state, cell.event] = frozenset(row.target for row in cell.rows)
        reached, fresh = {self.initial}, {self.initial}
        while fresh:
            fresh = {t for (s, _), targets in edges.items() if s in fresh for t in targets} - reached
            reached |= fresh
        if unreachable := sorted(set(self.states) - reached):
            raise TableError(f"{self.name}: nothing leads to {', '.join(unreachable)}")
        if unknown := ({s for s, _ in edges} | reached) - set(self.states):
            raise TableError(f"{self.name}: {', '.join(sorted(unknown))} are not states of it")
        return edges

    def _compile(self) -> Any:
        machine: Any = Machine(
            model=None,
            states=[state.value for state in self.states],
            initial=self.initial.value,
            auto_transitions=False,
            send_event=True,
        )
        for cell in self.cells:
            for first, row in zip((True, *(False,) * len(cell.rows)), cell.rows, strict=False):
                machine.add_transition(
                    cell.event.__name__,
                    cell.state.value,
                    row.target.value,
                    prepare=[_run_checks(cell.checks)] if first and cell.checks else None,
                    conditions=[_holds(row.when)],
                    before=[_act(row.do)],
                )
        return machine


def _run_checks(checks: tuple[Check, ...]) -> Callable[[Any], None]:
    def run(data: Any) -> None:
        cursor: _Cursor = data.model
        for check in checks:
            check(cursor.record, cursor.event, cursor.moment)

    return run


def _holds(guard: Guard) -> Callable[[Any], bool]:
    def holds(data: Any) -> bool:
        cursor: _Cursor = data.model
        return guard(cursor.record, cursor.event, cursor.moment)

    return holds


def _act(action: Action) -> Callable[[Any], None]:
    def act(data: Any) -> None:
        cursor: _Cursor = data.model
        cursor.record, cursor.effects = action(cursor.record, cursor.event, cursor.moment)

    return act
