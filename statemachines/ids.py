"""Typed identities, so that a worker is never passed where a slot is meant."""

from __future__ import annotations

from hashlib import sha256
from typing import NewType

VersionId = NewType("VersionId", str)
ModelName = NewType("ModelName", str)
SlotId = NewType("SlotId", str)
WorkerId = NewType("WorkerId", str)
LeaseId = NewType("LeaseId", str)


def lease_id_of(version_id: VersionId, worker_id: WorkerId) -> LeaseId:
    """The one lease that a worker can hold on a version: 8 hex digits of sha256(version NUL worker).

    Source: the 0.7.0 wire, whose clients compute it themselves.
    """
    return LeaseId(sha256(f"{version_id}\0{worker_id}".encode()).hexdigest()[:8])
