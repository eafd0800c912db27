"""overlap: what a trainer's step loses to publishing its weights, by staging mode, against a plain copy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.train.client import ModelExpressTrainerClient
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.copying import THREADS
from modelexpress_rl.train.engines.plain import PlainTrainerContext
from modelexpress_rl.version import WeightPayloadFormat
from tests.bench import peer
from tests.bench.refit import MODEL, _sample, _weights
from tests.bench.result import Result, machine

SLOT = "bench:0"
COLD_STEPS = 3  # each of two generations is made and registered in one of them, and read for the first time
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "in_place": {"staging_mode": "IN_PLACE"},
    "copy_to_host": {"staging_mode": "COPY_TO_HOST"},
    "overlap": {"staging_mode": "COPY_TO_HOST", "overlap": "PUBLISH"},
    "overlap_capture": {"staging_mode": "COPY_TO_HOST", "overlap": "CAPTURE"},
}
GOALS = {"stall_over_memcpy": "overlap under 1.2"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--mib", type=int, default=1024, help="size of the model in MiB")
    parser.add_argument("--steps", type=int, default=7, help="warm steps that are measured, in each mode")
    parser.add_argument(
        "--compute-ms", type=int, default=1000, help="forward and backward pass, on an idle CPU"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="which to measure")


def run(arguments: argparse.Namespace) -> Result:
    """Run every mode, and put the figures together."""
    torch.set_num_threads(1)  # what publishes has the other cores, as beside a trainer on a GPU
    weights = _weights(arguments.mib << 20)
    copy, compute = PlainCopy(weights), Compute(arguments.compute_ms)
    seen = {
        mode: asyncio.run(_measure(mode, weights, copy, compute, arguments.steps)) for mode in arguments.modes
    }
    memcpy_ms = statistics.median(ms for times in seen.values() for ms in times.memcpy_ms)
    stall_ms = {mode: statistics.median(times.stall_ms) for mode, times in seen.items()}
    figures = {
        "memcpy_ms": memcpy_ms,
        "stall_ms": stall_ms,
        "stall_over_memcpy": {
            mode: statistics.median(
                stall / memcpy for stall, memcpy in zip(times.stall_ms, times.memcpy_ms, strict=True)
            )
            for mode, times in seen.items()
        },
        "step_ms": {mode: statistics.median(times.step_ms) for mode, times in seen.items()},
    }
    conditions = (
        f"{machine()}; {arguments.mib} MiB, medians of {arguments.steps} warm steps of about "
        f"{arguments.compute_ms} ms; the copy and the capture have {THREADS} threads"
    )
    return Result("What a trainer's step loses", figures, GOALS, conditions)


@dataclass
class Times:
    """Milliseconds of each warm step: lost to publishing, of all of it, and of the plain copy just before."""

    stall_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    memcpy_ms: list[float] = field(default_factory=list)


class PlainCopy:
    """The least that a copy of the weights takes: into memory that is there, by as many threads."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._sources = [weight.numpy().reshape(-1).view(np.uint8) for weight in weights.values()]
        self._targets = [np.ones_like(source) for source in self._sources]
        self._pool = ThreadPoolExecutor(THREADS)

    def ms(self) -> float:
        """Copy once; how long it took."""
        began_s = time.perf_counter()
        for _ in self._pool.map(np.copyto, self._targets, self._sources):
            pass
        return (time.perf_counter() - began_s) * 1e3


class Compute:
    """As much work as a forward and a backward pass are: always the same, on one core."""

    def __init__(self, wanted_ms: int) -> None:
        self._matrix = torch.rand(512, 512)
        self._rounds = 1
        while self.ms() < wanted_ms / 8:
            self._rounds *= 2
        took_ms = min(self.ms() for _ in range(3))
        self._rounds = max(1, round(self._rounds * wanted_ms / took_ms))

    def ms(self) -> float:
        """Do it; how long it took."""
        began_s = time.perf_counter()
        for _ in range(self._rounds):
            torch.mm(self._matrix, self._matrix)
        return (time.perf_counter() - began_s) * 1e3


async def _measure(
    mode: str, weights: dict[str, torch.Tensor], copy: PlainCopy, compute: Compute, steps: int
) -> Times:
    if mode == "none":
        return await asyncio.to_thread(_train, None, {}, weights, copy, compute, steps, _nobody)
    published: queue.Queue[dict[str, Any] | None] = queue.Queue()
    with peer.server() as server:
        async with (
            AsyncModelExpressControlClient.connect(server) as control,
            peer.generator("tests.bench.refit_generator", server) as ask,
        ):
            await ask({"model_bytes": sum(weight.nbytes for weight in weights.values())})
            for number in range(steps + COLD_STEPS):
                version = f"{mode}-{number}"
                await control.create_weight_version(
                    MODEL, version, WeightPayloadFormat.FULL_TENSOR, [SLOT], uid=version
                )
            reading = asyncio.create_task(_read(published, control, ask))
            try:
                config = MODES[mode] | {"server_url": server}
                return await asyncio.to_thread(
                    _train, mode, config, weights, copy, compute, steps, published.put
                )
            finally:
                published.put(None)
                await reading


async def _read(
    published: queue.Queue[dict[str, Any] | None], control: AsyncModelExpressControlClient, ask: peer.Ask
) -> None:
    """The generator reads every version, one after the other, and the orchestrator then releases it."""
    while (message := await asyncio.to_thread(published.get)) is not None:
        await control.wait_for_state(message["version"], "READY", timeout=60)
        await ask(message | {"raw": False})
        await control.delete_weight_version(message["version"])


def _train(
    mode: str | None,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    copy: PlainCopy,
    compute: Compute,
    steps: int,
    tell: Callable[[dict[str, Any]], None],
) -> Times:
    """The training loop, as a framework has it: blocking, in a thread of its own."""
    times = Times()
    with _client(mode, config) as trainer:
        if trainer is not None:
            trainer.bind_tensors(weights)
        staged: Any = None
        for number in range(steps + COLD_STEPS):
            stall = Stall()
            step_ms = compute.ms()
            began_s = time.perf_counter()
            with stall:
                if staged is not None:
                    staged.weights_free.wait(60)
            for weight in weights.values():  # the optimizer
                weight.view(torch.int32).add_(1)
            step_ms += (time.perf_counter() - began_s) * 1e3
            memcpy_ms = copy.ms()
            began_s = time.perf_counter()
            if trainer is not None:
                version, sample = f"{mode}-{number}", _sample(weights)
                with stall:
                    staged = trainer.publish_version(version)
                    tell({"version": version, "expect": sample})
                    if mode == "in_place":
                        staged.weights_free.wait(60)  # as a loop of 0.7 waits for the release
            step_ms += (time.perf_counter() - began_s) * 1e3
            if number >= COLD_STEPS:
                times.stall_ms.append(stall.ms)
                times.step_ms.append(step_ms)
                times.memcpy_ms.append(memcpy_ms)
        if staged is not None:
            staged.source_reuse_ready.wait(60)  # the last one is read, too
    return times


@contextlib.contextmanager
def _client(mode: str | None, config: dict[str, Any]) -> Iterator[ModelExpressTrainerClient | None]:
    if mode is None:
        yield None
        return
    made = ModelExpressTrainerConfig(
        device_id=0, model_name=MODEL, engine_context=PlainTrainerContext(slot_id=SLOT), **config
    )
    with ModelExpressTrainerClient.initialize(made) as client:
        yield client


class Stall:
    """A stop-watch for what the trainer waits for."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.ms += (time.perf_counter() - self._began_s) * 1e3


def _nobody(message: dict[str, Any]) -> None:
    raise AssertionError(f"nothing is published, got {message}")
