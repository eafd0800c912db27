"""What a trainer's model, state dict or list of tensors holds on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.engines.fsdp.pieces import Piece, row_major
from modelexpress_rl.train.engines.fsdp.placement import Block, Layout, part_of
from modelexpress_rl.train.engines.memory_of import require_plain_memory

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_EXTRA_STATE = "_extra_state"

Source = Callable[[], Iterable[tuple[str, Any]]]
"""Gives the named values as they are now."""


def source_of(tensors: Any) -> Source:
    """How to look at what was bound, again for each version.

    Raises:
        UsageError: it is neither a model, a state dict, pairs of name and tensor, nor a function.
    """
    if isinstance(tensors, torch.nn.Module):
        return lambda: tensors.state_dict().items()
    if isinstance(tensors, Mapping):
        return lambda: tensors.items()
    if callable(tensors):
        return lambda: source_of(tensors())()
    if isinstance(tensors, Iterable) and not isinstance(tensors, (str, bytes, torch.Tensor)):
        pairs = [_pair(index, item) for index, item in enumerate(tensors)]
        return lambda: pairs
    raise UsageError(
        "tensors: expected a model, a state dict, pairs of name and tensor, or a function that makes one of "
        f"these, got {type(tensors).__name__}"
    )


def _pair(index: int, item: Any) -> tuple[str, Any]:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item
    raise UsageError(f"tensors[{index}]: expected a pair of name and tensor, got {type(item).__name__}")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that the published boxes of a tensor depend on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    addr: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of the state dict: its global shape, and what of it lies in `local` on this rank."""

    mark: Fingerprint
    local: torch.Tensor

    def pieces(self, *, packed: bool) -> list[Piece]:
        """The boxes that this rank holds, in its memory, or in a row-major copy of it (`packed`)."""
        mark = self.mark
        strides = row_major(mark.extents) if packed else mark.strides
        return [
            Piece(
                mark.name,
                block.offset,
                block.shape,
                sum(at * stride for at, stride in zip(block.local, strides, strict=True)),
                strides,
            )
            for block in mark.blocks
        ]


def held_tensors(source: Source) -> dict[str, HeldTensor]:
    """What this rank holds now, by name without the prefixes of wrappers.

    Raises:
        UsageError: a value can't be published; the message names it.
        StateError: a tensor's memory was freed.
    """
    found: dict[str, HeldTensor] = {}
    with torch.no_grad():
        for name, tensor in _named(source()):
            held = _held(name, tensor)
            if name in found and found[name].mark != held.mark:
                raise UsageError(f"tensor {name!r}: is given twice, with different memory")
            found[name] = held
    if not found:
        raise UsageError("tensors: expected at least one tensor, got none")
    return found


def _named(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in items:
        if not isinstance(name, str):
            raise UsageError(f"tensors: expected names that are strings, got {name!r}")
        if name.rpartition(".")[2] == _EXTRA_STATE:
            continue  # what a module keeps beside its weights
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"tensor {name!r}: expected a torch tensor, got {type(value).__name__}")
        yield without_wrappers(name), value


def without_wrappers(name: str) -> str:
    """A parameter's name in the model as it was before compiling and checkpointing wrapped it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _held(name: str, tensor: Any) -> HeldTensor:
    is_distributed = hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
    if not is_distributed and hasattr(tensor, "local_shards"):
        raise UsageError(
            f"tensor {name!r}: is a {type(tensor).__name__}; expected a DTensor, as fully_shard makes them"
        )
    shape = tuple(tensor.shape)
    local = tensor.to_local() if is_distributed else tensor.detach()
    if local.layout != torch.strided:
        raise UsageError(f"tensor {name!r}: has layout {local.layout}; expected a dense (strided) tensor")
    extents = tuple(local.shape)
    blocks = _blocks(name, shape, tensor, extents) if is_distributed else _whole(shape)
    mark = Fingerprint(
        name, local.dtype, shape, blocks, local.data_ptr(), extents, local.stride(), local.device
    )
    _require_memory(mark, local)
    return HeldTensor(mark, local)


@lru_cache(maxsize=1 << 12)
def _whole(shape: tuple[int, ...]) -> tuple[Block, ...]:
    origin = (0,) * len(shape)
    return (Block(origin, shape, origin),)


def _blocks(name: str, shape: tuple[int, ...], tensor: Any, extents: tuple[int, ...]) -> tuple[Block, ...]:
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    coordinate = mesh.get_coordinate()
    layout = Layout(
        shape,
        placements,
        tuple(mesh.shape),
        _order(tensor, len(placements)),
        None if coordinate is None else tuple(coordinate),
    )
    try:
        part = part_of(layout)
    except UsageError as error:
        raise UsageError(f"tensor {name!r}: {error}") from error
    if coordinate is not None and part.extents != extents:
        raise UsageError(
            f"tensor {name!r}: {placements} of {shape} on a mesh of {layout.mesh_shape} leaves "
            f"{part.extents} to the rank at {layout.coordinate}, which holds {extents}"
        )
    return part.blocks


def _order(tensor: Any, dims: int) -> tuple[int, ...]:
    """The order in which mesh dimensions cut: newer torch lets a tensor have one of its own."""
    told = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    first = [int(dim) for entry in told for dim in entry.mesh_dims]
    return (*first, *(dim for dim in range(dims) if dim not in first))


def _require_memory(mark: Fingerprint, local: torch.Tensor) -> None:
    if all(mark.extents) and mark.device.type != "meta":
        reach = sum((n - 1) * stride for n, stride in zip(mark.extents, mark.strides, strict=True))
        needed = (local.storage_offset() + reach + 1) * local.element_size()
        size_bytes = local.untyped_storage().nbytes()
        if size_bytes < needed:
            raise StateError(
                f"tensor {mark.name!r}: its memory was freed or shrunk: its storage has {size_bytes} "
                f"bytes, it needs {needed}; bind the model or a function instead"
            )
    require_plain_memory(mark.name, local)
