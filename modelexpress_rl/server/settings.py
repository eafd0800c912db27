"""What an operator can set on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelexpress_rl.errors import UsageError

MAX_SPAN_MS = 30 * 24 * 3600 * 1000
LEAST_CLAIM_MS = 2_000


@dataclass(frozen=True, slots=True)
class Settings:
    """Spans and bounds; the defaults suit a job whose steps take minutes.

    `keep_last` 0 leaves the release of versions to the orchestrator; `k` releases every version of a
    model that is older than its k newest READY ones; `keep_last_for` says otherwise for some models.
    The `max_*_per_*` are quotas, far from what a job needs: they keep a program that runs away from
    filling the store.

    Raises:
        UsageError: a value is outside what makes sense; the message names it.
    """

    drain_deadline_ms: int = 300_000
    retention_ms: int = 3_600_000
    max_lease_ttl_ms: int = 300_000
    max_registration_ttl_ms: int = 259_200_000
    keep_last: int = 0
    keep_last_for: Mapping[str, int] = field(default_factory=dict[str, int])
    max_versions_per_model: int = 100_000
    max_shards_per_version: int = 131_072
    max_workers_per_model: int = 100_000
    command_timeout_s: float = 10.0
    watch_heartbeat_ms: int = 15_000

    def __post_init__(self) -> None:
        for name in ("drain_deadline_ms", "retention_ms"):
            _within(name, getattr(self, name), 0)
        for name in ("max_lease_ttl_ms", "max_registration_ttl_ms", "watch_heartbeat_ms"):
            _within(name, getattr(self, name), 1)
        for name, keep in (("", self.keep_last), *self.keep_last_for.items()):
            if keep < 0:
                about = f"keep_last for {name!r}" if name else "keep_last"
                raise UsageError(f"{about} must be 0 (off) or more, not {keep}")
        for name in ("max_versions_per_model", "max_shards_per_version", "max_workers_per_model"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.command_timeout_s <= 0:
            raise UsageError(f"command_timeout_s must be positive, not {self.command_timeout_s}")

    @property
    def claim_ttl_ms(self) -> int:
        """How long an idempotency key stays claimed for a version that was never made: as one that ended."""
        return max(self.retention_ms, LEAST_CLAIM_MS)

    def keep_last_of(self, model_name: str) -> int:
        """How many READY versions of a model are kept; 0: all that nobody releases."""
        return self.keep_last_for.get(model_name, self.keep_last)


def _within(name: str, value_ms: int, least_ms: int) -> None:
    if not least_ms <= value_ms <= MAX_SPAN_MS:
        raise UsageError(f"{name} must be between {least_ms} and {MAX_SPAN_MS} (30 days), not {value_ms}")
