"""`python -m tests.bench NAME [--json]`: measure something, side by side in one run.

Each benchmark is a module of this package with `add_arguments(parser)` and `run(arguments) -> Result`.
Benchmarks print figures and ratios; they never pass or fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.result import Result

NAMES = ("refit", "control", "transfer", "plan", "overlap", "vllm", "delta")


def main() -> None:
    """Run one benchmark and print its figures, as a table or as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in NAMES:
        module = importlib.import_module(f"tests.bench.{name}")
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0])
        command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args()
    result: Result = arguments.run(arguments)
    if arguments.json:
        print(json.dumps(result.figures))
    else:
        _print(result)


def _print(result: Result) -> None:
    if "cases" in result.figures:
        _print_cases(result, result.figures["cases"])
        return
    table = Table(title=result.title, title_justify="left", caption=result.conditions, caption_justify="left")
    for column in ("figure", "value", "goal"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for name, value in result.figures.items():
        by_kind = value if isinstance(value, dict) else {"": value}
        for kind, figure in by_kind.items():
            table.add_row(f"{name} {kind}".strip(), f"{figure:.3f}", result.goals.get(name, ""))
    Console().print(table)


def _number(figure: float) -> str:
    return f"{figure:,.3f}" if abs(figure) < 1000 else f"{figure:,.0f}"


def _print_cases(result: Result, cases: Any) -> None:
    """A column for each case; a figure that a case doesn't have is left out."""
    table = Table(title=result.title, title_justify="left", caption=result.conditions, caption_justify="left")
    table.add_column("figure")
    for name in cases:
        table.add_column(name, justify="right")
    table.add_column("goal")
    for figure in dict.fromkeys(figure for case in cases.values() for figure in case):
        values = (_number(case[figure]) if figure in case else "" for case in cases.values())
        table.add_row(figure, *values, result.goals.get(figure, ""))
    Console().print(table)


if __name__ == "__main__":
    main()
