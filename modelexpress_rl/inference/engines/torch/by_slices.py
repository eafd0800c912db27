"""Loading by copies into parameters: one strided copy per slice, which casts where dtypes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from modelexpress_rl.errors import GeometryError, StateError, UsageError
from modelexpress_rl.inference.adapter import PublishedTensor
from modelexpress_rl.inference.engines.torch.checked import CheckedLoader
from modelexpress_rl.inference.engines.torch.dtypes import require_castable
from modelexpress_rl.inference.engines.torch.mapping import (
    Expected,
    Place,
    TensorSlice,
    named_tensors,
    require_whole,
    resolved,
)
from modelexpress_rl.reshard.needs import Need


class SliceAdapter:
    """Loads a module by a mapping. Parameters of one tensor under several names need it only once.

    Raises:
        UsageError: a slice does not fit, or a parameter that is not frozen is not filled exactly once.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        slices: Sequence[TensorSlice],
        frozen: frozenset[str],
        aliases: Mapping[str, str],
    ) -> None:
        self._module = module
        self._aliases = aliases
        tensors = named_tensors(module)
        if unknown := sorted(frozen - tensors.keys()):
            raise UsageError(f"frozen: the module has no parameter or persistent buffer {unknown[0]!r}")
        self._places = resolved(slices, tensors)
        mapped = {id(tensors[place.slice.parameter]) for place in self._places}
        required = [
            name
            for name, tensor in module.named_parameters()
            if name not in frozen and id(tensor) not in mapped
        ]
        require_whole(self._places, tensors, required)

    def loader(self, published: Mapping[str, PublishedTensor]) -> SliceLoader:
        """See `GeneratorEngineAdapter.loader`."""
        tensors = named_tensors(self._module)
        places = [_published_as(place, published, self._aliases) for place in self._places]
        places = _once_per_tensor(places, published, tensors)
        for place in places:
            _require_fits(place, published, tensors)
        return SliceLoader(self._module, places, published)


class PlainAdapter:
    """Loads a module whose parameters are Hugging Face tensors, each under its own name."""

    def __init__(self, module: torch.nn.Module, frozen: frozenset[str], aliases: Mapping[str, str]) -> None:
        if unknown := sorted(frozen - named_tensors(module).keys()):
            raise UsageError(f"frozen: the module has no parameter or persistent buffer {unknown[0]!r}")
        self._module = module
        self._frozen = frozen
        self._aliases = aliases

    def loader(self, published: Mapping[str, PublishedTensor]) -> SliceLoader:
        """See `GeneratorEngineAdapter.loader`."""
        tensors = named_tensors(self._module)
        names_of: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names_of.setdefault(id(tensor), []).append(name)
        slices = []
        for names in names_of.values():
            if not self._frozen.isdisjoint(names):
                continue
            name = next((each for each in names if each in published), names[0])
            tensor = tensors[name]
            if name not in published and not isinstance(tensor, torch.nn.Parameter):
                continue  # a buffer that nobody trains
            shape = tuple(tensor.shape)
            slices.append(TensorSlice(name, name, (0,) * len(shape), shape, hf_shape=shape))
        return SliceAdapter(self._module, slices, self._unloaded(slices, tensors), self._aliases).loader(
            published
        )

    def _unloaded(self, slices: Sequence[TensorSlice], tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        loaded = {id(tensors[each.parameter]) for each in slices}
        return frozenset(name for name, tensor in tensors.items() if id(tensor) not in loaded)


Resolved = tuple[torch.Tensor, torch.Tensor]
"""A view of a parameter, and the staged box that is copied into it."""


class SliceLoader(CheckedLoader[Resolved]):
    """Copies staged boxes to their places; a box that several places want is staged once."""

    def __init__(
        self, module: torch.nn.Module, places: Sequence[Place], published: Mapping[str, PublishedTensor]
    ) -> None:
        tensors = named_tensors(module)
        numbers: dict[Need, int] = {}
        self._places: list[tuple[int, Place]] = []
        for place in places:
            known = published.get(place.slice.hf_name)
            dtype = str(tensors[place.slice.parameter].dtype) if known is None else known.dtype
            need = Need(place.slice.hf_name, dtype, place.slice.hf_offset, place.slice.shape)
            self._places.append((numbers.setdefault(need, len(numbers)), place))
        names = dict.fromkeys(place.slice.parameter for place in places)
        super().__init__(module, tuple(numbers), {name: Expected.of(tensors[name]) for name in names})

    def _matched(self, boxes: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[Resolved]:
        copies = []
        for number, place in self._places:
            source, target = boxes[number], place.of(tensors[place.slice.parameter])
            if source.shape != target.shape:
                raise StateError(
                    f"tensor {place.slice.hf_name!r}: staged {tuple(source.shape)} does not fit "
                    f"{tuple(target.shape)} of parameter {place.slice.parameter!r}"
                )
            copies.append((target, source))
        return copies

    def _target(self, copy: Resolved) -> torch.Tensor:
        return copy[0]

    def _write(self, copy: Resolved) -> None:
        target, source = copy
        target.copy_(source)


def _published_as(
    place: Place, published: Mapping[str, PublishedTensor], aliases: Mapping[str, str]
) -> Place:
    """The place with the name under which its tensor is published."""
    name = place.slice.hf_name
    if name in published or aliases.get(name, name) not in published:
        return place
    return replace(place, slice=replace(place.slice, hf_name=aliases[name]))


def _once_per_tensor(
    places: Sequence[Place], published: Mapping[str, PublishedTensor], tensors: Mapping[str, torch.Tensor]
) -> list[Place]:
    """Of the names that share one tensor, keep the first whose slices are all published."""
    by_name: dict[str, list[Place]] = {}
    for place in places:
        by_name.setdefault(place.slice.parameter, []).append(place)
    chosen: dict[int, str] = {}
    for name, own in by_name.items():
        tied = id(tensors[name])
        if tied not in chosen or (
            not _all_published(by_name[chosen[tied]], published) and _all_published(own, published)
        ):
            chosen[tied] = name
    return [place for name in chosen.values() for place in by_name[name]]


def _all_published(places: Sequence[Place], published: Mapping[str, PublishedTensor]) -> bool:
    return all(place.slice.hf_name in published for place in places)


def _require_fits(
    place: Place, published: Mapping[str, PublishedTensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    known = published.get(place.slice.hf_name)
    if known is None:
        return  # the plan will name it
    name, parameter = place.slice.hf_name, place.slice.parameter
    require_castable(known.dtype, tensors[parameter].dtype, tensor=name, parameter=parameter)
    if place.slice.hf_shape is not None and known.shape != place.slice.hf_shape:
        raise GeometryError(
            f"tensor {name!r}: published with global shape {known.shape}, but parameter {parameter!r} "
            f"needs {place.slice.hf_shape}"
        )
