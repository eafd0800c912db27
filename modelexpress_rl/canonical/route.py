"""The cheapest way to a version over the graph of versions: what lies where, and what is a change of what."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from modelexpress_rl.errors import VersionGone

MAX_STEPS = 64  # the longest chain that 0.7.0's generators replay unless they are told otherwise


@dataclass(frozen=True, slots=True)
class Step:
    """One way to have a version: from `base` by a delta (or several, squashed), or whole from somewhere.

    `size_bytes` are read at `bytes_per_s` after `latency_s`; `apply_s` is what decoding takes beyond that.
    What is on this host's disk already has no size.
    """

    version: str
    base: str | None
    size_bytes: int
    bytes_per_s: float
    latency_s: float = 0.0
    apply_s: float = 0.0
    label: str = ""

    @property
    def seconds(self) -> float:
        """What it takes."""
        return self.latency_s + self.size_bytes / self.bytes_per_s + self.apply_s


@dataclass(frozen=True, slots=True)
class Route:
    """Steps in their order; the first is from no base."""

    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """What all of them take."""
        return sum(step.seconds for step in self.steps)

    @property
    def size_bytes(self) -> int:
        """What is read."""
        return sum(step.size_bytes for step in self.steps)


def cheapest(target: str, steps: Iterable[Step], max_steps: int = MAX_STEPS) -> Route:
    """The route of the least seconds, of those with at most so many deltas; of equals the one of fewer.

    Found backwards from the target, so that only what leads to it is looked at.

    Raises:
        VersionGone: nothing leads there; the message names the versions that would have to be there.
    """
    into: dict[str, list[Step]] = {}
    for step in steps:
        into.setdefault(step.version, []).append(step)
    order = itertools.count()
    # Costs so far, deltas so far, a tie-breaker, the version that is needed next, the steps behind it.
    waiting: list[tuple[float, int, int, str, tuple[Step, ...]]] = [(0.0, 0, next(order), target, ())]
    fewest: dict[str, int] = {}
    missing: set[str] = set()
    too_long = False
    while waiting:
        seconds, deltas, _, version, behind = heapq.heappop(waiting)
        if behind and behind[0].base is None:
            return Route(behind)
        if deltas >= fewest.get(version, deltas + 1):
            continue  # it was reached for less, by no more deltas
        fewest[version] = deltas
        if version not in into:
            missing.add(version)
        for step in into.get(version, ()):
            more = deltas + (step.base is not None)
            if more > max_steps:
                too_long = True
                continue
            needed = version if step.base is None else step.base
            heapq.heappush(waiting, (seconds + step.seconds, more, next(order), needed, (step, *behind)))
    raise VersionGone(
        f"version {target}: nothing leads to it"
        + (f" in {max_steps} deltas" if too_long else "")
        + (f"; one of {', '.join(sorted(missing))} would have to be there" if missing else "")
    )
