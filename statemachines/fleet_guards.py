"""What the fleet machine asks before it moves: checks that refuse a command, guards that choose a row."""

from __future__ import annotations

from statemachines.fleet_records import (
    Admit,
    Answer,
    Begin,
    Commit,
    Committing,
    Event,
    Expel,
    FleetRecord,
    Forget,
    GeneratorId,
    InstallDone,
    InstallFailed,
    Part,
    Resumed,
    ResumeFailed,
    Staged,
    StageDone,
    StageFailed,
    Staging,
    Terms,
    UndoFailed,
    Undone,
)
from statemachines.kernel import Reason, Refused

_AWAITS: dict[type, Part] = {
    StageDone: Part.STAGING,
    StageFailed: Part.STAGING,
    InstallDone: Part.INSTALLING,
    InstallFailed: Part.INSTALLING,
    Resumed: Part.RESUMING,
    ResumeFailed: Part.RESUMING,
    Undone: Part.UNDOING,
    UndoFailed: Part.UNDOING,
}

# Checks.


def quorum_can_be_reached(record: FleetRecord, event: Begin, now_ms: int) -> None:
    """Check: the fleet has as many generators as must take part, and that is one at least."""
    members = len(record.members)
    if not 1 <= event.terms.quorum <= members:
        raise Refused(
            Reason.PRECONDITION,
            f"version {event.version_id} needs a quorum of {event.terms.quorum} generators, at least 1, "
            f"and the fleet has {members}",
        )


def everyone_has_resumed(record: FleetRecord, event: Begin, now_ms: int) -> None:
    """Check: nobody is still being told of the verdict before."""
    if waiting := record.of(Part.RESUMING):
        raise Refused(
            Reason.PRECONDITION,
            f"version {event.version_id}: {', '.join(waiting)} have not been told yet that {record.current} "
            "is committed",
        )


def staging_is_kept(record: FleetRecord, event: Commit, now_ms: int) -> None:
    """Check: the time to decide is not over, so generators still keep what they staged."""
    phase = record.phase
    assert isinstance(phase, Staged)
    if now_ms >= phase.deadline_ms:
        raise Refused(
            Reason.PRECONDITION,
            f"version {phase.version_id} had to be committed {now_ms - phase.deadline_ms} ms ago: generators "
            "may have given up what they staged",
        )


def holds_the_current_version(record: FleetRecord, event: Admit, now_ms: int) -> None:
    """Check: a newcomer provably holds what the fleet serves."""
    if not event.holds.certain or event.holds.version_id != record.current:
        holds = event.holds.version_id if event.holds.certain else "parts of several versions"
        raise Refused(
            Reason.PRECONDITION,
            f"generator {event.name} holds {holds}, and the fleet serves {record.current}: a generator is "
            "admitted only with the version that is served",
        )


def is_known(record: FleetRecord, event: Expel | Forget, now_ms: int) -> None:
    """Check: the generator is one of this fleet."""
    if event.name not in record.generators:
        raise Refused(Reason.NOT_FOUND, f"generator {event.name} is not known to this fleet")


# Guards.


def is_late(record: FleetRecord, event: Answer, now_ms: int) -> bool:
    """Guard: nobody waits for this answer any more; the generator has been told something else since."""
    generator = record.generators.get(event.name)
    about = getattr(record.phase, "version_id", None)
    return generator is None or generator.part is not _AWAITS[type(event)] or event.version_id != about


def is_current(record: FleetRecord, event: Begin, now_ms: int) -> bool:
    """Guard: the fleet serves that version already."""
    return event.version_id == record.current


def too_early(record: FleetRecord, event: Event, now_ms: int) -> bool:
    """Guard: the deadline has not come, or nothing is waited for."""
    return record.deadline_ms is None or now_ms < record.deadline_ms


def quorum_has_staged(record: FleetRecord, event: Event, now_ms: int) -> bool:
    """Guard: enough generators have the version beside what they serve."""
    return len(record.of(Part.STAGED)) >= _terms(record).quorum


def quorum_holds_it(record: FleetRecord, event: Event, now_ms: int) -> bool:
    """Guard: enough generators hold the version and wait."""
    return len(record.of(Part.HELD)) >= _terms(record).quorum


def is_last_of_quorum_to_stage(record: FleetRecord, event: StageDone, now_ms: int) -> bool:
    """Guard: everybody else has answered, and with this one enough have the version."""
    return _nobody_else(record, event.name, Part.STAGING) and (
        len(record.of(Part.STAGED)) + 1 >= _terms(record).quorum
    )


def is_last_of_quorum_to_install(record: FleetRecord, event: InstallDone, now_ms: int) -> bool:
    """Guard: everybody else has answered, and with this one enough hold the version."""
    return _nobody_else(record, event.name, Part.INSTALLING) and (
        len(record.of(Part.HELD)) + 1 >= _terms(record).quorum
    )


def no_staging_is_awaited(record: FleetRecord, event: StageFailed, now_ms: int) -> bool:
    """Guard: everybody else has answered; that they are enough is known from the row above."""
    return _nobody_else(record, event.name, Part.STAGING)


def no_install_is_awaited(record: FleetRecord, event: InstallFailed, now_ms: int) -> bool:
    """Guard: everybody else has answered; that they are enough is known from the row above."""
    return _nobody_else(record, event.name, Part.INSTALLING)


def staging_is_hopeless(record: FleetRecord, event: StageFailed, now_ms: int) -> bool:
    """Guard: without this one too few are left, or the version is gone and nobody could catch up with it."""
    hopeful = len(record.of(Part.STAGING, Part.STAGED)) - 1
    return event.gone or hopeful < _terms(record).quorum


def commit_is_hopeless(record: FleetRecord, event: InstallFailed, now_ms: int) -> bool:
    """Guard: without this one too few can install."""
    return len(record.of(Part.INSTALLING, Part.HELD)) - 1 < _terms(record).quorum


def is_last_to_go_back(record: FleetRecord, event: Undone | UndoFailed, now_ms: int) -> bool:
    """Guard: everybody else has gone back, or is out."""
    return _nobody_else(record, event.name, Part.UNDOING)


def _nobody_else(record: FleetRecord, name: GeneratorId, part: Part) -> bool:
    return set(record.of(part)) <= {name}


def _terms(record: FleetRecord) -> Terms:
    assert isinstance(record.phase, (Staging, Staged, Committing))
    return record.phase.terms
