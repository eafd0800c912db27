"""What a Megatron rank publishes: its specs, the aliases over live memory or over a host copy, its slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.engines.megatron.aliases import HfTensor, build_hf_aliases
from modelexpress_rl.train.engines.megatron.from_model import build_megatron_tensor_specs_from_model
from modelexpress_rl.train.engines.megatron.hf_naming import HfNaming
from modelexpress_rl.train.engines.megatron.slots import megatron_source_slot_id
from modelexpress_rl.train.engines.megatron.specs import MegatronTensorSpec

if TYPE_CHECKING:
    import torch

ARENA_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class MegatronTrainerContext:
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


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """Byte offsets of a copy of each spec's tensor in one arena, in the order of the specs."""

    offsets: tuple[int, ...]
    size_bytes: int


def plan_arena(specs: Sequence[MegatronTensorSpec]) -> ArenaPlan:
    """Lay the tensors one after another, each on a boundary of `ARENA_ALIGNMENT_BYTES`."""
    offsets: list[int] = []
    end = 0
    for spec in specs:
        offsets.append(end)
        size_bytes = spec.tensor.numel() * spec.tensor.element_size()
        end += -(-size_bytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES
    return ArenaPlan(tuple(offsets), end)


def specs_over_arena(
    specs: Sequence[MegatronTensorSpec], plan: ArenaPlan, arena: torch.Tensor
) -> tuple[MegatronTensorSpec, ...]:
    """The same specs over contiguous views of `arena`, a 1-D uint8 tensor; nothing is copied yet.

    Raises:
        UsageError: the arena is smaller than the plan.
    """
    if arena.numel() * arena.element_size() < plan.size_bytes:
        raise UsageError(
            f"arena: expected at least {plan.size_bytes} bytes, got {arena.numel() * arena.element_size()}"
        )
    staged = []
    for spec, offset in zip(specs, plan.offsets, strict=True):
        size_bytes = spec.tensor.numel() * spec.tensor.element_size()
        view = arena[offset : offset + size_bytes].view(spec.tensor.dtype).view(spec.tensor.shape)
        staged.append(replace(spec, tensor=view))
    return tuple(staged)


def copy_to_arena(live: Sequence[MegatronTensorSpec], staged: Sequence[MegatronTensorSpec]) -> int:
    """Copy every live tensor to its place in the arena and return the bytes copied.

    Returns once the bytes have arrived, also from a GPU.
    """
    copied_bytes = 0
    for source, target in zip(live, staged, strict=True):
        target.tensor.copy_(source.tensor.detach())
        copied_bytes += target.tensor.numel() * target.tensor.element_size()
    return copied_bytes
