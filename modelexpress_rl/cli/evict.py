"""`mx-rl evict`: an operator ends a version, whatever its orchestrator does."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict

import anyio

from modelexpress_rl.cli import common, show
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import UsageError, VersionGone
from modelexpress_rl.rpc import NotFound
from modelexpress_rl.version import VersionState, VersionStatus

_WAIT_FOR = VersionState.RETIRED


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("version", metavar="VERSION", help="the version's id")
    parser.add_argument(
        "--server", metavar="HOST:PORT", help="the control plane (MODEL_EXPRESS_URL, MX_SERVER_ADDRESS)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait at most so long until nobody reads or publishes it any more",
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for the call (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the status as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Evict; answers the exit status.

    Raises:
        UsageError: the address can't be read.
        RpcError: the version is not known, or the control plane can't be reached.
        DeadlineExceeded: it was evicted, and is still read or published after `--wait`.
    """
    if not 0 <= options.wait < math.inf:
        raise UsageError(f"--wait must be 0 or more seconds, not {options.wait:g}")
    timeout_s = common.timeout_s(options)
    status = anyio.run(_evict, options.version, options.server, options.wait, timeout_s)
    if options.json:
        print(json.dumps({**asdict(status), "state": status.state.value}))
    else:
        print(show.plain(status))
    return 0


async def _evict(version_id: str, server: str | None, wait_s: float, timeout_s: float) -> VersionStatus:
    async with AsyncModelExpressControlClient.connect(server, timeout_s) as client:
        status = await client.evict_weight_version(version_id)
        if wait_s <= 0 or status.state in (_WAIT_FOR, VersionState.FORGOTTEN):
            return status
        try:
            return await client.wait_for_state(version_id, _WAIT_FOR, wait_s)
        except (NotFound, VersionGone):
            return status  # forgotten meanwhile, which is further than was waited for
