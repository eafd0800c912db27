"""The method port: how a trainer publishes a version. One client has one method.

`full_tensor` lends or copies tensors and lets generators read them over the transport; `canonical`
(object storage) uploads deltas and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from modelexpress_rl.timing import RefitRecord
from modelexpress_rl.train.fences import Fence, broken_fence, completed_fence
from modelexpress_rl.train.streams import NO_MARKS, Marks


class StagedShard(Protocol):
    """One staged version of this rank."""

    @property
    def version_id(self) -> str: ...

    @property
    def slot_id(self) -> str: ...

    @property
    def publish_ready(self) -> Fence: ...

    @property
    def published(self) -> Fence:
        """Completes when the control plane has confirmed the version; breaks where it never will."""
        ...

    @property
    def source_reuse_ready(self) -> Fence: ...

    @property
    def weights_free(self) -> Fence:
        """Completes when the trainer may write its own tensors again."""
        ...

    @property
    def skipped(self) -> bool:
        """Whether there was no room for the version, so that it is not published."""
        ...

    async def publish(self) -> None:
        """Make the staged version readable; again is harmless, and of a skipped one it does nothing."""
        ...


class SkippedShard:
    """A version for which there was no room: nothing was copied, nothing is lent."""

    skipped = True

    def __init__(self, version_id: str, slot_id: str, reason: str) -> None:
        self.version_id = version_id
        self.slot_id = slot_id
        of = f"version {version_id} in slot {slot_id}"
        self.publish_ready = broken_fence(f"publish_ready of {of}", reason)
        self.published = broken_fence(f"published of {of}", reason)
        self.source_reuse_ready = completed_fence(f"source_reuse_ready of {of}")
        self.weights_free = completed_fence(f"weights_free of {of}")

    async def publish(self) -> None:
        """See `StagedShard`."""


@dataclass(frozen=True, slots=True)
class How:
    """How a version is captured: `after` what the trainer's streams held; `in_background` once begun."""

    after: Marks = NO_MARKS
    in_background: bool = False


PLAINLY = How()


class PublishMethod(Protocol):
    """What the runtime drives."""

    @property
    def name(self) -> str:
        """What the method is called in messages."""
        ...

    @property
    def requires_registration(self) -> bool:
        """Whether the client must be a registered worker."""
        ...

    @property
    def source_slot_id(self) -> str:
        """The slot of the bound tensors.

        Raises:
            StateError: nothing is bound.
        """
        ...

    def bind_tensors(self, tensors: Any) -> str:
        """Fix the tensors, and return their slot.

        Raises:
            StateError: they are fixed already, or this method takes none.
        """
        ...

    async def stage(
        self,
        version_id: str,
        record: RefitRecord,
        *,
        tensors: Any = None,
        hf_tensor_iter: Iterable[Any] | None = None,
        how: How = PLAINLY,
    ) -> StagedShard:
        """Capture a version: the bound tensors, or what is given."""
        ...

    @property
    def room(self) -> int | None:
        """How many versions can be captured now without waiting; None where nothing bounds it."""
        ...

    def release(self, version_id: str) -> Fence:
        """Want the buffers of a version back; the fence says when they are."""
        ...

    async def prepare_delta_base(self, hf_tensor_iter: Iterable[Any]) -> None:
        """Fix the base of the first delta.

        Raises:
            StateError: this method makes no deltas.
        """
        ...

    async def aclose(self) -> None:
        """End every publication, bounded, and let go of the tensors; idempotent."""
        ...
