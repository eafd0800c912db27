"""FULL_TENSOR: generators read the whole tensors, from the trainer's memory or from a copy of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import anyio

from modelexpress_rl import arguments
from modelexpress_rl.background import Background
from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.timing import RefitRecord
from modelexpress_rl.train.adapter import StagedWeightVersionShardData, TrainerEngineAdapter, let_go
from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.digest_job import DigestJob
from modelexpress_rl.train.fences import Fence, wait_for
from modelexpress_rl.train.generations import NoRoom
from modelexpress_rl.train.methods.port import PLAINLY, How, SkippedShard
from modelexpress_rl.train.publication import Publication
from modelexpress_rl.train.publications import Publications
from modelexpress_rl.train.staging import COPY_MODES, OneStaging, Stager
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionRef

_log = logging.getLogger(__name__)

_DEREGISTER_TIMEOUT_S = 5.0


class FullTensorMethod:
    """Publishes tensors over the transport; the engine adapter is built at the first tensor operation."""

    name = "FULL_TENSOR over the transport"
    requires_registration = True

    def __init__(
        self,
        *,
        stager: Stager,
        publications: Publications,
        background: Background,
        create_adapter: Callable[[], TrainerEngineAdapter],
        mode: TrainerStagingMode,
        payload_format: WeightPayloadFormat,
        close_timeout_s: float,
        staging_timeout_s: float,
    ) -> None:
        self._stager = stager
        self._publications = publications
        self._background = background
        self._create_adapter = create_adapter
        self._mode = mode
        self._payload_format = payload_format
        self._close_timeout_s = close_timeout_s
        self._staging_timeout_s = staging_timeout_s
        self._adapter: TrainerEngineAdapter | None = None
        self._bound = False
        self._closed = False

    @property
    def source_slot_id(self) -> str:
        """The slot of the bound tensors, or of those that the engine context names."""
        return self._engine().source_slot_id

    def bind_tensors(self, tensors: Any) -> str:
        """See `PublishMethod`.

        Raises:
            StateError: tensors are bound already.
            UsageError: None, or not what the engine expects.
        """
        if tensors is None:
            raise UsageError("tensors: expected the tensors to bind, got None")
        if self._bound:
            raise StateError("bind_tensors: tensors are bound already, and stay bound until close")
        slot_id = _slot(self._engine().bind_tensors(tensors))
        self._bound = True
        return slot_id

    async def stage(
        self,
        version_id: str,
        record: RefitRecord,
        *,
        tensors: Any = None,
        hf_tensor_iter: Iterable[Any] | None = None,
        how: How = PLAINLY,
    ) -> Publication | SkippedShard:
        """See `PublishMethod`; returns at `publish_ready`, or before where the capture goes on by itself.

        Staging the same version with the same tensors again returns what is there.

        Raises:
            StateError: another content is staged or published as this version; or a tensor moved.
            UsageError: `hf_tensor_iter` was given, which this method does not read.
            DeadlineExceeded: every generation was being read until the deadline.
        """
        if hf_tensor_iter is not None:
            raise UsageError("hf_tensor_iter: only a trainer with object_storage reads it; give tensors")
        with record.stage("source_preparation"):
            adapter = self._engine() if tensors is None else self._engine_for(tensors)
            slot_id, content = _slot(adapter.source_slot_id), _Content(self._mode, adapter.content())
        publication, is_new = self._publications.begin(version_id, slot_id, content)
        if not is_new:
            if not how.in_background:
                await wait_for(publication.publish_ready, self._staging_timeout_s, str(publication))
            return publication
        self._mark_lending(publication)
        staging = OneStaging(
            self._stager,
            self._mode,
            version_id=version_id,
            timeout_s=self._staging_timeout_s,
            record=record,
            after=how.after,
            spawn=self._background.spawn if how.in_background else None,
        )
        try:
            with publication.capturing():
                data = await adapter.stage_shard(WeightVersionRef(version_id), staging)
                is_ready = data.publish_ready is None
                if is_ready or not how.in_background:
                    await self._captured(publication, data, record)
        except NoRoom as full:
            _log.warning("%s: not published: %s", publication, full)
            return SkippedShard(version_id, slot_id, str(full))
        finally:
            staging.end()
        if how.in_background and not is_ready:
            self._background.spawn(self._go_on, publication, data, record, name=f"capture of {publication}")
        return publication

    @property
    def room(self) -> int | None:
        """See `PublishMethod`."""
        return self._stager.generations.room if self._mode in COPY_MODES else None

    async def _captured(
        self, publication: Publication, data: StagedWeightVersionShardData, record: RefitRecord
    ) -> None:
        try:
            if data.publish_ready is not None:
                await wait_for(data.publish_ready, self._staging_timeout_s, f"capture of {publication}")
            publication.captured(data)
        except BaseException:
            let_go(data)
            raise
        record.count(tensors=data.manifest.tensor_count, bytes=data.manifest.total_bytes)
        if isinstance(data.digests, DigestJob):
            self._background.spawn(data.digests.start, name=f"digests of {publication}")

    async def _go_on(
        self, publication: Publication, data: StagedWeightVersionShardData, record: RefitRecord
    ) -> None:
        """The rest of a capture, in the background; its failure is told by the publication's fences."""
        try:
            with publication.capturing():
                await self._captured(publication, data, record)
        except BaseException as error:
            let_go(data)  # again is harmless
            if not isinstance(error, Exception):
                raise
            _log.warning("%s: not captured: %s", publication, error)

    def release(self, version_id: str) -> Fence:
        """See `PublishMethod`."""
        return self._publications.release(version_id)

    async def prepare_delta_base(self, hf_tensor_iter: Iterable[Any]) -> None:
        """See `PublishMethod`."""
        raise StateError(
            "prepare_delta_base: needs the canonical method (object_storage with WRITE_TO_STORAGE); this "
            f"client publishes {self.name}"
        )

    async def aclose(self) -> None:
        """See `PublishMethod`."""
        self._closed = True
        self._stager.generations.begin_close()
        try:
            await self._publications.aclose(self._close_timeout_s)
        finally:
            self._adapter = None
            with anyio.CancelScope(shield=True), anyio.move_on_after(_DEREGISTER_TIMEOUT_S):
                await self._stager.aclose()

    def _engine(self) -> TrainerEngineAdapter:
        if self._closed:
            raise StateError("the trainer client is closed")
        if self._adapter is None:
            self._adapter = self._checked(self._create_adapter())
        return self._adapter

    def _engine_for(self, tensors: Any) -> TrainerEngineAdapter:
        adapter = self._checked(self._create_adapter())
        adapter.bind_tensors(tensors)
        return adapter

    def _checked(self, adapter: TrainerEngineAdapter) -> TrainerEngineAdapter:
        kind = type(adapter).__name__
        if self._mode not in adapter.supported_staging_modes:
            accepted = ", ".join(sorted(adapter.supported_staging_modes))
            raise UsageError(f"staging_mode {self._mode.value}: {kind} supports {accepted}")
        if self._payload_format not in adapter.supported_payload_formats:
            accepted = ", ".join(sorted(adapter.supported_payload_formats))
            raise UsageError(f"payload_format {self._payload_format.value}: {kind} supports {accepted}")
        return adapter

    def _mark_lending(self, publication: Publication) -> None:
        publication.lends_weights = self._mode is TrainerStagingMode.IN_PLACE
        if not publication.lends_weights:
            return
        others = [one for one in self._publications.live if one is not publication]
        if others:
            _log.warning(
                "%s lends tensors that %s still lends: what was read of the older is torn if they were "
                "written since; wait for its source_reuse_ready before the optimizer step",
                publication,
                others[0],
            )


def _slot(slot_id: str) -> str:
    """An engine's slot, once it is known that it can be sent."""
    return arguments.name("the slot of the tensors", slot_id)


@dataclass(frozen=True, slots=True)
class _Content:
    """What is staged and how: another mode is another content."""

    mode: TrainerStagingMode
    content: object

    def __str__(self) -> str:
        return f"{self.content} ({self.mode.value})"
