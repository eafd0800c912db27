"""transfer: what resharding reads reach of raw NIXL reads of the same volume, case by case.

Two processes on this machine. `gib_s` is needed bytes over the time from the first post to the last
verified byte in its place; `over_raw` that over raw reads of as much of the same memory in runs of 32 MiB,
taken just after. `digest_share` is what of that time goes where nothing is verified. The trainer has made
its digests before it is read, as it has where readers don't come within milliseconds; with
`over_raw_at_once` they do, and the trainer hashes beside them. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from enum import Enum, auto
from typing import Any

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionRef
from tests.bench import peer
from tests.bench.result import Result, machine
from tests.bench.transfer_cases import CASES, MORE_CASES, Case, case, held_values


class Digests(Enum):
    """When the trainer makes digests."""

    MADE_BEFORE = auto()
    AT_ONCE = auto()
    NONE = auto()


GOALS = {
    "over_raw": "at least 0.9 aligned and packed, 0.7 the others",
    "amplification": "1.00 but where rows are staged",
    "digest_share": "under 0.15",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--mib", type=int, default=512, help="needed bytes of a case, in MiB (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="warm versions of each kind (%(default)s)")
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
    with peer.server() as server:
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
            peer.generator("tests.bench.transfer_generator", server, chosen.name, str(mib)) as ask,
        ):
            seen: dict[Digests, list[dict[str, float]]] = {kind: [] for kind in Digests}
            kinds = list(Digests)
            for number in range(len(kinds) * (rounds + 1)):
                kind = kinds[number % len(kinds)]
                for array, value in zip(held, held_values(tensors, number), strict=True):
                    array[...] = value
                compare = number >= len(kinds) * rounds
                answer = await _version(
                    trainer, control, ask, f"{chosen.name}-{number}", number, kind, compare
                )
                if number >= len(kinds):  # the first of each kind is cold
                    seen[kind].append(answer)
    return _figures(seen)


def _figures(seen: dict[Digests, list[dict[str, float]]]) -> dict[str, float]:
    usual = seen[Digests.MADE_BEFORE]

    def median(name: str) -> float:
        return statistics.median(each[name] for each in usual)

    over_raw = {
        kind: statistics.median(each["raw_s"] / each["wire_transfer_s"] for each in answers)
        for kind, answers in seen.items()
    }
    unverified = sum(each["unverified_bytes"] for each in usual)
    assert unverified == 0, f"{unverified} bytes were not verified"
    return {
        "gib_s": median("needed") / median("wire_transfer_s") / 2**30,
        "over_raw": over_raw[Digests.MADE_BEFORE],
        "raw_gib_s": median("needed") / median("raw_s") / 2**30,
        "amplification": median("amplification"),
        "digest_share": max(0.0, 1 - over_raw[Digests.MADE_BEFORE] / over_raw[Digests.NONE]),
        "over_raw_at_once": over_raw[Digests.AT_ONCE],
        "descriptors": median("descriptors"),
        "staged_share": median("staged_bytes") / median("bytes"),
    }


async def _version(
    trainer: AsyncModelExpressTrainerClient,
    control: AsyncModelExpressControlClient,
    ask: Any,
    version: str,
    step: int,
    kind: Digests,
    compare: bool,
) -> dict[str, float]:
    trainer._runtime._method._stager._with_digests = kind is not Digests.NONE  # type: ignore[attr-defined]
    await control.create_weight_version(
        trainer.model_name, version, WeightPayloadFormat.FULL_TENSOR, ["bench:0"], uid=version
    )
    staged = await trainer.stage_shard(WeightVersionRef(version))
    if kind is Digests.MADE_BEFORE:
        made = await staged._staged.data.digests._ready()  # type: ignore[attr-defined]
        for part in made.slabs:
            await part.wait()
    await staged.publish()
    answer: dict[str, float] = await ask({"version": version, "step": step, "compare": compare})
    await control.delete_weight_version(version)
    await staged.source_reuse_ready.wait()
    return answer
