"""The tables as pages: a diagram and every cell of each machine, drawn from the object that decides.

`python -m statemachines.render` writes `docs/machines/`; a test fails while they are stale.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from statemachines import fleet, generation, installation, lease, local_store, publication, version, worker
from statemachines.kernel import Cell, Row, Table, always, keep

MACHINES: tuple[ModuleType, ...] = (
    version,
    worker,
    lease,
    publication,
    generation,
    installation,
    fleet,
    local_store,
)
DIRECTORY = Path(__file__).parent.parent / "docs" / "machines"


def diagram(table: Table[Any, Any]) -> str:
    """The machine as a Mermaid state diagram.

    One arrow for each pair of states, labelled with the events; `[guard]` says when an edge of several
    is taken. Edges that lead back to their own state and change nothing are left out.
    """
    labels: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for cell in table.cells:
        for row in cell.rows:
            if not (row.target is cell.state and row.do is keep):
                labels.setdefault((cell.state, row.target), []).append(_label(cell, row))
    order = list(table.states)
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial.value}"]
    for source, target in sorted(labels, key=lambda pair: (order.index(pair[0]), order.index(pair[1]))):
        events = "<br/>".join(sorted(set(labels[source, target])))
        lines.append(f"    {source.value} --> {target.value}: {events}")
    ends = [state for state in table.states if not any(s is state and t is not s for s, t in labels)]
    lines += [f"    {state.value} --> [*]" for state in ends]
    return "\n".join(lines)


def cells_table(table: Table[Any, Any]) -> str:
    """Every cell as a row of a Markdown table: what may refuse the event, and where it leads when."""
    lines = ["| in | event | refused by | leads to |", "|---|---|---|---|"]
    order = list(table.states)
    for cell in sorted(table.cells, key=lambda cell: (order.index(cell.state), cell.event.__name__)):
        checks = ", ".join(check.__name__ for check in cell.checks)
        leads = ", else ".join(_leads(row) for row in cell.rows)
        lines.append(f"| {cell.state.value} | {cell.event.__name__} | {checks} | {leads} |")
    return "\n".join(lines)


def page(machine: ModuleType) -> str:
    """The page of one machine: its docstring, its diagram, its cells, and what guards and checks say."""
    table: Table[Any, Any] = machine.TABLE
    return "\n".join(
        (
            f"# The {table.name} machine",
            "",
            "<!-- Written by `python -m statemachines.render` from the table itself. -->",
            "",
            "```text",
            inspect.cleandoc(machine.__doc__ or ""),
            "```",
            "",
            "```mermaid",
            diagram(table),
            "```",
            "",
            "An event that has no row here in a state is refused there, and changes nothing.",
            "",
            cells_table(table),
            "",
            *_words(table.cells),
            "",
        )
    )


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {f"{machine.TABLE.name}.md": page(machine) for machine in MACHINES}


def stale(directory: Path = DIRECTORY) -> list[str]:
    """The file names whose pages in `directory` are missing or not what would be written now."""
    return [
        name
        for name, text in pages().items()
        if not (file := directory / name).is_file() or file.read_text(encoding="utf-8") != text
    ]


def write(directory: Path = DIRECTORY) -> list[str]:
    """Write the pages that are stale, and say which those were."""
    changed = stale(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name in changed:
        (directory / name).write_text(pages()[name], encoding="utf-8")
    return changed


def main(arguments: Sequence[str]) -> None:
    """Write the pages to the directory that is named, or to `docs/machines`."""
    directory = Path(arguments[0]) if arguments else DIRECTORY
    for name in write(directory):
        print(f"wrote {directory / name}")


def _label(cell: Cell, row: Row) -> str:
    guard = "" if row.when is always else f" [{row.when.__name__}]"
    return f"{cell.event.__name__}{guard}"


def _leads(row: Row) -> str:
    nothing = " (nothing changes)" if row.do is keep else ""
    when = f" if {row.when.__name__}" if row.when is not always else ""
    return f"{row.target.value}{nothing}{when}"


def _words(table: Iterable[Cell]) -> list[str]:
    """What each guard and each check says of itself, once."""
    said: dict[str, str] = {}
    for cell in table:
        for function in (*cell.checks, *(row.when for row in cell.rows if row.when is not always)):
            said[function.__name__] = (function.__doc__ or "").strip().splitlines()[0]
    return [f"* `{name}`: {words}" for name, words in sorted(said.items())]


if __name__ == "__main__":
    main(sys.argv[1:])
