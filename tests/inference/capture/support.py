"""Captures a module's `load_weights`, installs from the captured boxes, and compares with the real thing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.inference.engines.torch.capture import Captured, capture
from modelexpress_rl.reshard.needs import Need

Tensors = Mapping[str, torch.Tensor]
Weights = Iterable[tuple[str, torch.Tensor]]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, begin: int = 1) -> torch.Tensor:
    """A tensor whose elements all differ, up to the precision of the dtype."""
    count = math.prod(shape)
    return torch.arange(begin, begin + count, dtype=torch.float64).reshape(shape).to(dtype)


def numbered(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors of which no two elements are equal; `__` in a name stands for a dot."""
    found, begin = {}, 1
    for name, shape in shapes.items():
        found[name.replace("__", ".")] = values(shape, begin=begin)
        begin += math.prod(shape)
    return found


def published(tensors: Tensors) -> dict[str, PublishedTensor]:
    return {name: PublishedTensor(str(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def staged(need: Need, tensors: Tensors) -> StagedTensor:
    box = tensors[need.name][tuple(slice(o, o + n) for o, n in zip(need.offset, need.shape, strict=True))]
    return StagedTensor(need, box.contiguous().reshape(-1).view(torch.uint8).numpy().copy())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state(module: torch.nn.Module) -> dict[str, Any]:
    """Bytes, addresses and attributes of all that a module holds."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules():
        for name, value in {**vars(each), **each._parameters, **each._buffers}.items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}"] = (
                    raw(value), id(value), value.data_ptr(), value._version, value.requires_grad,
                    {key: (id(v), repr(v)) for key, v in vars(value).items()},
                )  # fmt: skip
            else:
                found[f"{path}.{name}"] = (id(value), repr(value))
    return found


def captured(module: torch.nn.Module, tensors: Tensors, **options: Any) -> Captured:
    """Capture, and check that the module is as it was."""
    before = state(module)
    found = capture(module, published(tensors), **options)
    assert state(module) == before
    return found


def needs_of(
    module: torch.nn.Module, tensors: Tensors
) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The boxes that are read, as (offset, shape) by tensor."""
    found: dict[str, list[Any]] = {}
    for need in captured(module, tensors).needs:
        found.setdefault(need.name, []).append((need.offset, need.shape))
    return found


def installed(
    module: torch.nn.Module, tensors: Tensors, *, reference: torch.nn.Module | None = None, **options: Any
) -> list[Need]:
    """Refit by capture; the module then holds, in place, what `load_weights` makes of whole tensors.

    `reference` is another such module, where a deep copy would not be one.
    """
    reference = reference or copy.deepcopy(module)
    with torch.no_grad():
        reference.load_weights(weights(tensors))
    before = state(module)
    addresses = [(id(p), p.data_ptr()) for p in module.parameters()]
    loader = TorchGeneratorContext(module, **options).create_adapter().loader(published(tensors))
    boxes = [staged(need, tensors) for need in loader.needs]
    loader.check(boxes)
    assert state(module) == before
    loader.install(boxes)
    assert [(id(p), p.data_ptr()) for p in module.parameters()] == addresses
    for name, expected in reference.state_dict().items():
        assert raw(module.state_dict()[name]) == raw(expected), name
    return list(loader.needs)


def weights(tensors: Tensors) -> Weights:
    return ((name, tensors[name].clone()) for name in sorted(tensors))


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, -1.0).to(dtype), requires_grad=False)


class Loads(torch.nn.Module):
    """A module of the given parameters, loaded by the given function."""

    def __init__(self, load: Callable[[Any, Any], Any], **parameters: torch.nn.Parameter) -> None:
        super().__init__()
        self._load = load
        for name, value in parameters.items():
            self.register_parameter(name, value)

    def load_weights(self, weights: Weights) -> Any:
        return self._load(self, dict(weights))
