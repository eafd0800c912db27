"""What the store holds now, by model: for metrics; never more often than every few seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

from modelexpress_rl.server.registry import Registry
from modelexpress_rl.server.stores.port import Place
from statemachines import version
from statemachines.ids import ModelName
from statemachines.version import VersionState
from statemachines.worker import WorkerRole, live

FRESH_S = 5.0
PAGE = 200
# Past this many versions a scrape would cost more than it tells: the count says that there are more.
MOST_VERSIONS = 5_000
_COUNTED = (VersionState.STAGING, VersionState.READY, VersionState.DEGRADED)


@dataclass(slots=True)
class ModelCensus:
    """One model: versions by state; slots and leases of those that are not released; workers."""

    versions: Counter[str] = field(default_factory=Counter[str])
    slots_expected: int = 0
    slots_covered: int = 0
    leases: int = 0
    newest_ready_sequence: int = 0
    workers: Counter[tuple[str, bool]] = field(default_factory=Counter[tuple[str, bool]])
    uncertain_generators: int = 0
    generators_on_newest: int = 0


@dataclass(slots=True)
class Census:
    """Every model; `complete` is False where there were too many versions to look at."""

    models: dict[ModelName, ModelCensus] = field(default_factory=dict[ModelName, ModelCensus])
    complete: bool = True

    def of(self, model_name: ModelName) -> ModelCensus:
        return self.models.setdefault(model_name, ModelCensus())


class Censuses:
    """Takes a census when it is asked for one and the last is old."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._last: Census | None = None
        self._taken_at_s = 0.0

    async def now(self) -> Census:
        """What the store holds, at most 5 s ago.

        Raises:
            StoreUnavailable: it could not be asked.
        """
        if self._last is None or monotonic() - self._taken_at_s > FRESH_S:
            self._last = await _take(self._registry)
            self._taken_at_s = monotonic()
        return self._last


async def _take(registry: Registry) -> Census:
    census = Census()
    newest_ready = await _count_versions(registry, census)
    now_ms, workers = await registry.registrations(None)
    for worker in workers:
        model = census.of(worker.model_name)
        model.workers[(worker.role.value, live(worker, now_ms))] += 1
        if worker.role is WorkerRole.GENERATOR and live(worker, now_ms):
            model.uncertain_generators += worker.uncertain
            model.generators_on_newest += (
                not worker.uncertain
                and worker.serving is not None
                and worker.serving == newest_ready.get(worker.model_name)
            )
    return census


async def _count_versions(registry: Registry, census: Census) -> dict[ModelName, str]:
    newest_ready: dict[ModelName, str] = {}
    after: Place | None = None
    seen = 0
    while True:
        page = await registry.list_versions(None, after=after, limit=PAGE)
        for found in page:
            record = found.record
            model = census.of(record.spec.model_name)
            model.versions[record.state.value] += 1
            model.leases += len(version.live_leases(record, found.moment.now_ms))
            if record.state in _COUNTED:
                missing = version.missing_slots(record, record.publications, found.moment)
                model.slots_expected += len(record.spec.expected_slots)
                model.slots_covered += len(record.spec.expected_slots) - len(missing)
            if record.state is VersionState.READY:
                newest_ready[record.spec.model_name] = record.uid
                model.newest_ready_sequence = record.sequence
        seen += len(page)
        if len(page) < PAGE:
            return newest_ready
        if seen >= MOST_VERSIONS:
            census.complete = False
            return newest_ready
        after = Place(page[-1].record.spec.model_name, page[-1].record.sequence)
