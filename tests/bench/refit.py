"""refit: a version between two processes, against raw NIXL reads of the same buffers."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import anyio
import torch

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.version import VersionState, WeightPayloadFormat, WeightVersionRef
from tests.bench import peer
from tests.bench.result import Result, machine, resident_bytes

MODEL = "bench"
TENSOR_BYTES = 16 << 20
GOALS = {
    "staged_over_raw": "at least 0.8",
    "warm_fixed_ms": "under 30",
    "trainer_extra_ratio": "under 0.10",
    "generator_extra_ratio": "about 1: one staging copy",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--mib", type=int, default=1024, help="size of the model in MiB")
    parser.add_argument("--rounds", type=int, default=5, help="warm versions that are measured")
    parser.add_argument("--tiny-rounds", type=int, default=30, help="warm versions of the tiny model")


def run(arguments: argparse.Namespace) -> Result:
    """Run both models and put the figures together."""
    big = asyncio.run(_measure(arguments.mib << 20, arguments.rounds, with_raw=True))
    tiny = asyncio.run(_measure(64 << 10, arguments.tiny_rounds, with_raw=False))
    figures = {
        "raw_gib_s": big["raw_gib_s"],
        "staged_gib_s": big["staged_gib_s"],
        "staged_over_raw": big["staged_over_raw"],
        "publish_to_ready_ms": big["publish_to_ready_ms"],
        "warm_fixed_ms": tiny["refit_ms"],
        "trainer_extra_ratio": big["trainer_extra_ratio"],
        "generator_extra_ratio": big["generator_extra_ratio"],
        "trainer_stage_ms": big["trainer_stage_ms"],
        "unverified_ratio": big["unverified_ratio"],
    }
    conditions = f"{machine()}; {arguments.mib} MiB in place, medians of {arguments.rounds} warm versions"
    return Result("A version between two processes", figures, GOALS, conditions)


async def _measure(model_bytes: int, rounds: int, *, with_raw: bool) -> dict[str, float]:
    with peer.server() as server:
        weights = _weights(model_bytes)
        before = resident_bytes()
        config = ModelExpressTrainerConfig(
            device_id=0,
            model_name=MODEL,
            server_url=server,
            engine_context=PlainTrainerContext(slot_id="bench:0"),
        )
        trainer = await AsyncModelExpressTrainerClient.initialize(config)
        try:
            await trainer.bind_tensors(weights)
            async with (
                AsyncModelExpressControlClient.connect(server) as control,
                peer.generator("tests.bench.refit_generator", server) as ask,
            ):
                await ask({"model_bytes": model_bytes})
                figures = await _rounds(trainer, control, ask, weights, rounds, with_raw=with_raw)
        finally:
            figures_extra = (_peak_bytes() - before) / model_bytes
            await trainer.close()
    return {**figures, "trainer_extra_ratio": figures_extra}


async def _rounds(
    trainer: AsyncModelExpressTrainerClient,
    control: AsyncModelExpressControlClient,
    ask: Any,
    weights: dict[str, torch.Tensor],
    rounds: int,
    *,
    with_raw: bool,
) -> dict[str, float]:
    seen: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first one is cold, and not counted
        for weight in weights.values():
            weight.view(torch.int32).add_(1)
        version = f"bench-{number}"
        started = time.monotonic()
        await control.create_weight_version(
            MODEL, version, WeightPayloadFormat.FULL_TENSOR, ["bench:0"], uid=version
        )
        ready: list[float] = []
        async with anyio.create_task_group() as watching:
            watching.start_soon(_note_ready, control, version, ready)
            staging = time.monotonic()
            staged = await trainer.stage_shard(WeightVersionRef(version))
            publishing = time.monotonic()
            await staged.publish()
        raw = with_raw and number > 0  # in every round: a machine that others use has good and bad seconds
        answer = await ask({"version": version, "raw": raw, "expect": _sample(weights)})
        if number:
            _note(seen, "publish_to_ready_ms", (ready[0] - publishing) * 1e3)
            _note(seen, "trainer_stage_ms", (publishing - staging) * 1e3)
            _note(seen, "refit_ms", (answer["applied_at"] - started) * 1e3)
            _note(seen, "staged_gib_s", answer["staged_gib_s"])
            if raw:
                _note(seen, "raw_gib_s", answer["raw_gib_s"])
                _note(seen, "staged_over_raw", answer["staged_gib_s"] / answer["raw_gib_s"])
            _note(seen, "unverified_ratio", answer["unverified_ratio"])
        await control.delete_weight_version(version)
        await staged.source_reuse_ready.wait()
    figures = {name: statistics.median(values) for name, values in seen.items()}
    figures["generator_extra_ratio"] = answer["extra_ratio"]
    return figures


async def _note_ready(control: AsyncModelExpressControlClient, version: str, ready: list[float]) -> None:
    async for status in control.watch(version):
        if status.state is VersionState.READY:
            ready.append(time.monotonic())
            return


def _note(seen: dict[str, list[float]], name: str, value: float) -> None:
    seen.setdefault(name, []).append(value)


def _weights(model_bytes: int) -> dict[str, torch.Tensor]:
    count = max(4, model_bytes // TENSOR_BYTES)
    rows = model_bytes // count // 4096
    return {
        f"layers.{i}.weight": torch.full((rows, 1024), i, dtype=torch.int32).view(torch.float32)
        for i in range(count)
    }


def _sample(weights: dict[str, torch.Tensor]) -> list[int]:
    return [int(weight.view(torch.int32)[-1, -1]) for weight in weights.values()]


def _peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
