"""The plain engine: named tensors, torch's or numpy's, with the box that each is of its global tensor.

For toy trainers, tests and benchmarks, and for trainers that know their own layout.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.adapter import BoxAdapter, SourceBox
from modelexpress_rl.train.config import TrainerEngineContext
from modelexpress_rl.train.engines.memory_of import require_plain_memory

SLOT_PREFIX = "plain:partition:"


@dataclass(frozen=True, slots=True, eq=False)
class PlainBox:
    """A contiguous tensor (torch, or a numpy array), and where it lies in the tensor called `name`.

    Without `full_shape` it is the whole tensor; without `offset` it begins at the origin.
    """

    name: str
    tensor: Any
    full_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None


PlainTensors: TypeAlias = Mapping[str, Any] | Iterable[PlainBox]


@dataclass(frozen=True, slots=True, eq=False)
class PlainTrainerContext(TrainerEngineContext):
    """Boxes, or whole tensors by name, that need no `bind_tensors`; and the slot's name.

    `slot_id` is made from the layout where it is None, so that replicas agree on it.
    """

    boxes: PlainTensors | None = None
    slot_id: str | None = None

    def create_adapter(self) -> PlainAdapter:
        """See `TrainerEngineContext`."""
        return PlainAdapter(self)


class PlainAdapter(BoxAdapter):
    """The adapter of `PlainTrainerContext`."""

    def __init__(self, context: PlainTrainerContext) -> None:
        self._context = context
        self._held: tuple[PlainBox, ...] = ()
        self._boxes: tuple[SourceBox, ...] = ()

    @property
    def source_slot_id(self) -> str:
        """The context's slot, or one made from names, dtypes, shapes and offsets."""
        self._ensure_bound()
        return self._context.slot_id or _slot_of(self._boxes)

    def bind_tensors(self, tensors: PlainTensors) -> str:
        """Fix a mapping of names to whole tensors, or `PlainBox`es."""
        if isinstance(tensors, Mapping):
            held = tuple(PlainBox(name, tensor) for name, tensor in tensors.items())
        elif isinstance(tensors, Iterable):
            held = tuple(tensors)
        else:
            raise UsageError(
                "tensors: expected a mapping of names to tensors, or PlainBoxes, "
                f"got {type(tensors).__name__}"
            )
        for index, box in enumerate(held):
            if not isinstance(box, PlainBox):
                raise UsageError(f"tensors[{index}]: expected a PlainBox, got {type(box).__name__}")
        if not held:
            raise UsageError("tensors: expected at least one tensor, got none")
        boxes = tuple(_source_box(box) for box in held)
        _require_one_place(boxes)
        self._boxes = boxes
        self._held = held
        return self.source_slot_id

    def boxes(self) -> tuple[SourceBox, ...]:
        """See `BoxAdapter`."""
        self._ensure_bound()
        for held, box in zip(self._held, self._boxes, strict=True):
            addr, size_bytes = _memory_of(held.tensor)
            if (addr, size_bytes) != (box.addr, box.size_bytes):
                raise StateError(
                    f"tensor {box.name!r}: its storage moved since it was bound: was {box.size_bytes} bytes "
                    f"at {box.addr:#x}, is {size_bytes} bytes at {addr:#x}"
                )
        return self._boxes

    def _ensure_bound(self) -> None:
        if not self._held:
            if self._context.boxes is None:
                raise StateError("no tensors are bound: call bind_tensors, or give the context its boxes")
            self.bind_tensors(self._context.boxes)


def _source_box(box: PlainBox) -> SourceBox:
    tensor = box.tensor
    is_array = isinstance(tensor, np.ndarray)
    if not (is_array or hasattr(tensor, "data_ptr")):
        raise UsageError(
            f"tensor {box.name!r}: expected a torch tensor or a numpy array, got {type(tensor).__name__}"
        )
    if not (tensor.flags.c_contiguous if is_array else tensor.is_contiguous()):
        raise UsageError(f"tensor {box.name!r}: must be contiguous, shape {tuple(tensor.shape)} is not")
    require_plain_memory(box.name, tensor)
    shape = tuple(int(extent) for extent in tensor.shape)
    full_shape = shape if box.full_shape is None else _whole(box.name, "full_shape", box.full_shape)
    offset = (0,) * len(shape) if box.offset is None else _whole(box.name, "offset", box.offset)
    addr, size_bytes = _memory_of(tensor)
    return SourceBox(
        name=box.name,
        dtype=f"torch.{tensor.dtype.name}" if is_array else str(tensor.dtype),
        full_shape=full_shape,
        offset=offset,
        shape=shape,
        addr=addr,
        size_bytes=size_bytes,
        device_kind="cpu" if is_array else tensor.device.type,
        device_index=0 if is_array else tensor.device.index or 0,
        owner=tensor,
    )


def _require_one_place(boxes: Iterable[SourceBox]) -> None:
    places: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    for box in boxes:
        place = places.setdefault((box.name, box.offset, box.shape), box.addr)
        if place != box.addr and box.size_bytes:
            raise UsageError(
                f"tensor {box.name!r}: offset {box.offset} shape {box.shape} is given twice, at {place:#x} "
                f"and at {box.addr:#x}: which of them holds its values?"
            )


def _whole(name: str, field: str, numbers: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(number) for number in numbers)
    except TypeError as error:
        raise UsageError(f"tensor {name!r}: {field} must be whole numbers, got {numbers!r}") from error


def _memory_of(tensor: Any) -> tuple[int, int]:
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.nbytes
    return tensor.data_ptr(), prod(tensor.shape) * tensor.element_size()


def _slot_of(boxes: Iterable[SourceBox]) -> str:
    described = sorted([box.name, box.dtype, box.full_shape, box.offset, box.shape] for box in boxes)
    text = json.dumps(described, separators=(",", ":"))
    return SLOT_PREFIX + hashlib.sha256(text.encode()).hexdigest()
