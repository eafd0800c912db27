"""Exploring the joint machine breadth first: every state that a small world can reach, once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from statemachines.invariants import broken_by, broken_in
from statemachines.rundown import Rundown
from statemachines.world import Config, Move, World, moves, start, step
from statemachines.world_key import key


@dataclass(frozen=True)
class Found:
    """What an exploration saw: how many states, how deep, whether that was all, and what broke."""

    states: int
    steps: int
    depth: int
    complete: bool
    broken: tuple[str, ...] = ()
    path: tuple[Move, ...] = ()


def path_to(parents: dict[Hashable, tuple[Hashable, Move] | None], last: Hashable) -> tuple[Move, ...]:
    found: list[Move] = []
    while (parent := parents[last]) is not None:
        last, move = parent
        found.append(move)
    return tuple(reversed(found))


def explore(
    config: Config,
    *,
    max_depth: int = 100,
    max_states: int = 10**9,
    max_s: float = 10**9,
    first: World | None = None,
    rundown: Rundown | None = None,
) -> Found:
    """Visit every state within the limits; stop at the first that breaks a promise."""
    begin = start(config) if first is None else first
    parents: dict[Hashable, tuple[Hashable, Move] | None] = {key(begin): None}
    queue: deque[tuple[World, Hashable, int]] = deque([(begin, key(begin), 0)])
    steps, depth, until = 0, 0, time.process_time() + max_s
    while queue:
        world, at, depth = queue.popleft()
        if depth >= max_depth or len(parents) >= max_states or time.process_time() > until:
            return Found(len(parents), steps, depth, False)
        for move in moves(world):
            taken = step(world, move)
            steps += 1
            after = key(taken.after)
            broken = tuple(words for one in taken.log for words in broken_by(one))
            if after not in parents:
                broken += broken_in(taken.after)
                broken += rundown.broken_in(taken.after) if rundown is not None and not broken else ()
            if broken:
                return Found(len(parents), steps, depth, False, broken, (*path_to(parents, at), move))
            if after not in parents:
                parents[after] = (at, move)
                queue.append((taken.after, after, depth + 1))
    return Found(len(parents), steps, depth, True)


def replay(config: Config, path: tuple[Move, ...]) -> World:
    """The world at the end of a path."""
    world = start(config)
    for move in path:
        world = step(world, move).after
    return world
