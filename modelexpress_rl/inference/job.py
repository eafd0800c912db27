"""What is needed to install a staged version."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from modelexpress_rl.inference.adapter import StagedTensor, WeightLoader
from modelexpress_rl.reshard.explain import PlanSummary
from modelexpress_rl.timing import RefitRecord


class InstallJob:
    """A staged version that is ready to be written; `publications` are those that it came from.

    `plan` sums up what was planned to be read for it.
    """

    def __init__(
        self,
        loader: WeightLoader,
        staged: Sequence[StagedTensor],
        record: RefitRecord,
        publications: frozenset[tuple[str, str, str]],
        plan: Callable[[], PlanSummary],
    ) -> None:
        self.plan = plan
        self.record = record
        self.publications = publications
        self._loader = loader
        self._staged = staged

    def check(self) -> None:
        """Check all that can fail; see `WeightLoader.check`."""
        with self.record.stage("installation"):
            self._loader.check(self._staged)

    def write(self) -> None:
        """Write the live weights, in whatever thread the engine wants."""
        begun_s = time.perf_counter()
        try:
            self._loader.install(self._staged)
        finally:
            self.record.add("installation", time.perf_counter() - begun_s)
