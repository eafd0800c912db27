"""`mx-rl versions`: what there is, and how each version stands."""

from __future__ import annotations

import argparse

import anyio

from modelexpress_rl.cli import common, show
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.version import VersionState, VersionStatus


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.add_server(parser)
    parser.add_argument("--model", help="only of this model")
    parser.add_argument(
        "--state", action="append", default=[], metavar="STATE", help="only in this state; may be repeated"
    )
    common.add_json(parser, "a JSON array")


def run(options: argparse.Namespace) -> int:
    """List; answers the exit status.

    Raises:
        UsageError: an option can't be read.
        RpcError: the control plane can't be reached, or is of 0.7, which can't list.
    """
    found = anyio.run(_list, options, common.states_in(options.state))
    if options.json:
        print(common.dump([common.version_json(status) for status in found]))
    elif found:
        common.console().print(show.versions_table(found))
    else:
        print("no versions")
    return 0


async def _list(options: argparse.Namespace, states: list[VersionState]) -> list[VersionStatus]:
    async with AsyncModelExpressControlClient.connect(options.server, common.timeout_s(options)) as control:
        return await control.list_version_statuses(options.model, states)
