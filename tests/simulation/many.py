"""Many seeds, over several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.simulation.world import simulate

_AT_ONCE = 5


@dataclass(frozen=True)
class Summary:
    """What one seed came to, in words."""

    seed: int
    violation: str
    verdict: str
    wall_s: float


def run_seeds(seeds: Sequence[int], jobs: int, bug: str | None = None) -> Iterator[Summary]:
    """Run them, in order of the seeds, `jobs` at a time."""
    one = partial(_summary, bug=bug)
    if jobs <= 1:
        yield from map(one, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(one, seeds, chunksize=_AT_ONCE)


def command_of(seed: int) -> str:
    """What replays a seed."""
    return f"python -m tests.simulation --seed {seed}"


def _summary(seed: int, bug: str | None) -> Summary:
    result = simulate(seed, bug=bug)
    return Summary(seed, str(result.violation or ""), result.verdict, result.wall_s)
