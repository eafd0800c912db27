"""What a Megatron rank publishes: its specs, the aliases over its memory, its slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.adapter import BoxAdapter, SourceBox
from modelexpress_rl.train.config import TrainerEngineContext
from modelexpress_rl.train.engines.megatron.aliases import HfShard, HfTensor, build_hf_aliases
from modelexpress_rl.train.engines.megatron.from_model import build_megatron_tensor_specs_from_model
from modelexpress_rl.train.engines.megatron.hf_naming import HfNaming
from modelexpress_rl.train.engines.megatron.slots import megatron_source_slot_id
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec
from modelexpress_rl.train.engines.memory_of import require_plain_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MegatronTrainerContext(TrainerEngineContext):
    """Where a Megatron trainer's tensors come from, when they aren't given to `bind_tensors`.

    Either `specs` (or a function that makes them, called when first needed: process groups may not
    exist before), or `model`, a `GPTModel` or its virtual pipeline stages. Sizes and ranks that are
    None come from megatron's parallel state. `hf_naming` is "llama", "qwen", or a function from global
    Megatron names to Hugging Face names.
    """

    model: Any = None
    specs: Sequence[MegatronTensorSpec] | Callable[[], Iterable[MegatronTensorSpec]] | None = None
    tensor_parallel_size: int | None = None
    tensor_parallel_rank: int | None = None
    expert_tensor_parallel_size: int | None = None
    expert_tensor_parallel_rank: int | None = None
    hf_naming: str | HfNaming = "llama"

    def create_adapter(self) -> MegatronAdapter:
        """See `TrainerEngineContext`."""
        return MegatronAdapter(self)


class MegatronAdapter(BoxAdapter):
    """The adapter of `MegatronTrainerContext`: whole partitions, in place or through a host arena."""

    def __init__(self, context: MegatronTrainerContext) -> None:
        self._context = context
        self._captured: MegatronCapture | None = None
        self._models: tuple[Any, ...] = ()
        self._boxes: tuple[SourceBox, ...] = ()

    @property
    def source_slot_id(self) -> str:
        """The slot of this rank's partition; data-parallel replicas share it."""
        return self._bound().source_slot_id

    def bind_tensors(self, tensors: Any) -> str:
        """Fix specs, or a model (or its virtual pipeline stages), from which specs are made."""
        captured = capture(resolve_specs(self._context, tensors), agent_name="")
        self._boxes = tuple(
            _source_box(tensor, shard) for tensor in captured.tensors for shard in tensor.shards
        )
        self._models = _models_in(self._context, tensors)
        self._captured = captured
        return captured.source_slot_id

    def boxes(self) -> tuple[SourceBox, ...]:
        """See `BoxAdapter`."""
        captured = self._bound()
        verify_unmoved(captured)
        if self._models:
            held = {id(parameter) for model in self._models for parameter in model.parameters()}
            for spec in captured.specs:
                if id(spec.tensor) not in held:
                    raise StateError(f"{spec.name}: is registered and no longer a parameter of the model")
        return self._boxes

    def _bound(self) -> MegatronCapture:
        if self._captured is None:
            if self._context.specs is None and self._context.model is None:
                raise StateError(
                    "no tensors are bound: call bind_tensors, or give MegatronTrainerContext a model or specs"
                )
            self.bind_tensors(None)
        assert self._captured is not None
        return self._captured


def _source_box(tensor: HfTensor, shard: HfShard) -> SourceBox:
    require_plain_memory(tensor.name, shard.view)
    return SourceBox(
        name=tensor.name,
        dtype=tensor.dtype,
        full_shape=tensor.full_shape,
        offset=shard.shard_offset,
        shape=shard.shape,
        addr=shard.addr,
        size_bytes=prod(shard.shape) * tensor.elsize,
        device_kind=shard.view.device.type,
        device_index=shard.view.device.index or 0,
        owner=shard.view,
    )


def _models_in(context: MegatronTrainerContext, tensors: Any) -> tuple[Any, ...]:
    """The models whose parameters were bound; empty where specs were."""
    source = tensors if tensors is not None else context.model if context.specs is None else None
    if source is None:
        return ()
    items = (source,) if hasattr(source, "named_parameters") else tuple(source)
    return items if all(hasattr(item, "named_parameters") for item in items) else ()


@dataclass(frozen=True, slots=True)
class StorageFingerprint:
    """The memory that a tensor had when it was captured."""

    data_ptr: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MegatronCapture:
    """A rank's partition: its slot, its specs, the aliases over them, and where the memory lay."""

    source_slot_id: str
    specs: tuple[MegatronTensorSpec, ...]
    tensors: tuple[HfTensor, ...]
    fingerprints: Mapping[str, StorageFingerprint]


def resolve_specs(context: MegatronTrainerContext, tensors: Any = None) -> tuple[MegatronTensorSpec, ...]:
    """The specs of what `tensors` says (specs, or a model), or else of what the context says.

    Raises:
        UsageError: neither names any tensor, or `tensors` holds something else than specs.
    """
    source = context.specs if tensors is None else tensors
    if callable(source) and not hasattr(source, "named_parameters"):
        source = source()
    if source is None:
        source = context.model
    if source is None:
        raise UsageError("tensors: expected specs or a model, here or in MegatronTrainerContext, got neither")
    items: list[Any] = [source] if hasattr(source, "named_parameters") else list(source)
    if items and all(hasattr(item, "named_parameters") for item in items):
        return _specs_of_model(context, items)
    for index, item in enumerate(items):
        if not isinstance(item, MegatronTensorSpec):
            raise UsageError(
                f"tensors[{index}]: expected a MegatronTensorSpec or a model, got {type(item).__name__}"
            )
    if not items:
        raise UsageError("tensors: expected at least one MegatronTensorSpec, got none")
    return tuple(items)


def _specs_of_model(context: MegatronTrainerContext, chunks: list[Any]) -> tuple[MegatronTensorSpec, ...]:
    return build_megatron_tensor_specs_from_model(
        chunks,
        tensor_parallel_size=context.tensor_parallel_size,
        tensor_parallel_rank=context.tensor_parallel_rank,
        expert_tensor_parallel_size=context.expert_tensor_parallel_size,
        expert_tensor_parallel_rank=context.expert_tensor_parallel_rank,
        hf_naming=context.hf_naming,
    )


def capture(specs: Iterable[MegatronTensorSpec], agent_name: str) -> MegatronCapture:
    """Alias the memory of these specs as it lies now; the slot depends on the layout alone.

    Raises:
        UsageError: a spec is inconsistent; the message begins with the tensor's name.
    """
    fixed = tuple(specs)
    return MegatronCapture(
        source_slot_id=megatron_source_slot_id(fixed),
        specs=fixed,
        tensors=build_hf_aliases(fixed, agent_name),
        fingerprints={spec.name: fingerprint(spec.tensor) for spec in fixed},
    )


def fingerprint(tensor: torch.Tensor) -> StorageFingerprint:
    """Where the tensor's memory lies now."""
    return StorageFingerprint(
        data_ptr=tensor.data_ptr(),
        size_bytes=tensor.untyped_storage().nbytes(),
        dtype=str(tensor.dtype),
        shape=tuple(tensor.shape),
    )


def verify_unmoved(captured: MegatronCapture, specs: Iterable[MegatronTensorSpec] | None = None) -> None:
    """Check that what was captured, and thus registered, is still the memory that is trained.

    `specs` are the tensors as they are now, where they may be other tensor objects; by default the
    captured ones are looked at again.

    Raises:
        StateError: a tensor's storage, type or shape changed, or tensors came or went; the message
            begins with the tensor's name.
    """
    now = {spec.name: spec.tensor for spec in (captured.specs if specs is None else specs)}
    for name, then in captured.fingerprints.items():
        if name not in now:
            raise StateError(f"{name}: is registered and no longer among the model's tensors")
        found = fingerprint(now[name])
        if found != then:
            raise StateError(f"{name}: its storage moved since it was registered: was {then}, is {found}")
    for name in now:
        if name not in captured.fingerprints:
            raise StateError(f"{name}: is among the model's tensors and was not registered")
