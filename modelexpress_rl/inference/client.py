"""The generator's clients: the asynchronous one, and the blocking one, which is a facade over it.

with ModelExpressGeneratorClient.initialize(config) as client:
    staged = client.stage_weight(WeightVersionRef("v7"))  # live weights untouched
    client.apply_weight(staged)                           # at the engine's safe point
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from modelexpress_rl.blocking import Portal
from modelexpress_rl.errors import StateError
from modelexpress_rl.inference.async_client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.handle import AsyncStagedWeightHandle, StagedWeightHandle
from modelexpress_rl.transport.port import Agent
from modelexpress_rl.version import WeightVersion, WeightVersionRef

__all__ = [
    "AsyncModelExpressGeneratorClient",
    "AsyncStagedWeightHandle",
    "ModelExpressGeneratorClient",
    "StagedWeightHandle",
]


class ModelExpressGeneratorClient:
    """One generator rank, blocking; made by `initialize`, a context manager. Usable from any thread.

    Leases are renewed by an event loop in a thread of its own. The live weights are written in the
    thread that calls `apply_weight`.
    """

    def __init__(self, portal: Portal, client: AsyncModelExpressGeneratorClient) -> None:
        self._portal = portal
        self._client = client
        self._handle: StagedWeightHandle | None = None

    @classmethod
    def initialize(cls, config: ModelExpressGeneratorConfig, *, agent: Agent | None = None) -> Self:
        """Register with the control plane and start the transport; see the asynchronous client."""

        async def opened() -> AsyncModelExpressGeneratorClient:
            return await AsyncModelExpressGeneratorClient.initialize(config, agent=agent)

        portal = Portal("generator client")
        try:
            return cls(portal, portal.call(opened))
        except BaseException:
            portal.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def worker_id(self) -> str:
        """This process's life, as the control plane knows it."""
        return self._client.worker_id

    @property
    def model_name(self) -> str:
        """The model."""
        return self._client.model_name

    @property
    def serving_version_id(self) -> str | None:
        """The version that every parameter provably holds; None where that can't be said."""
        return self._client.serving_version_id

    @property
    def uncertain(self) -> bool:
        """Whether parameters may hold either of two versions."""
        return self._client.uncertain

    def pop_metrics(self) -> dict[str, float]:
        """Times and counters of the refit that ended last; handed out once."""
        return self._client.pop_metrics()

    def stage_weight(self, version: WeightVersionRef | WeightVersion | str) -> StagedWeightHandle:
        """Transfer and verify a version; see `AsyncModelExpressGeneratorClient.stage_weight`."""
        staged = self._portal.call(self._client.stage_weight, version)
        if self._handle is None or self._handle.staged is not staged:
            self._handle = StagedWeightHandle(staged, self._portal)
        return self._handle

    def apply_weight(self, staged: StagedWeightHandle) -> None:
        """Install a staged version in this thread; see `AsyncModelExpressGeneratorClient.apply_weight`."""
        if not isinstance(staged, StagedWeightHandle):
            raise StateError(f"apply_weight: expected a handle of stage_weight, got {type(staged).__name__}")
        job = self._portal.call(self._client.begin_install, staged.staged)
        if job is None:
            return
        failure: BaseException | None = None
        try:
            job.write()
        except BaseException as error:  # noqa: BLE001 (whatever it was, the engine is half-written)
            failure = error
        self._portal.call(self._client.end_install, staged.staged, failure)

    def close(self) -> None:
        """Leave the control plane and end the event loop; bounded, idempotent. In a forked child it does
        nothing."""
        if self._portal.closed or self._portal.forked:
            return
        try:
            self._portal.call(self._client.close)
        finally:
            self._portal.close()
