"""Which part of which Hugging Face tensor lies where in a module's parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.reshard.boxes import Pieces, covered_volume, overlapping_targets
from modelexpress_rl.reshard.geometry import padded


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One box of one Hugging Face tensor, and its place in one parameter.

    The box is (`hf_offset`, `shape`) in global coordinates of `hf_name`. It lies at `parameter_offset` of
    `parameter` (default: at its beginning). Where the parameter has more axes than the box (stacked
    experts), the box has extent 1 along the ones in front. `transposed` swaps the last two axes on the
    way. `hf_shape`, where given, is what the published global shape must be.
    """

    hf_name: str
    parameter: str
    hf_offset: tuple[int, ...]
    shape: tuple[int, ...]
    parameter_offset: tuple[int, ...] | None = None
    transposed: bool = False
    hf_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A slice, resolved: the box (`offset`, `shape`) of parameter `parameter` that it fills."""

    slice: TensorSlice
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of `parameter` that the slice fills, in the axes and order of the slice's box."""
        view = parameter.detach()
        for axis, (begin, extent) in enumerate(zip(self.offset, self.shape, strict=True)):
            view = view.narrow(axis, begin, extent)
        while view.dim() > len(self.slice.shape):
            view = view.select(0, 0)
        return view.transpose(-1, -2) if self.slice.transposed else view


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of a module by name, tied ones under each of their names."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    persistent = module.state_dict(keep_vars=True)
    found.update(
        (name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in persistent
    )
    return found


def writing(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """The mode in which these tensors may be written: tensors of inference mode only within it."""
    if any(tensor.is_inference() for tensor in tensors):
        return torch.inference_mode()
    return torch.no_grad()


@dataclass(frozen=True, slots=True)
class Expected:
    """What a parameter was when a loader was made; it must still be that at the install.

    `stride` is None where the loader does not depend on it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, strided: bool = False) -> Expected:
        """What a tensor is now."""
        return cls(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()) if strided else None)


def as_expected(module: torch.nn.Module, name: str, expected: Expected) -> torch.Tensor:
    """The parameter or buffer of that name, where it is what it was when the loader was made.

    Raises:
        StateError: it is not.
    """
    path, _, leaf = name.rpartition(".")
    try:
        now = getattr(module.get_submodule(path), leaf)
    except AttributeError as error:
        raise StateError(f"parameter {name!r} is gone since the loader was made") from error
    if (tuple(now.shape), now.dtype) != (expected.shape, expected.dtype):
        raise StateError(
            f"parameter {name!r} was {expected.dtype} {expected.shape} when the loader was made, "
            f"now it is {now.dtype} {tuple(now.shape)}"
        )
    if now.is_meta:
        raise StateError(f"parameter {name!r} has no storage (it is on the meta device)")
    if now.numel() > 1 and 0 in now.stride():
        raise StateError(f"parameter {name!r} is expanded: its elements share memory")
    if expected.stride is not None and tuple(now.stride()) != expected.stride:
        raise StateError(
            f"parameter {name!r} had strides {expected.stride} when the loader was made, "
            f"now it has {tuple(now.stride())}"
        )
    tensor: torch.Tensor = now
    return tensor


def resolved(slices: Sequence[TensorSlice], tensors: Mapping[str, torch.Tensor]) -> tuple[Place, ...]:
    """Find the place of every slice.

    Raises:
        UsageError: the parameter is unknown, or the slice does not fit into it; the message names both.
    """
    return tuple(_resolved(each, tensors) for each in slices)


def require_whole(
    places: Sequence[Place], tensors: Mapping[str, torch.Tensor], required: Collection[str]
) -> None:
    """Check that every parameter that is mapped or in `required` is filled, each element exactly once.

    Raises:
        UsageError: a parameter has a gap, an element that two slices fill, or no slice at all.
    """
    names = list(dict.fromkeys([*(place.slice.parameter for place in places), *required]))
    number = {name: i for i, name in enumerate(names)}
    width = max([1, *(len(place.shape) for place in places)])
    lo = padded([place.offset for place in places], width, 0)
    pieces = Pieces(
        target=np.array([number[place.slice.parameter] for place in places], np.int64),
        box=np.arange(len(places)),
        lo=lo,
        hi=lo + padded([place.shape for place in places], width, 1),
    )
    pieces = pieces.take(np.argsort(pieces.target, kind="stable"))
    twice = overlapping_targets(pieces, len(names))
    filled = covered_volume(pieces, len(names)).tolist()
    for name, i in number.items():
        if twice[i]:
            raise UsageError(f"slices: two slices fill the same elements of parameter {name!r}")
        if filled[i] != tensors[name].numel():
            raise UsageError(
                f"slices: {filled[i]} of {tensors[name].numel()} elements of parameter {name!r} are filled; "
                f"list it in `frozen` if it is not to be loaded"
            )


def _resolved(slice_: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> Place:
    at = f"slices: {slice_.hf_name!r} into parameter {slice_.parameter!r}"
    parameter = tensors.get(slice_.parameter)
    if parameter is None:
        raise UsageError(f"{at}: the module has no parameter or persistent buffer of that name")
    shape, rank = slice_.shape, parameter.dim()
    if len(slice_.hf_offset) != len(shape):
        raise UsageError(f"{at}: hf_offset {slice_.hf_offset} and shape {shape} differ in rank")
    if slice_.transposed:
        if len(shape) < 2:
            raise UsageError(f"{at}: a box of shape {shape} has no two axes to swap")
        shape = (*shape[:-2], shape[-1], shape[-2])
    if rank < len(shape):
        raise UsageError(f"{at}: a box of shape {shape} does not fit {tuple(parameter.shape)}")
    shape = (*(1,) * (rank - len(shape)), *shape)
    offset = slice_.parameter_offset or (0,) * rank
    fits = len(offset) == rank and all(
        begin >= 0 and begin + extent <= full
        for begin, extent, full in zip(offset, shape, parameter.shape, strict=True)
    )
    if not fits:
        raise UsageError(f"{at}: a box of shape {shape} at {offset} does not fit {tuple(parameter.shape)}")
    return Place(slice_, offset, shape)
