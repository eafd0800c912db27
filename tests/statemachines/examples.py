"""One example and more of everything that each machine may do, and of everything that it refuses.

An example says where an event leads from a record, and whether it changes anything; or in which words
it is refused. `test_cells.py` runs them and checks that they take every row and meet every check;
`mutate.py` runs them against machines from which a guard or a check has been taken away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from statemachines.kernel import Reason, Table


@dataclass(frozen=True)
class Example:
    """`event` on `record` at `moment` leads to `to`; `changes`: whether the record becomes another.

    Where `refused` is given it is refused for that reason, with words that contain `words`.
    """

    record: Any
    event: Any
    moment: Any
    to: StrEnum | None = None
    changes: bool | None = None
    refused: Reason | None = None
    words: str = ""
    effects: tuple[type, ...] | None = None


@dataclass(frozen=True)
class Machine:
    """A machine under test: a record for each of its states, an event of each type, its examples."""

    table: Table[Any, Any]
    module: Any
    records: Mapping[StrEnum, Any]
    events: Mapping[type, Any]
    moment: Any
    examples: tuple[Example, ...]
    legal: Mapping[StrEnum, frozenset[type]] = field(default_factory=dict)

    def plain(self) -> Iterator[Example]:
        """The examples that need no saying: each event of each cell, on the record of its state."""
        for cell in self.table.cells:
            targets = {row.target for row in cell.rows}
            if len(targets) == 1 and not cell.checks:
                yield Example(self.records[cell.state], self.events[cell.event], self.moment, *targets)


def refused(record: Any, event: Any, moment: Any, reason: Reason, words: str) -> Example:
    """An example of a refusal."""
    return Example(record, event, moment, refused=reason, words=words)
