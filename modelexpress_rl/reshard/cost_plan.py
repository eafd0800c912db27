"""What a plan's reads are expected to take."""

from __future__ import annotations

from dataclasses import dataclass

from modelexpress_rl.reshard.cost import TransportCost
from modelexpress_rl.reshard.row_staging_wire import Wire


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Sums of a plan, and the seconds that they cost by the constants of a machine."""

    read_bytes: int
    staged_bytes: int
    copied_bytes: int
    runs: int
    reads: int
    expected_s: float

    @classmethod
    def of(cls, wire: Wire, cost: TransportCost, *, reads: int) -> PlanCost:
        """Of what is posted in `reads` reads."""
        total, copied = wire.plan.total_bytes, wire.copied_bytes
        runs = max(wire.plan.descriptors, reads)  # a run that goes on in the next read is one more there
        expected_s = cost.seconds(wire_bytes=total, runs=runs, reads=reads, copied_bytes=copied)
        return cls(total, wire.staged_bytes, copied, runs, reads, float(expected_s))
