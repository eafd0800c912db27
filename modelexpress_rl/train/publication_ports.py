"""What the publications of one client work with."""

from __future__ import annotations

from dataclasses import dataclass

from modelexpress_rl.background import Background
from modelexpress_rl.clock import Clock
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.rpc.registration import Registration
from modelexpress_rl.train.manifest_service import ManifestService


@dataclass(frozen=True, slots=True)
class PublicationPorts:
    """What every publication of one client works with."""

    control: ControlPlane
    registration: Registration
    background: Background
    service: ManifestService
    clock: Clock
    rpc_timeout_s: float
    release_grace_s: float
    max_lease_ttl_ms: int
    margin_ms: int
    engine_fence_timeout_s: float

    @property
    def lease_bound_ms(self) -> int:
        """The longest lease that a reader can hold."""
        return self.registration.server.max_lease_ttl_ms or self.max_lease_ttl_ms
