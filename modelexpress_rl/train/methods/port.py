"""The method port: how a trainer publishes a version. One client has one method.

`full_tensor` lends or copies tensors and lets generators read them over the transport; `canonical`
(object storage) uploads deltas and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from modelexpress_rl.timing import RefitRecord
from modelexpress_rl.train.fences import Fence


class StagedShard(Protocol):
    """One staged version of this rank."""

    @property
    def version_id(self) -> str: ...

    @property
    def slot_id(self) -> str: ...

    @property
    def publish_ready(self) -> Fence: ...

    @property
    def source_reuse_ready(self) -> Fence: ...

    async def publish(self) -> None:
        """Make the staged version readable; again is harmless."""
        ...


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
    ) -> StagedShard:
        """Capture a version: the bound tensors, or what is given."""
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
