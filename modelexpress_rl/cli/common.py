"""What the commands that ask a control plane share: options, output, and how they end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console

from modelexpress_rl.errors import UsageError
from modelexpress_rl.version import VersionState, VersionStatus, WorkerStatus

# Where stdout is no terminal nobody sees a line break coming, and a script wants whole ids.
PIPE_WIDTH = 400


def add_server(parser: argparse.ArgumentParser, *, timeout_s: float = 10.0) -> None:
    """Add `--server` and `--timeout`."""
    parser.add_argument(
        "--server",
        metavar="HOST:PORT[,HOST:PORT]",
        help="the control plane, or several replicas of it (MODEL_EXPRESS_URL, MX_SERVER_ADDRESS)",
    )
    parser.add_argument(
        "--timeout", type=float, default=timeout_s, metavar="SECONDS", help="for each answer (%(default)s)"
    )


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help=f"print {what}")


def timeout_s(options: argparse.Namespace) -> float:
    """`--timeout`, checked.

    Raises:
        UsageError: it is not positive.
    """
    value: float = options.timeout
    if not 0 < value < 86_400:
        raise UsageError(f"--timeout must be more than 0 and less than a day of seconds, not {value:g}")
    return value


def console() -> Console:
    """Where to print: as wide as the terminal, and without breaking lines for a pipe."""
    plain = _console()
    return plain if plain.is_terminal else _console(width=PIPE_WIDTH)


def _console(width: int | None = None) -> Console:
    """Without rich's own marks: an id may hold `[/b]` or `:smile:`, and is shown as it is."""
    return _Console(highlight=False, markup=False, emoji=False, width=width)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`: rich itself would end the process as if it had failed."""
        raise BrokenPipeError


def states_in(names: Iterable[str]) -> list[VersionState]:
    """States by their names.

    Raises:
        UsageError: one is none.
    """
    states = []
    for name in names:
        try:
            states.append(VersionState(name.upper()))
        except ValueError:
            raise UsageError(f"{name!r} is no state; there are {', '.join(VersionState)}") from None
    return states


def version_json(status: VersionStatus) -> dict[str, Any]:
    """A version for `--json`: the fields of `VersionStatus`, None where the server doesn't tell."""
    return asdict(status)


def worker_json(worker: WorkerStatus) -> dict[str, Any]:
    """A worker for `--json`: the fields of `WorkerStatus`."""
    return asdict(worker)


def dump(body: object) -> str:
    """One line of JSON."""
    return json.dumps(body, ensure_ascii=False)
