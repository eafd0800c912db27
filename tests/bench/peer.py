"""The two processes of a benchmark of reads: a server to start, and a generator that answers JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.rpc import parse_address
from modelexpress_rl.rpc.clients import ControlPlane, WorkerEndpoint

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
LINE_BYTES = 1 << 20


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a control plane with its store in memory."""
    command = [sys.executable, "-m", "modelexpress_rl.cli.main", "serve", "--port", "0"]
    with subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split("listening on ")[1].split()[0]
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def generator(module: str, *words: str) -> AsyncIterator[Ask]:
    """A module of this folder as a process: a function that sends it a message, and returns its answer."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=LINE_BYTES
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def ask(message: dict[str, Any]) -> dict[str, Any]:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await process.stdout.readline())
        return answer

    try:
        yield ask
    finally:
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            await asyncio.wait_for(process.wait(), 20)


async def read() -> dict[str, Any]:
    """The next message to this process; empty at the end."""
    line = await asyncio.to_thread(sys.stdin.readline)
    message: dict[str, Any] = json.loads(line) if line else {}
    return message


def write(message: dict[str, Any]) -> None:
    """Answer a message."""
    print(json.dumps(message), flush=True)


async def manifest_of(server: str, version: str) -> manifests.Manifest:
    """The manifest of the one shard of a version, from its publisher."""
    async with ControlPlane.dial(server) as control:
        listed = await control.list_weight_version_shards(
            refit.ListWeightVersionShardsRequest(version_id=version)
        )
    (shard,) = listed.shards
    async with WorkerEndpoint(parse_address(shard.manifest_endpoint)) as worker:
        answer = await worker.get_weight_version_shard_manifest(
            refit.GetWeightVersionShardManifestRequest(
                version_id=version, source_slot_id=shard.source_slot_id
            )
        )
    return manifests.decode(answer.manifest)
