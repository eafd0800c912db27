"""transfer: what resharding reads reach of raw NIXL reads of the same volume, case by case.

Two processes on this machine. `gib_s` is needed bytes over the time from the first post to the last
verified byte in its place; `over_raw` that over raw reads in runs of 32 MiB, taken just before and just
after. `digest_share` is what of that time goes when neither end makes digests. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import Region
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionRef
from tests.bench.refit import _server
from tests.bench.result import Result, machine
from tests.bench.transfer_cases import CASES, MORE_CASES, Case, case, held_values

GOALS = {
    "over_raw": "at least 0.9 aligned and packed, 0.7 the others",
    "amplification": "1.00 but where rows are staged",
    "digest_share": "under 0.15",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--mib", type=int, default=256, help="needed bytes of a case, in MiB (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="warm versions that are measured (%(default)s)")
    names = [each.name for each in (*CASES, *MORE_CASES)]
    parser.add_argument(
        "--cases", nargs="+", choices=names, default=[each.name for each in CASES], metavar="CASE",
        help=f"of {', '.join(names)}",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> Result:
    """Measure case by case, each with a server and clients of its own."""
    found = {
        name: asyncio.run(_measure(case(name), arguments.mib, arguments.rounds)) for name in arguments.cases
    }
    conditions = f"{machine()}; {arguments.mib} MiB a case (80 many_small), medians of {arguments.rounds}"
    return Result("Reads of one version", {"cases": found}, GOALS, conditions)


async def _measure(chosen: Case, mib: int, rounds: int) -> dict[str, float]:
    tensors = chosen.tensors(mib << 20)
    held = [value.copy() for value in held_values(tensors, 0)]
    boxes = [
        PlainBox(tensor.name, array, full_shape=tensor.shape, offset=offset)
        for array, (tensor, (offset, _)) in zip(
            held, ((tensor, box) for tensor in tensors for box in tensor.held), strict=True
        )
    ]
    with _server() as server:
        config = ModelExpressTrainerConfig(
            device_id=0,
            model_name=chosen.name,
            server_url=server,
            staging_mode=chosen.mode,
            column_blocks=chosen.column_blocks,
            engine_context=PlainTrainerContext(boxes, slot_id="bench:0"),
        )
        async with (
            await AsyncModelExpressTrainerClient.initialize(config) as trainer,
            AsyncModelExpressControlClient.connect(server) as control,
            _raw_memory(mib << 20) as raw,
            _generator(server, chosen.name, mib) as ask,
        ):
            await ask(raw)
            seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
            for number in range(2 * rounds + 2):
                with_digests = number % 2 == 0
                for array, value in zip(held, held_values(tensors, number), strict=True):
                    array[...] = value
                answer = await _version(trainer, control, ask, chosen, number, with_digests, rounds)
                if number > 1:  # the first of each kind is cold
                    seen[with_digests].append(answer)
    return _figures(seen)


def _figures(seen: dict[bool, list[dict[str, float]]]) -> dict[str, float]:
    def median(name: str, *, digests: bool = True) -> float:
        return statistics.median(each[name] for each in seen[digests])

    over_raw = {
        digests: statistics.median(each["raw_s"] / each["wire_transfer_s"] for each in seen[digests])
        for digests in seen
    }
    unverified = sum(each["unverified_bytes"] for each in seen[True])
    assert unverified == 0, f"{unverified} bytes were not verified"
    return {
        "gib_s": median("needed") / median("wire_transfer_s") / 2**30,
        "over_raw": over_raw[True],
        "raw_gib_s": median("needed") / median("raw_s") / 2**30,
        "amplification": median("amplification"),
        "digest_share": max(0.0, 1 - over_raw[True] / over_raw[False]),
        "descriptors": median("descriptors"),
        "staged_share": median("staged_bytes") / median("bytes"),
    }


async def _version(
    trainer: AsyncModelExpressTrainerClient,
    control: AsyncModelExpressControlClient,
    ask: Any,
    chosen: Case,
    number: int,
    with_digests: bool,
    rounds: int,
) -> dict[str, float]:
    trainer._runtime._method._stager._with_digests = with_digests  # type: ignore[attr-defined]
    version = f"{chosen.name}-{number}"
    await control.create_weight_version(
        chosen.name, version, WeightPayloadFormat.FULL_TENSOR, ["bench:0"], uid=version
    )
    staged = await trainer.stage_shard(WeightVersionRef(version))
    await staged.publish()
    answer: dict[str, float] = await ask(
        {"version": version, "step": number, "compare": number >= 2 * rounds}
    )
    await control.delete_weight_version(version)
    await staged.source_reuse_ready.wait()
    return answer


@contextlib.asynccontextmanager
async def _raw_memory(size_bytes: int) -> AsyncIterator[dict[str, Any]]:
    pages = mmap.mmap(-1, size_bytes)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:] = 1
    async with await NixlAgent.create(listen=False) as agent:
        await agent.register([Region(memory.ctypes.data, size_bytes)])
        meta = await agent.metadata()
        yield {"meta": meta.hex(), "addr": memory.ctypes.data, "bytes": size_bytes}


@contextlib.asynccontextmanager
async def _generator(server: str, name: str, mib: int) -> AsyncIterator[Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.bench.transfer_generator",
        server,
        name,
        str(mib),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def ask(message: dict[str, Any]) -> dict[str, Any]:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        if "meta" in message:
            return {}
        answer: dict[str, Any] = json.loads(await process.stdout.readline())
        return answer

    try:
        yield ask
    finally:
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            await asyncio.wait_for(process.wait(), 20)
