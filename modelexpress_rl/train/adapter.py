"""The engine adapter contract: how a training engine says what it holds, and how that is staged.

An adapter knows its engine's tensors and nothing of transports: it turns them into `SourceBox`es, boxes
of tensors under their Hugging Face names, and hands these to the `ShardStaging` that it is given,
which lends or copies the memory, registers it and makes the manifest. An adapter of another kind may
make the `StagedWeightVersionShardData` itself.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from modelexpress_rl.train.config import TrainerStagingMode
from modelexpress_rl.train.fences import CompletionFence, Fence
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionRef

if TYPE_CHECKING:
    from modelexpress_rl.reshard.grid import Selection

__all__ = [
    "CompletionFence",
    "Fence",
    "ShardStaging",
    "SourceBox",
    "StagedWeightVersionShardData",
    "TrainerEngineAdapter",
    "WeightVersionShardManifest",
]


@dataclass(frozen=True, slots=True)
class MadeBlock:
    """Bytes that are made while they are captured, such as a cast: straight into the memory that is read.

    `write` gets memory of `size_bytes` to write all of: an array on the host, or a flat torch tensor of bytes
    on a GPU. It runs in a thread, and for `device_kind` "cuda" on a stream of that device. Blocks of equal
    `key` and size are the same bytes, made of the same memory.
    """

    key: Hashable
    size_bytes: int
    write: Callable[[Any], None] = field(compare=False, repr=False)
    device_kind: str = "cpu"
    device_index: int = 0


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A box of one Hugging Face tensor as it lies in this process's memory, contiguous and row-major.

    `dtype` is spelled as torch does ("torch.bfloat16"); `offset` and `shape` are in elements of the
    tensor of `full_shape`. The box's `size_bytes` bytes begin at `addr` on the device; `owner` keeps
    that memory alive, and is a torch tensor where the memory is not the CPU's. A box of a `block` has no
    memory yet: its `addr` counts from the block's beginning.
    """

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    addr: int
    size_bytes: int
    device_kind: str = "cpu"
    device_index: int = 0
    owner: Any = field(default=None, compare=False, repr=False)
    block: MadeBlock | None = None


@dataclass(frozen=True, slots=True)
class WeightVersionShardManifest:
    """What a generator must know to read a shard: the encoded manifest, and sums for the record.

    `data` is of version 1, `columns` the same in columns, for readers that ask for it; None: there is none.
    """

    data: bytes
    tensor_count: int
    total_bytes: int
    transport: str = "nixl"
    columns: bytes | None = field(default=None, compare=False, repr=False)
    _digest: list[str] = field(default_factory=list[str], init=False, compare=False, repr=False)

    @property
    def digest(self) -> str:
        """sha256 of `data`, in hex; computed once."""
        if not self._digest:
            self._digest.append(hashlib.sha256(self.data).hexdigest())
        return self._digest[0]


class TileDigests(Protocol):
    """The digests of what a shard's bytes are, for readers that verify what they read."""

    @property
    def rows(self) -> int:
        """Rows of the manifest that they are about."""
        ...

    async def answer(self, selection: Selection) -> bytes:
        """The encoded digests of a selection; each is computed once, in a thread."""
        ...

    async def table(self) -> bytes:
        """The encoded table of all, for readers that select nothing; computed in a thread, once."""
        ...

    def cancel(self) -> None:
        """Nobody will ask any more."""
        ...


@dataclass(frozen=True, slots=True)
class StagedWeightVersionShardData:
    """A staged shard: what is announced, and what keeps it readable.

    `publish_ready` completes when the bytes that the manifest describes are in place; None: they are.
    `source_reuse_ready` is a further condition of the engine's own under which the published buffers
    may be overwritten, beside that nobody reads them; None: there is none. `buffer_owner` is kept
    until then; where it has them, its `wanted_back()` is called when the version is released, and its
    `release()` at the end.
    """

    manifest: WeightVersionShardManifest
    publish_ready: CompletionFence | None = None
    source_reuse_ready: CompletionFence | None = None
    buffer_owner: Any = None
    digests: TileDigests | None = None


class ShardStaging(Protocol):
    """What the runtime offers an adapter for one version, in the staging mode of the config."""

    @property
    def mode(self) -> TrainerStagingMode:
        """IN_PLACE or one of the copy modes."""
        ...

    @property
    def makes_blocks(self) -> bool:
        """Whether `stage` takes boxes of a `MadeBlock`: in the copy modes, without blocks of columns."""
        ...

    async def reserve(self) -> None:
        """In the copy modes: have the memory that `stage` will copy to, before work that is in vain without.

        `stage` does it where this was not called; IN_PLACE it does nothing.

        Raises:
            DeadlineExceeded: every generation was being read until the deadline, or the policy is to skip.
        """
        ...

    async def stage(self, boxes: Sequence[SourceBox]) -> StagedWeightVersionShardData:
        """Lend or copy these boxes, register their memory where it isn't yet, and make the manifest.

        Raises:
            UsageError: a box is impossible or two disagree; the message names the tensor.
            DeadlineExceeded: as `reserve`.
        """
        ...


class TrainerEngineAdapter(ABC):
    """One training engine's side of a publication."""

    @property
    @abstractmethod
    def source_slot_id(self) -> str:
        """The slot of the bound tensors.

        Raises:
            StateError: nothing is bound.
        """

    @property
    @abstractmethod
    def supported_staging_modes(self) -> frozenset[TrainerStagingMode]:
        """The staging modes that `stage_shard` can do."""

    @property
    @abstractmethod
    def supported_payload_formats(self) -> frozenset[WeightPayloadFormat]:
        """The payload formats that `stage_shard` can do."""

    @abstractmethod
    def bind_tensors(self, tensors: Any) -> str:
        """Fix the tensors that are published from now on, and return their slot.

        What `tensors` may be is the engine's matter.

        Raises:
            UsageError: they are not what the engine expects.
        """

    @abstractmethod
    async def stage_shard(
        self, version: WeightVersionRef, staging: ShardStaging
    ) -> StagedWeightVersionShardData:
        """Stage the bound tensors as this version.

        Raises:
            StateError: nothing is bound, or a tensor's storage moved since it was; the message names it.
        """

    def content(self) -> object:
        """What would be staged now: equal for the same buffers, and `str` of it describes them.

        Two publications of one version and slot are the same where this is equal.
        """
        return self


class BoxAdapter(TrainerEngineAdapter):
    """An adapter that only has to say which boxes it holds."""

    @property
    def supported_staging_modes(self) -> frozenset[TrainerStagingMode]:
        """In place, or through an arena on the host or on the tensors' own devices."""
        modes = TrainerStagingMode
        return frozenset({modes.IN_PLACE, modes.COPY_TO_HOST, modes.COPY_TO_DEVICE})

    @property
    def supported_payload_formats(self) -> frozenset[WeightPayloadFormat]:
        """Whole tensors."""
        return frozenset({WeightPayloadFormat.FULL_TENSOR})

    @abstractmethod
    def boxes(self) -> tuple[SourceBox, ...]:
        """The boxes of the bound tensors as they lie now; the same tuple while nothing changed.

        Raises:
            StateError: nothing is bound, or a tensor's storage moved since it was; the message names it.
        """

    async def stage_shard(
        self, version: WeightVersionRef, staging: ShardStaging
    ) -> StagedWeightVersionShardData:
        """See `TrainerEngineAdapter`."""
        return await staging.stage(self.boxes())

    def content(self) -> object:
        """See `TrainerEngineAdapter`."""
        return BoxContent(self.boxes())


@dataclass(frozen=True, slots=True)
class BoxContent:
    """Boxes at their addresses, in words: how many tensors and bytes, and where they begin."""

    boxes: tuple[SourceBox, ...]

    def __str__(self) -> str:
        names = {box.name for box in self.boxes}
        first = min(self.boxes, key=lambda box: box.addr, default=None)
        where = "" if first is None else f", {first.name!r} at {first.addr:#x}"
        return f"{len(names)} tensors of {total_bytes(self.boxes)} bytes{where}"


def total_bytes(boxes: Sequence[SourceBox]) -> int:
    """Bytes of all boxes together."""
    return sum(box.size_bytes for box in boxes)


def want_back(data: StagedWeightVersionShardData) -> None:
    """The version is released: its readers are waited for."""
    wanted_back = getattr(data.buffer_owner, "wanted_back", None)
    if wanted_back is not None:
        wanted_back()


def let_go(data: StagedWeightVersionShardData) -> None:
    """Give back the buffers of a shard that will not be published, or is no longer read."""
    if data.digests is not None:
        data.digests.cancel()
    release = getattr(data.buffer_owner, "release", None)
    if release is not None:
        release()
