"""Which generation the next version gets, and what happens where readers hold all of them. Pure.

WAIT waits for one, as long as the caller allows. SKIP publishes the version not at all. GROW makes one
more, up to a limit, and then waits. A generation that was grown and has long not been needed goes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from statemachines.generation_records import GenerationRecord, GenerationState

IDLE_USES = 16
"""A grown generation goes once so many versions were captured elsewhere since it was used last."""


class BackPressure(StrEnum):
    """What a capture does where every generation is being read."""

    WAIT = "WAIT"
    SKIP = "SKIP"
    GROW = "GROW"


@dataclass(frozen=True, slots=True)
class Limits:
    """How many generations there are at most: usually, and with GROW where readers hold those."""

    generations: int = 2
    max_generations: int = 4
    policy: BackPressure = BackPressure.WAIT

    @property
    def most(self) -> int:
        """How many the policy allows."""
        return self.max_generations if self.policy is BackPressure.GROW else self.generations


@dataclass(frozen=True, slots=True)
class Take:
    """The version gets this generation."""

    number: int


@dataclass(frozen=True, slots=True)
class Make:
    """The version gets a generation that is made for it. `grown`: it is one more than usual."""

    grown: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """The version waits until one is free."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The version is not published."""


Choice: TypeAlias = Take | Make | Wait | Skip


def choose(records: Sequence[GenerationRecord], limits: Limits) -> Choice:
    """What the next version gets, where `records` are all generations that there are.

    Of several free ones the one with the lowest number, so that those that were grown come to rest.
    """
    free = [record.number for record in records if record.state is GenerationState.FREE]
    if free:
        return Take(min(free))
    alive = sum(record.state is not GenerationState.RETIRED for record in records)
    if alive < limits.most:
        return Make(grown=alive >= limits.generations)
    return Skip() if limits.policy is BackPressure.SKIP else Wait()


def surplus(
    records: Sequence[GenerationRecord], last_used: Sequence[int], uses: int, limits: Limits
) -> int | None:
    """The number of a generation that may go; None where none may.

    `last_used` says for each record how many versions had been captured when it was handed out last, `uses`
    how many have been by now.
    """
    alive = [record for record in records if record.state is not GenerationState.RETIRED]
    if len(alive) <= limits.generations:
        return None
    idle = [
        record.number
        for record, last in zip(records, last_used, strict=True)
        if record.state is GenerationState.FREE and uses - last > IDLE_USES
    ]
    return max(idle, default=None)
