"""How a fleet is updated: who must take part, and how long each phase may last."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelexpress_rl import arguments
from modelexpress_rl.errors import UsageError
from statemachines.fleet_records import Terms

_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """The terms of updates; times are seconds.

    `quorum`: how many generators must stage and install; a whole number, or a share of the fleet (0.9 of 10
    are 9), or None for all. Those outside it are out of the fleet until they have caught up.
    `stage_timeout_s`, `commit_timeout_s`, `undo_timeout_s` bound the phases (undoing may transfer the old
    version again; telling everyone to serve has the same bound), `decide_timeout_s` the time from STAGED
    to the commit. Once a quorum is through a phase, the others have `grace_s` more. A call that fails in a
    way that is worth another attempt is made `attempts` times.

    Raises:
        UsageError: a value is not acceptable; the message names it.
    """

    quorum: int | float | None = None
    stage_timeout_s: float = 900.0
    decide_timeout_s: float = 600.0
    commit_timeout_s: float = 60.0
    undo_timeout_s: float = 300.0
    grace_s: float = 10.0
    attempts: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.quorum, float):
            if not 0 < self.quorum <= 1:
                raise UsageError(f"quorum: expected a share of the fleet over 0, up to 1, got {self.quorum}")
        elif self.quorum is not None:
            arguments.whole("quorum", self.quorum, 1, 1 << 31)
        arguments.seconds("stage_timeout_s", self.stage_timeout_s)
        arguments.seconds("decide_timeout_s", self.decide_timeout_s)
        arguments.seconds("commit_timeout_s", self.commit_timeout_s)
        arguments.seconds("undo_timeout_s", self.undo_timeout_s)
        arguments.seconds("grace_s", self.grace_s, or_zero=True)
        arguments.whole("attempts", self.attempts, 1, 100)

    @property
    def keep_s(self) -> float:
        """How long a generator keeps what it staged: until no commit can come any more."""
        return self.stage_timeout_s + self.decide_timeout_s + self.commit_timeout_s + _MARGIN_S

    @property
    def hold_s(self) -> float:
        """How long a generator waits for a verdict: until none can come any more."""
        return self.commit_timeout_s + self.undo_timeout_s + _MARGIN_S

    def terms(self, members: int) -> Terms:
        """The terms for a fleet of so many."""
        return Terms(
            self._quorum_of(members),
            *(
                round(1000 * span_s)
                for span_s in (
                    self.stage_timeout_s,
                    self.decide_timeout_s,
                    self.commit_timeout_s,
                    self.undo_timeout_s,
                    self.grace_s,
                )
            ),
        )

    def _quorum_of(self, members: int) -> int:
        if self.quorum is None:
            return members
        return math.ceil(self.quorum * members - 1e-9) if isinstance(self.quorum, float) else self.quorum
