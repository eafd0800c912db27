"""How this rank publishes: one method and, for the transport, its resources."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import anyio

from modelexpress_rl import envs
from modelexpress_rl.background import Background
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import ModelExpressError, StateError, UsageError
from modelexpress_rl.object_storage import ObjectStorageConfig
from modelexpress_rl.rpc import ControlPlane
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.rpc.registration import MARGIN_MS, Registration
from modelexpress_rl.timing import RefitRecord, RefitTimings
from modelexpress_rl.train.config import TrainerOverlap
from modelexpress_rl.train.fences import Fence
from modelexpress_rl.train.generations import GenerationPool
from modelexpress_rl.train.methods.canonical import build_canonical_method
from modelexpress_rl.train.methods.full_tensor import FullTensorMethod
from modelexpress_rl.train.methods.port import PLAINLY, How, PublishMethod, StagedShard
from modelexpress_rl.train.publication_ports import PublicationPorts
from modelexpress_rl.train.publications import Publications
from modelexpress_rl.train.reader_columns import ReaderColumns
from modelexpress_rl.train.resources import AgentFactory, TrainerResources, nixl_agent
from modelexpress_rl.train.security import WorkerSecurity
from modelexpress_rl.train.settings import TrainerSettings
from modelexpress_rl.train.staging import Stager
from modelexpress_rl.train.streams import NO_MARKS, Marks
from modelexpress_rl.version import WeightVersionRef

_log = logging.getLogger(__name__)
_ENGINE_FENCE_TIMEOUT_S = 300.0


class TrainerRuntime:
    """Owns a method, its resources and the timing records of one trainer rank.

    With `object_storage` set it has the canonical method at once, no transport and no registration.
    Otherwise the resources are started by `open`, and the engine adapter is built at the first tensor
    operation, because a client may be made before the process group is.
    """

    def __init__(
        self,
        method: PublishMethod,
        *,
        resources: TrainerResources | None = None,
        publications: Publications | None = None,
        timings: RefitTimings | None = None,
        background: Background | None = None,
        overlap: TrainerOverlap = TrainerOverlap.NONE,
    ) -> None:
        self._method = method
        self._resources = resources
        self._publications = publications
        self._timings = timings or RefitTimings("trainer")
        self._background = background
        self._overlap = overlap
        self._records: dict[int, tuple[StagedShard, RefitRecord]] = {}
        self._since: dict[str, float] = {}
        self._closed = False

    @classmethod
    async def open(
        cls,
        settings: TrainerSettings,
        control: ControlPlane,
        registration: Registration,
        background: Background,
        *,
        clock: Clock = MONOTONIC,
        create_agent: AgentFactory = nixl_agent,
        network: Network = GRPC,
        build_canonical: Callable[[ObjectStorageConfig], PublishMethod] = build_canonical_method,
    ) -> TrainerRuntime:
        """Build the method that the settings ask for; a failure on the way closes what was opened.

        Raises:
            UsageError: something is missing, unsupported or taken; the message names it.
        """
        if settings.object_storage is not None:
            return cls(build_canonical(settings.object_storage))
        context = settings.engine_context
        if context is None:
            raise UsageError("engine_context: required without object_storage")
        if envs.reshard_publish_digest():
            _log.warning(
                "MX_RESHARD_PUBLISH_DIGEST: the digests of 0.7's manifests are not made; readers of this "
                "version verify against tile digests, which are always served"
            )
        security = WorkerSecurity.from_environment(control, clock)
        resources = await TrainerResources.open(settings, create_agent, network, security)
        ports = PublicationPorts(
            control=control,
            registration=registration,
            background=background,
            service=resources.service,
            clock=clock,
            rpc_timeout_s=settings.rpc_timeout_s,
            release_grace_s=settings.release_grace_s,
            max_lease_ttl_ms=int(settings.max_lease_ttl_s * 1000),
            margin_ms=MARGIN_MS,
            engine_fence_timeout_s=_ENGINE_FENCE_TIMEOUT_S,
        )
        columns = ReaderColumns(settings.column_blocks)
        resources.service.reader_columns = columns.hear
        publications = Publications(ports)
        registration.on_change = publications.registration_changed
        method = FullTensorMethod(
            stager=Stager(
                resources.agent,
                generations=GenerationPool(resources.agent, settings.limits),
                columns=columns,
            ),
            publications=publications,
            background=background,
            create_adapter=context.create_adapter,
            mode=settings.staging_mode,
            payload_format=settings.payload_format,
            close_timeout_s=settings.close_timeout_s,
            staging_timeout_s=settings.staging_timeout_s,
        )
        return cls(
            method,
            resources=resources,
            publications=publications,
            background=background,
            overlap=settings.overlap,
        )

    @property
    def requires_registration(self) -> bool:
        """Whether the client must be a registered worker."""
        return self._method.requires_registration

    @property
    def endpoint(self) -> str:
        """`host:port` of the manifest service; empty where the method has none."""
        return "" if self._resources is None else self._resources.endpoint

    @property
    def source_slot_id(self) -> str:
        """The slot of the bound tensors.

        Raises:
            StateError: nothing is bound, or it is closed.
        """
        self._check_open()
        return self._method.source_slot_id

    def bind_tensors(self, tensors: Any) -> str:
        """Fix the tensors, and return their slot.

        Raises:
            UsageError: None, or not what the engine expects.
            StateError: they are fixed already, or the method takes none.
        """
        self._check_open()
        return self._method.bind_tensors(tensors)

    @property
    def room(self) -> int | None:
        """How many versions can be captured now without waiting; None where nothing bounds it."""
        self._check_open()
        return self._method.room

    async def stage(
        self,
        version: WeightVersionRef,
        *,
        tensors: Any = None,
        hf_tensor_iter: Iterable[Any] | None = None,
        how: How = PLAINLY,
    ) -> StagedShard:
        """Capture a version; its timing record ends with `publish`, or here where this fails or skips it."""
        self._check_open()
        record = self._timings.begin(version.version_id)
        try:
            staged = await self._method.stage(
                version.version_id, record, tensors=tensors, hf_tensor_iter=hf_tensor_iter, how=how
            )
        except BaseException:
            record.finish(failed=True)
            raise
        record.count(skipped=staged.skipped)
        if staged.skipped:
            record.finish()
            return staged
        self._records.setdefault(id(staged), (staged, record))
        return staged

    async def publish(self, staged: StagedShard) -> None:
        """Publish what `stage` gave; again is harmless."""
        self._check_open()
        _, record = self._records.pop(id(staged), (staged, None))
        if record is None:
            await staged.publish()
            return
        try:
            with record.stage("rollout_readiness"):
                await staged.publish()
        except BaseException:
            record.finish(failed=True)
            raise
        record.finish()

    async def publish_bound(
        self, version: WeightVersionRef, *, tensors: Any = None, after: Marks = NO_MARKS
    ) -> StagedShard:
        """Stage and publish under one timing record; what the overlap says goes on in the background.

        With an overlap the record ends here: it is what the trainer waited for. What went on by itself since
        is in the next one, as `background_publish_s` and `background_failures`.
        """
        how = How(after, in_background=self._overlap is TrainerOverlap.CAPTURE)
        staged = await self.stage(version, tensors=tensors, how=how)
        if self._overlap is TrainerOverlap.NONE or self._background is None:
            await self.publish(staged)
        elif not staged.skipped:
            _, record = self._records.pop(id(staged), (staged, None))
            if record is not None:
                since, self._since = self._since, {}
                record.count(**since)
                record.finish()
            self._background.spawn(self._publish_by_itself, staged, name=f"publication of {staged}")
        return staged

    async def _publish_by_itself(self, staged: StagedShard) -> None:
        began_s = time.perf_counter()
        try:
            await staged.publish()
        except ModelExpressError as error:  # whoever wants to know waits for `published`
            self._since["background_failures"] = self._since.get("background_failures", 0) + 1
            _log.warning("%s: not published: %s", staged, error)
        else:
            self._since["background_publish_s"] = time.perf_counter() - began_s

    def release(self, version: WeightVersionRef) -> Fence:
        """Want the buffers of a version back; the fence says when they are."""
        self._check_open()
        self._records = {
            key: entry for key, entry in self._records.items() if entry[0].version_id != version.version_id
        }
        return self._method.release(version.version_id)

    async def prepare_delta_base(self, hf_tensor_iter: Iterable[Any]) -> None:
        """Fix the base of the first delta.

        Raises:
            StateError: the method makes no deltas; the message says which does.
        """
        self._check_open()
        await self._method.prepare_delta_base(hf_tensor_iter)

    def pop_metrics(self) -> dict[str, float]:
        """The numbers of the last publication, once."""
        return self._timings.pop_metrics()

    def crashed(self, error: BaseException) -> None:
        """The background is gone: no fence may stay open."""
        if self._publications is not None:
            self._publications.crashed(error)

    async def close(self) -> None:
        """Close the method and the resources, each even where the other fails; idempotent.

        Failures are logged with their cause. Bound tensors are dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._records.clear()
        with anyio.CancelScope(shield=True):
            try:
                await self._method.aclose()
            except Exception:  # noqa: BLE001 (logged; the rest must be closed too)
                _log.exception("closing the method %s failed", self._method.name)
            if self._resources is not None:
                try:
                    await self._resources.aclose()
                except Exception:  # noqa: BLE001 (logged; the rest must be closed too)
                    _log.exception("closing the transport resources failed")

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the trainer client is closed")
