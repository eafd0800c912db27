"""`mx-rl workers`: who is registered, and which version each generator serves."""

from __future__ import annotations

import argparse

import anyio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.cli import common, show
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.rpc.convert import worker_status_from_pb
from modelexpress_rl.version import WorkerRole, WorkerStatus


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.add_server(parser)
    parser.add_argument("--model", help="only of this model")
    parser.add_argument("--role", choices=[role.value.lower() for role in WorkerRole], help="only these")
    parser.add_argument("--all", action="store_true", help="also those whose registration has expired")
    common.add_json(parser, "a JSON array")


def run(options: argparse.Namespace) -> int:
    """List; answers the exit status.

    Raises:
        UsageError: an option can't be read.
        RpcError: the control plane can't be reached, or is of 0.7, which can't list.
    """
    found, now_unix_ms = anyio.run(_list, options)
    if options.json:
        print(common.dump([common.worker_json(worker) for worker in found]))
    elif found:
        common.console().print(show.workers_table(found, now_unix_ms))
    else:
        print("no workers")
    return 0


async def _list(options: argparse.Namespace) -> tuple[list[WorkerStatus], int]:
    request = v1.ListWorkersRequest(model_name=options.model or "", include_expired=options.all)
    async with ControlPlane.dial(options.server, rpc_timeout_s=common.timeout_s(options)) as plane:
        answer = await plane.list_workers(request)
    workers = [worker_status_from_pb(worker) for worker in answer.workers]
    wanted = [one for one in workers if options.role in (None, one.role.value.lower())]
    return wanted, answer.now_unix_ms
