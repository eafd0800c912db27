"""`mx-rl`: a table of subcommands, each imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from modelexpress_rl.errors import ModelExpressError, Unavailable, UsageError
from modelexpress_rl.printable import printable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_ASKING = ("versions", "watch", "workers", "top", "evict")
_PRINTING = (*_ASKING, "explain")


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A line of `mx-rl --help`, and the module that does it: `configure(parser)` and `run(options)`."""

    name: str
    module: str
    help: str


SUBCOMMANDS = (
    Subcommand("serve", "modelexpress_rl.cli.serve", "run the control plane"),
    Subcommand("versions", "modelexpress_rl.cli.versions", "list versions and how they stand"),
    Subcommand("watch", "modelexpress_rl.cli.watch", "a line for each change of versions"),
    Subcommand("workers", "modelexpress_rl.cli.workers", "list trainers and generators, and who serves what"),
    Subcommand("top", "modelexpress_rl.cli.top", "a live view of versions, leases and the fleet"),
    Subcommand("doctor", "modelexpress_rl.cli.doctor", "look for what is wrong, and say what to do"),
    Subcommand("bench", "modelexpress_rl.cli.bench", "measure what reads cost here, for planning"),
    Subcommand("explain", "modelexpress_rl.cli.explain", "who reads what from whom: a table, or a picture"),
    Subcommand(
        "evict", "modelexpress_rl.cli.evict", "end a version now: no lease is granted or renewed any more"
    ),
    Subcommand(
        "demo",
        "modelexpress_rl.cli.demo.command",
        "a trainer refits generators, step after step, and the bytes are proven",
    ),
)


class _Module(Protocol):
    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names; answers the exit status.

    0: done; 1: it failed; 2: it was called wrongly (an option, a port that is taken, a bad store); 130:
    interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="mx-rl", description="Moves weight versions from trainers to generators."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for command in SUBCOMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name == chosen:
            module = cast(_Module, importlib.import_module(command.module))
            module.configure(subparser)
            subparser.set_defaults(run=module.run, words=words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an id that the terminal can't show ends no command
            stream.reconfigure(errors="backslashreplace")
    options = parser.parse_args(words)
    try:
        status = cast(int, options.run(options))
        sys.stdout.flush()  # here, where a reader that has gone away is no fault
    except BaseException as error:  # noqa: BLE001 - what is not ours is raised again
        return _ended(str(options.command), error)
    return status


def _ended(command: str, error: BaseException) -> int:
    """The exit status after `error`, which is told in one line where it is one of ours."""
    first = error
    while isinstance(first, BaseExceptionGroup):  # a task group wraps what its tasks raise
        first = first.exceptions[0]
    if isinstance(first, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(first, BrokenPipeError) and command in (
        *_ASKING,
        "explain",
    ):  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if not isinstance(first, ModelExpressError):
        raise error
    print(f"mx-rl {command}: {printable(str(first), lines=True)}", file=sys.stderr)
    if isinstance(first, UsageError):
        return EXIT_USAGE
    if isinstance(first, Unavailable) and command in _ASKING:
        print("`mx-rl doctor` with the same --server looks for the cause", file=sys.stderr)
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
