"""What a refit reports in numbers, beside its times."""

from __future__ import annotations

from modelexpress_rl.inference.planning import PlannedVersion
from modelexpress_rl.inference.pull import PullResult
from modelexpress_rl.timing import RefitRecord

_GIB = 1 << 30


def count_pull(record: RefitRecord, planned: PlannedVersion, result: PullResult, wire_s: float) -> None:
    """Count bytes, throughput, amplification and what was verified.

    `bytes` is what was read, over all attempts; `gib_s` is that over the wall time from the first post
    to the last verified byte. `descriptors`, `staged_bytes` (read by whole rows into scratch) and
    `expected_s` are the plan's.
    """
    needed = planned.reads.plan.needed_bytes
    record.count(
        bytes=result.read_bytes,
        needed_bytes=needed,
        gib_s=result.read_bytes / wire_s / _GIB if wire_s > 0 else 0.0,
        verified_bytes=result.verified.verified_bytes,
        unverified_bytes=result.verified.unverified_bytes,
        amplification=result.read_bytes / needed if needed else 1.0,
        sources=len(planned.reads.plan.source_bytes),
        reads=len(planned.reads.chunks),
        descriptors=planned.reads.cost.runs,
        staged_bytes=planned.reads.cost.staged_bytes,
        expected_s=planned.reads.cost.expected_s,
        tensors=len(planned.needs),
        transfer_attempts=result.attempts,
    )
