"""What a fleet's machine must keep, as functions that say what is broken; tests run them in every state.

F1 one version: whoever is told to serve holds the fleet's version, and so does everyone who is in it and
   not in the middle of an update.
F2 together: the fleet's version changes only when a quorum holds the new one and does not serve.
F3 or none: a phase that ends without the version leaves the fleet's version as it was, and nobody in it
   who holds another.
F4 it ends: whatever is waited for has a deadline, and at it TimePassed moves on.
F5 out is out: whoever is not in the fleet comes back by Admit alone, with the fleet's version.
F6 who was never told to install provably holds what it held.
"""

from __future__ import annotations

from statemachines.fleet import decide, pending
from statemachines.fleet_records import (
    Admit,
    Committing,
    Effect,
    Event,
    FleetRecord,
    FleetState,
    Held,
    Part,
    TimePassed,
)

_ON_CURRENT = (Part.SERVING, Part.STAGING, Part.STAGED, Part.LEFT, Part.RESUMING)
_RESTING = (FleetState.IDLE, FleetState.COMMITTED, FleetState.ABORTED)
_AT_REST = (Part.SERVING, Part.OUT)
_MOST_PHASES = 4


def broken_in(record: FleetRecord) -> tuple[str, ...]:
    """What is broken in a record by itself."""
    found = [
        f"F1: {name} is {record.generators[name].part} without {record.current}"
        for name in record.of(*_ON_CURRENT)
        if record.generators[name].holds != Held(record.current)
    ]
    resting = record.state in _RESTING
    for name, one in record.generators.items():
        told = one.part is Part.RESUMING and record.state is FleetState.COMMITTED
        if resting and one.part not in _AT_REST and not told:
            found.append(f"F3: {name} is {one.part} in {record.state}")
    if (record.deadline_ms is None) is (bool(pending(record)) or not resting):
        found.append(f"F4: {record.state} waits for {pending(record)} until {record.deadline_ms}")
    return (*found, *_never_ends(record))


def broken_by(
    before: FleetRecord, event: Event, after: FleetRecord, effects: tuple[Effect, ...]
) -> tuple[str, ...]:
    """What a decision broke."""
    found: list[str] = []
    if after.current != before.current and not _was_decided(before, after):
        found.append(f"F2: {before.current} became {after.current} in {after.state}")
    if after.state is FleetState.ABORTED and after.current != before.current:
        found.append("F3: an update that was given up changed the fleet's version")
    for name in before.of(Part.OUT):
        back = after.generators.get(name)
        if back is not None and back.part is not Part.OUT and not isinstance(event, Admit):
            found.append(f"F5: {name} came back by {type(event).__name__}")
    for name in before.of(Part.STAGING, Part.STAGED):
        one = after.generators.get(name)
        if one is not None and one.part is not Part.INSTALLING and not one.holds.certain:
            found.append(f"F6: {name} was never told to install, and it is not known what it holds")
    if unheard := set(effects) - set(pending(after)):
        found.append(f"F4: {unheard} are asked for, and nobody waits for them")
    if not set(pending(after)) <= set(pending(before)) | set(effects):
        found.append(f"F4: somebody waits for a call that was not asked for: {pending(after)}")
    return tuple(found)


def _was_decided(before: FleetRecord, after: FleetRecord) -> bool:
    phase = before.phase
    return (
        isinstance(phase, Committing)
        and after.state is FleetState.COMMITTED
        and after.current == phase.version_id
        and len(after.of(Part.RESUMING)) >= phase.terms.quorum
    )


def _never_ends(record: FleetRecord) -> tuple[str, ...]:
    """Time alone must bring every fleet to rest, in a few phases."""
    after = record
    for _ in range(_MOST_PHASES):
        if after.deadline_ms is None:
            return ()
        after = decide(after, TimePassed(), after.deadline_ms).record
    return (f"F4: time alone doesn't end {record.state}",)
