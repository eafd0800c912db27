"""Timing records: where the time of a refit went, as numbers, also of one that failed.

timings = RefitTimings("trainer")
with timings.refit("v7") as record:
    with record.stage("source_preparation"):
        ...
    record.count(bytes=1 << 30)
timings.pop_metrics()  # {"trainer_refit_e2e_s": ..., "source_preparation_s": ..., "bytes": ...}

Each finished record goes to the log as one line, `MX_REFIT_TIMING {...}`, unless `MX_REFIT_TIMING=0`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator

from modelexpress_rl import envs
from modelexpress_rl.errors import UsageError

_log = logging.getLogger(__name__)

STAGES = (
    "control_discovery",
    "source_preparation",
    "setup_registration",
    "transfer_planning",
    "wire_transfer",
    "receive_sync",
    "transformation",
    "installation",
    "post_install",
    "rollout_readiness",
)
LOG_PREFIX = "MX_REFIT_TIMING"


class RefitRecord:
    """The times of one refit; a stage that runs twice adds up. `finish` is idempotent."""

    def __init__(
        self,
        side: str,
        version_id: str,
        clock_s: Callable[[], float],
        on_finish: Callable[[RefitRecord], None],
    ) -> None:
        self.side = side
        self.version_id = version_id
        self.failed = False
        self._clock_s = clock_s
        self._on_finish = on_finish
        self._begun_s = clock_s()
        self._e2e_s: float | None = None
        self._stages_s: dict[str, float] = {}
        self._counters: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`, also where it raises.

        Raises:
            UsageError: it is not one of `STAGES`.
        """
        begun_s = self._clock_s()
        try:
            yield
        finally:
            self.add(name, self._clock_s() - begun_s)

    def add(self, name: str, duration_s: float) -> None:
        """Add time that was measured elsewhere to stage `name`."""
        if name not in STAGES:
            raise UsageError(f"stage: expected one of {', '.join(STAGES)}, got {name!r}")
        self._stages_s[name] = self._stages_s.get(name, 0.0) + duration_s

    def count(self, **counters: float) -> None:
        """Set counters, such as bytes or retries; a boolean becomes 0 or 1.

        Raises:
            UsageError: a value is not a number.
        """
        for name, value in counters.items():
            if not isinstance(value, (bool, int, float)):
                raise UsageError(f"counter {name}: expected a number, got {type(value).__name__}")
            self._counters[name] = int(value) if isinstance(value, bool) else value

    def finish(self, *, failed: bool = False) -> None:
        """End the record: it becomes the one that `pop_metrics` hands out, and is logged."""
        if self._e2e_s is None:
            self._e2e_s = self._clock_s() - self._begun_s
            self.failed = failed
            self._on_finish(self)

    @property
    def metrics(self) -> dict[str, float]:
        """`<side>_refit_e2e_s`, `<stage>_s` of every stage that ran, and the counters."""
        e2e_s = self._clock_s() - self._begun_s if self._e2e_s is None else self._e2e_s
        stages = {f"{name}_s": self._stages_s[name] for name in STAGES if name in self._stages_s}
        return {f"{self.side}_refit_e2e_s": e2e_s, **stages, **self._counters}


class RefitTimings:
    """The records of one client; `side` is "trainer" or "generator"."""

    def __init__(self, side: str, *, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._side = side
        self._clock_s = clock_s
        self._last: RefitRecord | None = None

    def begin(self, version_id: str) -> RefitRecord:
        """A record that whoever ends the refit finishes, failed or not."""
        return RefitRecord(self._side, version_id, self._clock_s, self._keep)

    @contextlib.contextmanager
    def refit(self, version_id: str) -> Iterator[RefitRecord]:
        """A record that ends with the block."""
        record = self.begin(version_id)
        try:
            yield record
        except BaseException:
            record.finish(failed=True)
            raise
        record.finish()

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the refit that ended last, handed out once; empty where there is none."""
        record, self._last = self._last, None
        return {} if record is None else record.metrics

    def _keep(self, record: RefitRecord) -> None:
        self._last = record
        if envs.refit_timing():
            line = {
                "side": record.side,
                "version_id": record.version_id,
                "failed": int(record.failed),
                **{name: round(value, 6) for name, value in record.metrics.items()},
            }
            _log.info("%s %s", LOG_PREFIX, json.dumps(line))
