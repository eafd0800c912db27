"""What a seed decides before anything runs: how many processes, how they work, and all spans."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from modelexpress_rl.server.settings import Settings
from tests.simulation.weights import ROWS

MODEL = "m"
MOST_DRIFT = 0.01


@dataclass(frozen=True)
class Options:
    """One job. Spans are short, so that a run sees many of each; their order is that of real ones."""

    replicas: int = 2
    trainers: tuple[tuple[str, str], ...] = (("t0", "s0"), ("t1", "s1"))
    generators: tuple[tuple[str, slice], ...] = (("g0", slice(0, ROWS)),)
    in_place: frozenset[str] = frozenset({"t0", "t1"})
    without_digests: frozenset[str] = frozenset()
    buffers: int = 2
    keep: int = 1
    step_s: float = 1.5
    registration_ttl_s: int = 3
    lease_ttl_s: int = 2
    max_lease_ttl_ms: int = 2_000
    drain_ms: int = 3_000
    retention_ms: int = 3_000
    rpc_timeout_s: float = 1.0
    transfer_timeout_s: float = 8.0
    release_grace_s: float = 1.0
    close_timeout_s: float = 6.0
    chaos_s: float = 18.0
    older_servers: bool = False
    """Servers that have the RPCs of 0.7 only."""
    drift: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rng: random.Random) -> Options:
        """Draw a job."""
        trainers = [("t0", "s0"), ("t1", "s1")]
        if rng.random() < 0.4:
            trainers.append(("t2", "s0"))
        if rng.random() < 0.15:
            trainers.append(("t3", "s1"))
        generators = [("g0", slice(0, ROWS))]
        if rng.random() < 0.6:
            generators.append(("g1", slice(2, 7)))
        names = [name for name, _ in trainers]
        lease_ttl_s = rng.choice((1, 2, 2))
        return cls(
            replicas=rng.choice((1, 2, 2, 3)),
            trainers=tuple(trainers),
            generators=tuple(generators),
            in_place=frozenset(name for name in names if rng.random() < 0.6),
            without_digests=frozenset(names) if rng.random() < 0.5 else frozenset(),
            keep=rng.choice((1, 1, 2)),
            step_s=rng.choice((0.5, 1.5, 3.0)),
            registration_ttl_s=rng.choice((2, 3, 3)),
            lease_ttl_s=lease_ttl_s,
            max_lease_ttl_ms=lease_ttl_s * 1000,
            drain_ms=rng.choice((0, 800, 1_500, 3_000)),
            rpc_timeout_s=rng.choice((0.6, 1.0, 1.5)),
            release_grace_s=rng.choice((0.0, 0.5, 1.5)),
            drift={
                name: 1 + rng.uniform(-MOST_DRIFT, MOST_DRIFT)
                for name in ("store", *names, *(name for name, _ in generators))
            },
            older_servers=rng.random() < 0.1,
        )

    @property
    def settings(self) -> Settings:
        """Of every server."""
        return Settings(
            drain_deadline_ms=self.drain_ms,
            retention_ms=self.retention_ms,
            max_lease_ttl_ms=self.max_lease_ttl_ms,
            command_timeout_s=2.0,
            watch_heartbeat_ms=2_000,
        )

    @property
    def reuse_bound_s(self) -> float:
        """P4 for `source_reuse_ready`, from when nothing changes any more in what is reachable."""
        separated_s = 2 * self.registration_ttl_s + self.lease_ttl_s + 1.0
        drained_s = self.release_grace_s + self.drain_ms / 1000 + self.lease_ttl_s
        return 1.5 * (separated_s + drained_s + 4 * self.rpc_timeout_s) + 4.0

    @property
    def stage_bound_s(self) -> float:
        """P4 for `stage_weight`: two waits of `transfer_timeout_s`, and what each adds."""
        return 2 * self.transfer_timeout_s + 3 * self.rpc_timeout_s + 3.0
