"""Bugs that somebody could make, each planted by changing one function while a simulation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from modelexpress_rl.server import fold
from statemachines import installation, publication, version_guards


@dataclass(frozen=True)
class Bug:
    """`function` does what `instead` does; `promises` are those that it breaks, one at least."""

    words: str
    function: Callable[..., Any]
    instead: Callable[..., Any]
    promises: frozenset[str]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The function is another one meanwhile, wherever it is referred to, as in the compiled tables."""
        assert isinstance(self.function, FunctionType)
        assert isinstance(self.instead, FunctionType)
        code = self.function.__code__
        self.function.__code__ = self.instead.__code__
        try:
            yield
        finally:
            self.function.__code__ = code


# Their globals are those of the functions that they stand for.
# ruff: noqa: F821
# mypy: disable-error-code=name-defined


def _no_recheck(record: Any, event: Any, now_ms: Any) -> None:
    return None


def _settled_last(entry: Any, commands: Any, moment: Any) -> Any:
    """As `fold.fold`, but what is due is applied after the commands instead of before them."""
    current, effects, answers = entry, (), []
    for command in commands:
        before = current.record
        try:
            event = command.event(before, moment)
            if event is not None:
                decision = version.decide(before, event, moment)
                current = _follow(current, decision.record, moment, command.why)
                effects += decision.effects
            answers.append(Outcome(before, current.record, moment))
        except Refused as refusal:
            answers.append(refusal)
    current, due = settled(current, moment)
    return Fold(
        current,
        current.record != entry.record,
        effects + due,
        tuple(answers),
        version.wake_at_ms(current.record, moment),
        _valid_until_ms(entry.record, moment),
        entry.record.state,
    )


def _never_closes(record: Any, event: Any, moment: Any) -> None:
    return None


def _never_a_gap(record: Any, event: Any, moment: Any) -> bool:
    return False


def _first_timer_counts(record: Any, event: Any, now_ms: Any) -> Any:
    """As `publication._orphan`, but a later separation leaves the timer of the first one in force."""
    before, until_ms = record.phase, _forgotten_until_ms(record.phase)
    if isinstance(before, Orphaned):
        return record, ()
    after = Orphaned(
        bound_ms=event.bound_ms if until_ms is None else max(event.bound_ms, until_ms),
        released=isinstance(before, Draining),
        forgotten=isinstance(event, VersionLost) or (until_ms is not None and now_ms < until_ms),
    )
    return _in(record, after), (ArmBound(after.bound_ms),)


BUGS = {
    "no-recheck": Bug(
        "the lease is not looked at again after the last read",
        installation.last_read_was_protected,
        _no_recheck,
        frozenset({"P1", "P2", "P6"}),
    ),
    "ready-before-expiry": Bug(
        "commands are decided before what has expired is applied",
        fold.fold,
        _settled_last,
        frozenset({"P3"}),
    ),
    "renewed-while-draining": Bug(
        "leases are renewed after the drain deadline",
        version_guards.drain_is_open,
        _never_closes,
        frozenset({"P4"}),
    ),
    "coverage-never-shrinks": Bug(
        "a version stays READY when a slot loses its last publisher",
        version_guards.leaves_a_gap,
        _never_a_gap,
        frozenset({"P3"}),
    ),
    "stale-timer": Bug(
        "the timer of an earlier separation is honoured after a later one",
        publication._orphan,
        _first_timer_counts,
        frozenset({"P1", "P4"}),
    ),
}
