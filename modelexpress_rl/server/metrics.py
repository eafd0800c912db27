"""The server's Prometheus metrics; names and meanings are in docs/operations.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric

from modelexpress_rl.server.census import Census
from modelexpress_rl.server.observer import Observer
from statemachines.version import VersionState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RPC_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STORE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)
_GROUP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(slots=True)
class _OfMethod:
    in_flight: Gauge
    duration_s: Histogram
    ended: dict[str, Counter] = field(default_factory=dict[str, Counter])


class Metrics(Observer):
    """Counts what it hears; `exposition` writes it down, with a census of the store."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._census: Census | None = None
        self._methods: dict[str, _OfMethod] = {}
        self._operations: dict[str, Histogram] = {}
        registry.register(_CensusCollector(lambda: self._census))
        self._rpcs = Counter("mx_rl_rpcs", "RPCs that ended", ["method", "code"], registry=registry)
        self._rpc_s = Histogram(
            "mx_rl_rpc_seconds", "Duration of unary RPCs", ["method"], buckets=_RPC_S, registry=registry
        )
        self._in_flight = Gauge("mx_rl_rpcs_in_flight", "RPCs under way", ["method"], registry=registry)
        self._group = Histogram(
            "mx_rl_commit_group_size",
            "Commands that were decided together",
            buckets=_GROUP,
            registry=registry,
        )
        self._commits = Counter("mx_rl_commits", "Commits of version records", registry=registry)
        self._conflicts = Counter(
            "mx_rl_commit_conflicts", "Commits that were refused and decided again", registry=registry
        )
        self._expiry_lag = Gauge(
            "mx_rl_expiry_lag_seconds", "Lateness of the longest overdue version", registry=registry
        )
        self._store_s = Histogram(
            "mx_rl_store_seconds",
            "Duration of store operations",
            ["operation"],
            buckets=_STORE_S,
            registry=registry,
        )
        self._store_errors = Counter(
            "mx_rl_store_errors", "Store operations that failed", ["operation"], registry=registry
        )
        self._reachable = Gauge("mx_rl_store_reachable", "1 where the store answers", registry=registry)
        self._info = Gauge("mx_rl_info", "Always 1", ["version", "store"], registry=registry)
        self._watchers = Gauge("mx_rl_watchers", "Open watch streams", registry=registry)
        self._lanes = Gauge("mx_rl_busy_versions", "Versions with commands under way", registry=registry)

    def about(
        self, version: str, store_kind: str, watchers: Callable[[], int], lanes: Callable[[], int]
    ) -> None:
        """Say what server this is, and where two gauges are read."""
        self._info.labels(version, store_kind).set(1)
        self._watchers.set_function(watchers)
        self._lanes.set_function(lanes)

    def exposition(self, census: Census | None) -> bytes:
        """All metrics, in Prometheus' text format; None leaves out what only the store knows."""
        self._census = census
        return generate_latest(self._registry)

    def rpc_began(self, method: str) -> None:
        self._of_method(method).in_flight.inc()

    def rpc_ended(self, method: str, code: str, duration_s: float, *, stream: bool) -> None:
        of_method = self._of_method(method)
        of_method.in_flight.dec()
        ended = of_method.ended.get(code)
        if ended is None:
            ended = of_method.ended[code] = self._rpcs.labels(method, code)
        ended.inc()
        if not stream:
            of_method.duration_s.observe(duration_s)

    def _of_method(self, method: str) -> _OfMethod:
        """The series of a method; looking them up by label costs more than counting."""
        found = self._methods.get(method)
        if found is None:
            found = _OfMethod(self._in_flight.labels(method), self._rpc_s.labels(method))
            self._methods[method] = found
        return found

    def group_decided(self, size: int) -> None:
        self._group.observe(size)

    def committed(self) -> None:
        self._commits.inc()

    def conflicted(self) -> None:
        self._conflicts.inc()

    def expiry_lagged(self, lag_s: float) -> None:
        self._expiry_lag.set(lag_s)

    def store_answered(self, operation: str, duration_s: float, *, failed: bool) -> None:
        series = self._operations.get(operation)
        if series is None:
            series = self._operations[operation] = self._store_s.labels(operation)
        series.observe(duration_s)
        if failed:
            self._store_errors.labels(operation).inc()

    def store_reachable(self, reachable: bool) -> None:
        self._reachable.set(reachable)


class _CensusCollector:
    """Gauges that are made anew at each scrape, so that a model that is gone leaves nothing behind."""

    def __init__(self, census: Callable[[], Census | None]) -> None:
        self._census = census

    def collect(self) -> Iterable[Metric]:
        census = self._census()
        if census is None:
            return
        versions = _gauge("mx_rl_versions", "Versions", "model", "state")
        expected = _gauge("mx_rl_slots_expected", "Slots of versions that are not released", "model")
        covered = _gauge("mx_rl_slots_covered", "Those with a live publisher", "model")
        leases = _gauge("mx_rl_leases", "Live leases", "model")
        newest = _gauge("mx_rl_newest_ready_sequence", "Sequence of the newest READY version", "model")
        workers = _gauge("mx_rl_workers", "Registrations", "model", "role", "life")
        uncertain = _gauge("mx_rl_generators_uncertain", "Live generators with no nameable version", "model")
        current = _gauge(
            "mx_rl_generators_on_newest", "Live generators that serve the newest READY version", "model"
        )
        complete = _gauge("mx_rl_census_complete", "0 where there were too many versions to count")
        complete.add_metric([], int(census.complete))
        for name, model in census.models.items():
            for state in VersionState:
                if state is not VersionState.FORGOTTEN:
                    versions.add_metric([name, state.value], model.versions[state.value])
            expected.add_metric([name], model.slots_expected)
            covered.add_metric([name], model.slots_covered)
            leases.add_metric([name], model.leases)
            newest.add_metric([name], model.newest_ready_sequence)
            for (role, lives), count in model.workers.items():
                workers.add_metric([name, role, "LIVE" if lives else "EXPIRED"], count)
            uncertain.add_metric([name], model.uncertain_generators)
            current.add_metric([name], model.generators_on_newest)
        yield from (versions, expected, covered, leases, newest, workers, uncertain, current, complete)


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, labels=labels)
