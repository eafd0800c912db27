"""What an update came to: who holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelexpress_rl.errors import TryAgainError
from statemachines.fleet_records import Aborted, FleetRecord, Held, Part


@dataclass(frozen=True, slots=True)
class FleetReport:
    """How a fleet stands after an update to `version_id`.

    `members` serve `current_version_id`, each in every parameter. `out` are not in the fleet, and why;
    nothing should be sent to them until they have been admitted again. `holds` says what each of both was
    last known to hold. `metrics` are seconds by phase: `stage_s`, `decide_s`, `commit_s` (from the commit
    to the verdict), `settle_s` (from the verdict until everyone was told, or went back), `update_s`.
    """

    version_id: str
    committed: bool
    current_version_id: str | None
    members: tuple[str, ...]
    out: Mapping[str, str]
    holds: Mapping[str, Held]
    why: str
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, version_id: str, record: FleetRecord, metrics: Mapping[str, float]) -> FleetReport:
        """The report of an update whose record rests again."""
        generators = record.generators.items()
        return cls(
            version_id=version_id,
            committed=record.current == version_id,
            current_version_id=record.current,
            members=record.members,
            out={name: one.why for name, one in generators if one.part is Part.OUT},
            holds={name: one.holds for name, one in generators},
            why=record.phase.why if isinstance(record.phase, Aborted) else "",
            metrics=metrics,
        )

    def __str__(self) -> str:
        verdict = "is served" if self.committed else f"was given up ({self.why})"
        serving = f"{len(self.members)} generators serve {self.current_version_id}"
        lines = [f"version {self.version_id} {verdict}: {serving}"]
        lines += [f"out: {name} holds {words(self.holds[name])}: {why}" for name, why in self.out.items()]
        return "; ".join(lines)


class FleetAborted(TryAgainError):
    """A fleet serves what it served before, and not the version that it was to be updated to."""

    def __init__(self, report: FleetReport) -> None:
        super().__init__(str(report))
        self.report = report


def words(held: Held) -> str:
    """What is held, in words."""
    version = held.version_id or "what it was started with"
    return version if held.certain else f"nobody knows what (last known: {version})"
