"""`mx-rl watch`: a line for each change of a version, of a model's versions, or of all."""

from __future__ import annotations

import argparse
import time
from contextlib import aclosing

import anyio
from anyio.abc import TaskGroup
from rich.console import Console
from rich.text import Text

from modelexpress_rl.cli import common, show
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import UsageError
from modelexpress_rl.version import VersionState, VersionStatus

LOOK_FOR_MODELS_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("version", nargs="?", metavar="VERSION", help="a version's id; it may be yet to come")
    parser.add_argument("--model", help="all versions of this model; without either, of every model")
    parser.add_argument(
        "--until",
        metavar="STATE",
        help="end with the first line in this state; status 1 where it never comes",
    )
    common.add_server(parser)
    common.add_json(parser, "one JSON object a line")


def run(options: argparse.Namespace) -> int:
    """Watch until the version has ended, or is in `--until`; answers the exit status.

    Raises:
        UsageError: an option can't be read.
        RpcError: the control plane can't be reached, or stays away for two minutes.
    """
    if options.version and options.model:
        raise UsageError("give a VERSION or --model, not both")
    until = common.states_in([options.until])[0] if options.until else None
    return anyio.run(_watch, options, until)


async def _watch(options: argparse.Namespace, until: VersionState | None) -> int:
    lines = _Lines(options.json, until)
    async with (
        AsyncModelExpressControlClient.connect(options.server, common.timeout_s(options)) as control,
        anyio.create_task_group() as tasks,
    ):
        if options.version:
            tasks.start_soon(_follow, lines, control, options.version, None, tasks)
        elif options.model:
            tasks.start_soon(_follow, lines, control, None, options.model, tasks)
        else:
            tasks.start_soon(_follow_all, lines, control, tasks)
    return 0 if until is None or lines.reached else 1


async def _follow(
    lines: _Lines,
    control: AsyncModelExpressControlClient,
    version_id: str | None,
    model_name: str | None,
    tasks: TaskGroup,
) -> None:
    if version_id is not None:
        watch = control.watch(version_id, wait_for_creation=True)
    else:
        watch = control.watch_model(model_name or "")
    async with aclosing(watch) as statuses:
        async for status in statuses:
            lines.add(status)
            if lines.reached:
                tasks.cancel_scope.cancel()
                return


async def _follow_all(lines: _Lines, control: AsyncModelExpressControlClient, tasks: TaskGroup) -> None:
    """Every model, also those that come later."""
    known: set[str] = set()
    while True:
        for status in await control.list_version_statuses():
            if status.model_name not in known:
                known.add(status.model_name)
                tasks.start_soon(_follow, lines, control, None, status.model_name, tasks)
        await anyio.sleep(LOOK_FOR_MODELS_S)


class _Lines:
    """Prints each status, and notes whether the state was reached that was waited for."""

    def __init__(self, as_json: bool, until: VersionState | None) -> None:
        self._as_json = as_json
        self._until = until
        self._console: Console = common.console()
        self.reached = False

    def add(self, status: VersionStatus) -> None:
        if self._as_json:
            print(common.dump(common.version_json(status)), flush=True)
        else:
            self._console.print(_line(show.plain(status)), soft_wrap=True)
        self.reached = self.reached or status.state is self._until


def _line(status: VersionStatus) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime((status.now_unix_ms or time.time() * 1000) / 1000))
    line = Text(f"{at} {status.version_id} ")
    line.append(f"{status.state.value:<9}", style=show.STYLES[status.state])
    line.append(" ").append_text(show.coverage(status))
    if status.live_leases:
        line.append(f", {status.live_leases} leases")
    if reason := show.why(status):
        line.append(f"  {reason}", style="dim")
    return line
