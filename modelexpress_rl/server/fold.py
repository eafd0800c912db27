"""Deciding a group of commands against one version: pure, so that it can be decided again.

First everything that is due is settled, then each command is decided against what the ones before it
left. Each has its own answer or refusal; together they are one commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from modelexpress_rl.server.stores.port import VersionEntry
from statemachines import version
from statemachines.ids import WorkerId
from statemachines.kernel import Reason, Refused
from statemachines.version import Moment, VersionRecord, VersionState
from statemachines.version_records import Degraded, Effect, Event, Releasing
from statemachines.worker import live


@dataclass(frozen=True, slots=True)
class Command:
    """What somebody wants of a version.

    `event` makes the machine's event from what is true at the moment, or None where nothing needs to
    happen, or refuses. `worker_ids` are the registrations that it depends on; `why` is for people.
    """

    event: Callable[[VersionRecord, Moment], Event | None]
    worker_ids: tuple[WorkerId, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command did: the record before (settled) and after it, and the moment it was decided at."""

    before: VersionRecord
    after: VersionRecord
    moment: Moment


Answer: TypeAlias = Outcome | Refused


@dataclass(frozen=True, slots=True)
class Fold:
    """A group decided: the entry to commit, what to perform then, an answer per command.

    `came_from` is the state that the entry had before.
    """

    entry: VersionEntry
    changed: bool
    effects: tuple[Effect, ...]
    answers: tuple[Answer, ...]
    wake_at_ms: int | None
    valid_until_ms: int | None
    came_from: VersionState


def settled(entry: VersionEntry, moment: Moment) -> tuple[VersionEntry, tuple[Effect, ...]]:
    """The entry with everything that is due at `moment` applied."""
    decision = version.settle(entry.record, moment)
    return _follow(entry, decision.record, moment, ""), decision.effects


def fold(entry: VersionEntry, commands: Sequence[Command], moment: Moment) -> Fold:
    """Decide `commands`, in order, at `moment`."""
    current, effects = settled(entry, moment)
    answers: list[Answer] = []
    for command in commands:
        before = current.record
        try:
            if before.state is VersionState.FORGOTTEN:
                raise unknown(before.uid)
            event = command.event(before, moment)
            if event is not None:
                decision = version.decide(before, event, moment)
                current = _follow(current, decision.record, moment, command.why)
                effects += decision.effects
            answers.append(Outcome(before, current.record, moment))
        except Refused as refusal:
            answers.append(refusal)
    return Fold(
        current,
        current.record != entry.record,
        effects,
        tuple(answers),
        version.wake_at_ms(current.record, moment),
        _valid_until_ms(entry.record, moment),
        entry.record.state,
    )


def unknown(uid: str) -> Refused:
    """The refusal of whatever concerns a version that does not exist."""
    return Refused(Reason.NOT_FOUND, f"version {uid} is not known: it was never created, or is forgotten")


def _valid_until_ms(record: VersionRecord, moment: Moment) -> int | None:
    """The earliest end of anything live that a decision at this moment may rest on."""
    ends = [worker.deadline_ms for worker in moment.workers.values() if live(worker, moment.now_ms)]
    ends += [held.deadline_ms for held in version.live_leases(record, moment.now_ms)]
    if isinstance(record.phase, Releasing):
        ends.append(record.phase.drain_deadline_ms)
    return min((end for end in ends if end > moment.now_ms), default=None)


def _follow(entry: VersionEntry, after: VersionRecord, moment: Moment, why: str) -> VersionEntry:
    """The entry once its record is `after`."""
    if after.state is entry.record.state:
        return entry if after is entry.record else replace(entry, record=after)
    ready_at_ms = entry.ready_at_ms
    if after.state is VersionState.READY and not ready_at_ms:
        ready_at_ms = moment.now_ms
    return VersionEntry(after, ready_at_ms, _reason(entry.record, after, moment, why))


def _reason(before: VersionRecord, after: VersionRecord, moment: Moment, why: str) -> str:
    if isinstance(after.phase, Degraded):
        gap = version.missing_slots(after, after.publications, moment)
        gone = sorted({s.worker_id for s in before.publications.values() if s.key not in after.publications})
        cause = why or f"the registration of {', '.join(gone[:3])} ended"
        return f"slot {gap[0] if gap else '?'} lost its last live publisher ({cause})"
    if after.state is VersionState.READY:
        return why or "every expected slot has a live publisher"
    if after.state is VersionState.RETIRED:
        return f"{why}; nobody reads and nobody publishes it" if why else "nobody reads or publishes it"
    return why
