"""`mx-rl top`: versions with coverage bars, leases, rates, and the fleet: who serves which version."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import anyio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from modelexpress_rl.cli import common
from modelexpress_rl.cli.top_frame import frame
from modelexpress_rl.cli.top_snapshot import Rates, Snapshot, snapshot
from modelexpress_rl.errors import TryAgainError, UsageError
from modelexpress_rl.printable import printable
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.version import VersionState

LEAST_INTERVAL_S = 0.2
_SHOWN = tuple(state for state in VersionState if not state.ended)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.add_server(parser)
    parser.add_argument("--model", help="only this model")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (%(default)s)"
    )
    parser.add_argument("--retired", action="store_true", help="also show versions that have ended")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    common.add_json(parser, "one JSON object a look, instead of the view")


def run(options: argparse.Namespace) -> int:
    """Show until interrupted; answers the exit status.

    Raises:
        UsageError: an option can't be read.
        RpcError: the control plane can't be reached at the first look, or is of 0.7.
    """
    if not LEAST_INTERVAL_S <= options.interval < 3600:
        raise UsageError(f"--interval must be at least {LEAST_INTERVAL_S} s, not {options.interval:g}")
    anyio.run(_top, options)
    return 0


async def _top(options: argparse.Namespace) -> None:
    console = common.console()
    # A whole screen on a terminal; frame after frame elsewhere.
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    on_screen = console.is_terminal and not options.once and not options.json
    async with ControlPlane.dial(options.server, rpc_timeout_s=common.timeout_s(options)) as plane:
        last: Snapshot | None = None
        with live if on_screen else nullcontext():
            while True:
                trouble = ""
                try:
                    present = await snapshot(plane, options.model, () if options.retired else _SHOWN)
                except TryAgainError as error:
                    if last is None:
                        raise
                    present, trouble = last, printable(str(error), lines=True)
                _show(console, live if on_screen else None, options, present, last, trouble)
                if options.once:
                    return
                last = present
                await anyio.sleep(options.interval)


def _show(
    console: Console,
    live: Live | None,
    options: argparse.Namespace,
    present: Snapshot,
    last: Snapshot | None,
    trouble: str,
) -> None:
    if options.json:
        print(common.dump(_body(present)), flush=True)
        return
    room = console.height if live is not None else None
    view = frame(present, Rates.between(last, present), room)
    if live is not None:
        if trouble:
            view.renderables.insert(0, Text(f"not reached, shown as last seen: {trouble}", style="red"))
        live.update(view, refresh=True)
    elif trouble:
        console.print(Text(trouble, style="red"))
    else:
        console.print(view)


def _body(present: Snapshot) -> dict[str, Any]:
    return {
        "server": {
            "address": present.address,
            "version": present.server_version,
            "store": present.store_kind,
            "now_unix_ms": present.now_unix_ms,
        },
        "versions": [common.version_json(status) for status in present.versions],
        "workers": [common.worker_json(worker) for worker in present.workers],
    }
