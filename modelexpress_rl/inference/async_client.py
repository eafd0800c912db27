"""The generator's asynchronous client: stage a version while the engine works, install it at a safe point.

client = await AsyncModelExpressGeneratorClient.initialize(config)
staged = await client.stage_weight(WeightVersionRef("v7"))  # live weights untouched
await client.apply_weight(staged)                           # at the engine's safe point
await client.close()
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import EngineUncertain, LeaseLost, StateError, VersionGone
from modelexpress_rl.inference.config import GeneratorSettings, ModelExpressGeneratorConfig
from modelexpress_rl.inference.handle import AsyncStagedWeightHandle
from modelexpress_rl.inference.job import InstallJob
from modelexpress_rl.inference.lease import HeldLease
from modelexpress_rl.inference.metrics import count_pull
from modelexpress_rl.inference.parts import GeneratorParts
from modelexpress_rl.inference.planning import PlannedVersion
from modelexpress_rl.inference.pull import Pull, PullSettings
from modelexpress_rl.inference.sources import VersionSources
from modelexpress_rl.inference.staging import Arena
from modelexpress_rl.inference.tasks import run_to_end, run_under
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.timing import RefitRecord, RefitTimings
from modelexpress_rl.transport.port import Agent
from modelexpress_rl.version import WeightVersion, WeightVersionRef
from statemachines.ids import VersionId
from statemachines.installation_records import (
    Event,
    Install,
    InstallationState,
    Installed,
    InstallFailed,
    PlanMade,
    PullStarted,
    PullVerified,
)
from statemachines.kernel import Refused

_CLOSE_STAGING_S = 5.0


class AsyncModelExpressGeneratorClient:
    """One generator rank. Made by `initialize`; an async context manager that closes itself.

    One version is staged at a time. Nothing touches the live weights but `apply_weight`; a stage that
    fails or is cancelled leaves them, and returns its lease or lets it lapse.
    """

    def __init__(self, parts: GeneratorParts) -> None:
        self._parts = parts
        self._installation = parts.installation
        self._timings = RefitTimings("generator")
        self._active: AsyncStagedWeightHandle | None = None
        self._staging: _Staging | None = None
        self._jobs: dict[AsyncStagedWeightHandle, InstallJob] = {}
        self._installed: tuple[VersionId, frozenset[tuple[str, str, str]]] | None = None
        self._written = anyio.Event()
        self._closed = False

    @classmethod
    async def initialize(
        cls,
        config: ModelExpressGeneratorConfig,
        *,
        agent: Agent | None = None,
        clock: Clock = MONOTONIC,
        network: Network = GRPC,
    ) -> Self:
        """Register with the control plane and start the transport.

        `agent` is used instead of a NIXL agent of its own, and stays the caller's to close.

        Raises:
            UsageError: the configuration is not acceptable, or the engine can't take its weights so.
            RpcError: the control plane refuses, or can't be reached.
        """
        return cls(await GeneratorParts.open(GeneratorSettings.of(config), agent, clock, network))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def worker_id(self) -> str:
        """This process's life, as the control plane knows it."""
        return self._parts.settings.worker_id

    @property
    def model_name(self) -> str:
        """The model."""
        return self._parts.settings.model_name

    @property
    def serving_version_id(self) -> str | None:
        """The version that every parameter provably holds; None where that can't be said."""
        return self._installation.serving

    @property
    def uncertain(self) -> bool:
        """Whether an install failed half-way, or is under way: parameters may hold either version."""
        return self._installation.uncertain

    def pop_metrics(self) -> dict[str, float]:
        """Times and counters of the refit that ended last, failed or not; handed out once."""
        return self._timings.pop_metrics()

    async def stage_weight(self, version: WeightVersionRef | WeightVersion | str) -> AsyncStagedWeightHandle:
        """Transfer and verify a version; live weights are not touched.

        Waits until the version is READY, and then for the transfer, each at most MX_TRANSFER_TIMEOUT.
        The version that is staged already gives the same handle. The version that is served already,
        from the same publications (or gone since), gives a handle that is applied; nothing moves.

        Raises:
            StateError: another version is staged, or the client is closed.
            VersionGone: the version was released, or is not known.
            DeadlineExceeded: it was not READY in time, or a worker did not answer.
            IncompleteVersionError, GeometryError: publications and engine don't fit; names the tensor.
            ManifestError: a manifest is not the one that was announced.
            DigestMismatch, TransferError, TransferTimeout: the bytes did not arrive; names the source.
            LeaseLost: the lease lapsed before the last read had completed.
        """
        version_id = _version_id(version)
        while True:
            self._check()
            if self._active is not None:
                if self._active.version_id == version_id:
                    return self._active
                raise StateError(
                    f"version {version_id}: {self._active.version_id} is staged; apply or release it first"
                )
            if self._staging is None:
                break
            if self._staging.version_id != version_id:
                raise StateError(f"version {version_id}: version {self._staging.version_id} is being staged")
            await self._staging.ended.wait()
        staging = self._staging = _Staging(version_id)
        try:
            with staging.scope:
                return await self._stage(version_id)
        finally:
            self._staging = None
            staging.ended.set()
        raise StateError(f"version {version_id}: the client was closed while it was staged")

    async def apply_weight(self, staged: AsyncStagedWeightHandle) -> None:
        """Install a staged version; to be called at the engine's safe point. Applied twice, it is a no-op.

        The engine is written in a thread of its own; a cancellation waits until it is through.

        Raises:
            StateError: the handle is not the active one of this client.
            EngineUncertain: writing stopped half-way. Stage a version again: it is really installed.
            ModelExpressError: a check before the first write failed; live weights are not touched, and
                the version is still staged.
        """
        await anyio.lowlevel.checkpoint()  # a cancellation that came before takes effect here
        job = await self.begin_install(staged)
        if job is None:
            return
        with anyio.CancelScope(shield=True):
            failure, cancelled = await run_to_end(job.write)
            await self.end_install(staged, failure)
        if cancelled is not None:
            raise cancelled

    async def begin_install(self, staged: AsyncStagedWeightHandle) -> InstallJob | None:
        """Check all that can fail, and enter INSTALLING; None where it is applied already.

        For whoever writes the weights in a thread of its choice: `write` the job, then `end_install`.
        """
        self._check()
        if not isinstance(staged, AsyncStagedWeightHandle):
            raise StateError(f"apply_weight: expected a handle of stage_weight, got {type(staged).__name__}")
        job = self._jobs.get(staged)
        if job is None:
            if staged.applied:
                return None
            raise StateError(
                f"version {staged.version_id}: its staging has been given up, or is not this client's"
            )
        if self._installation.state is InstallationState.INSTALLING:
            raise StateError(f"version {staged.version_id} is being installed")
        job.check()
        self._installation.feed(Install())
        self._written = anyio.Event()
        return job

    async def end_install(self, staged: AsyncStagedWeightHandle, failure: BaseException | None) -> None:
        """What `write` came to: the version is served, or nothing can be said to be.

        Raises:
            EngineUncertain: from `failure`; or `failure` itself where it is no Exception.
        """
        job = self._jobs.pop(staged)
        self._active = None
        self._written.set()
        job.record.finish(failed=failure is not None)
        staged._end(applied=failure is None)
        if failure is None:
            self._installed = (VersionId(staged.version_id), job.publications)
            self._installation.feed(Installed())
            return
        self._installation.feed(InstallFailed(f"{type(failure).__name__}: {failure}"))
        if not isinstance(failure, Exception):
            raise failure
        raise EngineUncertain(
            f"version {staged.version_id}: its install failed half-way, so parameters may hold either "
            f"version: {failure}"
        ) from failure

    async def close(self) -> None:
        """Leave: end a stage under way, give up what is staged, return leases; bounded, idempotent."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            if self._staging is not None:
                self._staging.scope.cancel()
                with anyio.move_on_after(_CLOSE_STAGING_S):
                    await self._staging.ended.wait()
            if self._installation.state is InstallationState.INSTALLING:
                with anyio.move_on_after(_CLOSE_STAGING_S):
                    await self._written.wait()
            if self._active is not None and self._installation.state is not InstallationState.INSTALLING:
                await self._active.release()
            await self._parts.aclose()

    def _check(self) -> None:
        if self._closed:
            raise StateError(f"the generator client {self.worker_id} is closed")
        self._parts.background.check()

    async def _stage(self, version_id: VersionId) -> AsyncStagedWeightHandle:
        record = self._timings.begin(version_id)
        try:
            lease = await self._lease(version_id, record)
            if lease is None:
                record.finish()
                return AsyncStagedWeightHandle(version_id, record, self._release, applied=True)
            self._installation.begin(lease)
            job = await run_under(lambda: self._transfer(lease, record), lease.keep)
        except BaseException as error:
            self._installation.abandon(f"{type(error).__name__}: {error}")
            record.finish(failed=True)
            raise
        handle = AsyncStagedWeightHandle(version_id, record, self._release, plan=job.plan)
        self._active, self._jobs[handle] = handle, job
        return handle

    async def _lease(self, version_id: VersionId, record: RefitRecord) -> HeldLease | None:
        """The lease on the version; None where its very publications are served already."""
        served = not self.uncertain and self.serving_version_id == version_id
        deadline = anyio.current_time() + self._parts.settings.transfer_timeout_s
        with record.stage("control_discovery"):
            try:
                lease = await self._parts.session.acquire(version_id, deadline)
            except VersionGone:
                if served:
                    return None
                raise
        if served and self._installed == (version_id, _identities(lease)):
            self._parts.session.give_back(lease)
            return None
        return lease

    async def _transfer(self, lease: HeldLease, record: RefitRecord) -> InstallJob:
        parts, installation = self._parts, self._installation
        deadline = anyio.current_time() + parts.settings.transfer_timeout_s
        with record.stage("source_preparation"):
            assert installation.work is not None
            departed = installation.work.departed
            sources = await parts.fetcher.fetch(lease.version_id, lease.publications, deadline, departed)
            sources = sources.without(lease.gone) if lease.gone else sources
        with record.stage("transfer_planning"):
            planned = await parts.planning.planned(sources)
        self._feed(PlanMade(planned.reads.workers, proven=True))
        with record.stage("setup_registration"):
            arena = await parts.pool.take(planned.arena_bytes)
        work = installation.work
        assert work is not None
        work.arena = arena
        self._feed(PullStarted(lease.confirmed))
        pull = work.pull = self._pull(sources, planned, arena)
        begun_s = anyio.current_time()
        with record.stage("wire_transfer"):
            result = await pull.run(deadline)
        self._feed(PullVerified(result.last_read_ms, digests_agree=True))
        parts.cache.end_turn()
        count_pull(record, planned, result, anyio.current_time() - begun_s)
        return InstallJob(
            planned.loader,
            planned.staged(pull.arena),
            record,
            _identities(lease),
            plan=lambda: planned.reads.summary,
        )

    def _pull(self, sources: VersionSources, planned: PlannedVersion, arena: Arena) -> Pull:
        parts = self._parts
        return Pull(
            parts.agent,
            parts.cache,
            parts.fetcher,
            parts.pool,
            parts.clock,
            planned=planned,
            sources=sources,
            arena=arena,
            settings=PullSettings(
                parts.settings.transfer_timeout_s,
                parts.settings.max_transfer_attempts,
                parts.planning.spread,
                max_in_flight_bytes=parts.settings.max_in_flight_bytes,
                stall_timeout_s=parts.settings.stall_timeout_s,
            ),
            on_failover=self._installation.fail_over,
        )

    def _feed(self, event: Event) -> None:
        try:
            self._installation.feed(event)
        except Refused as refused:
            raise LeaseLost(str(refused)) from refused

    def _release(self, handle: AsyncStagedWeightHandle) -> None:
        if self._installation.state is InstallationState.INSTALLING:
            raise StateError(f"version {handle.version_id} is being installed: it can't be released now")
        if self._jobs.pop(handle, None) is not None:
            self._active = None
            handle._record.finish()
            self._installation.abandon("its handle was released")


class _Staging:
    """A stage under way."""

    def __init__(self, version_id: VersionId) -> None:
        self.version_id = version_id
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


def _version_id(version: WeightVersionRef | WeightVersion | str) -> VersionId:
    if not isinstance(version, (WeightVersionRef, WeightVersion)):
        version = WeightVersionRef(version)
    return VersionId(version.version_id)


def _identities(lease: HeldLease) -> frozenset[tuple[str, str, str]]:
    return frozenset(publication.identity for publication in lease.publications)
