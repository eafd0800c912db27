"""The `keep_last` policy of a model: which versions a newer READY one pushes out."""

from __future__ import annotations

from collections.abc import Sequence

from statemachines.ids import VersionId
from statemachines.version import VersionRecord, VersionState

_UNRELEASED = (VersionState.STAGING, VersionState.READY, VersionState.DEGRADED)


def superseded(active: Sequence[VersionRecord], keep_last: int) -> list[VersionId]:
    """The unreleased versions older than the `keep_last` newest READY ones, oldest first.

    A version that a kept one builds on (its base, and the base's base) is kept with it: without it
    the delta could not be applied by a newcomer.
    """
    unreleased = sorted(
        (record for record in active if record.state in _UNRELEASED), key=lambda record: record.sequence
    )
    ready = [record for record in unreleased if record.state is VersionState.READY]
    if len(ready) < keep_last:
        return []
    oldest_kept = ready[-keep_last].sequence
    bases = {record.uid: record.spec.base_version_id for record in active}
    needed: set[VersionId] = set()
    for record in unreleased:
        base = record.spec.base_version_id
        while record.sequence >= oldest_kept and base is not None and base not in needed:
            needed.add(base)
            base = bases.get(base)
    return [record.uid for record in unreleased if record.sequence < oldest_kept and record.uid not in needed]
