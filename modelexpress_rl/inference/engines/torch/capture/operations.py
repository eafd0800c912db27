"""What operations do, as far as a capture asks: which copy, which make constants, which write."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from modelexpress_rl.inference.engines.torch.capture.contents import Computed, Constant, Content
from modelexpress_rl.inference.engines.torch.capture.strided import MAX_PIECES

aten = torch.ops.aten

CONSTANTS: Mapping[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: lambda value, **_: value,
    aten.zeros.default: lambda *_, **__: 0,
    aten.ones.default: lambda *_, **__: 1,
    aten.full.default: lambda size, value, **_: value,
    aten.zeros_like.default: lambda *_, **__: 0,
    aten.ones_like.default: lambda *_, **__: 1,
    aten.full_like.default: lambda like, value, **_: value,
    aten.new_zeros.default: lambda *_, **__: 0,
    aten.new_ones.default: lambda *_, **__: 1,
    aten.new_full.default: lambda like, size, value, **_: value,
}
COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
# What asks for no values, though it answers with none of tensors.
ABOUT_MEMORY = {aten.is_same_size.default, aten._has_compatible_shallow_copy_type.default}
UNLIKE = {aten.set_, aten.resize_, aten.resize_as_}


# Views whose elements are not those in memory: torch changes them when they are read.
LAZY = {aten._conj.default, aten._neg_view.default}

Parts = list[tuple[Any, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operation's schema says."""

    name: str
    written: tuple[str | int, ...]
    turns_view: bool
    is_view: bool
    returns_tensors: bool


@lru_cache(maxsize=4096)
def kind_of(func: Any) -> Kind:
    """Read an operation's schema."""
    schema = func._schema
    written: list[str | int] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else i)
    tensors = ("Tensor", "List[Tensor]")
    return Kind(
        str(func),
        tuple(written),
        torch.Tag.inplace_view in func.tags and func.overloadpacket not in UNLIKE,
        any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        all(str(r.type) in tensors for r in schema.returns),
    )


def is_copy(func: Any) -> bool:
    """Whether it writes a tensor or a number into a view."""
    return func in (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


def made_of(func: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> Content:
    """What a tensor holds that an operation makes; `names` are of what it was made from."""
    value = CONSTANTS[func](*args, **kwargs) if func in CONSTANTS else None
    return Computed(str(func), names) if value is None else Constant(value)


def joined_of(func: Any, args: Any, kwargs: Any, out: Any) -> Parts | None:
    """What an operation lays where that only copies: (tensor or number, offset). None for any other."""
    match func:
        case aten.constant_pad_nd.default:
            return _padded(*args, **kwargs)
        case aten.cat.default:
            return _beside(args[0], _axis(args[1:], kwargs, out), out)
        case aten.stack.default:
            dim = _axis(args[1:], kwargs, out)
            return _beside([each.unsqueeze(dim) for each in args[0]], dim, out)
        case aten.repeat.default:
            return _repeated(*args)
        case aten.index_select.default:
            return _picked(*args)
        case aten.index.Tensor:
            (axis, *more) = [axis for axis, each in enumerate(args[1]) if each is not None]
            return None if more else _picked(args[0], axis, args[1][axis])
        case aten.narrow_copy.default:
            return [(args[0].narrow(*args[1:]), (0,) * out.dim())]
    return None


def _axis(args: Any, kwargs: Any, out: torch.Tensor) -> int:
    return int(args[0] if args else kwargs.get("dim", 0)) % out.dim()


def _padded(tensor: torch.Tensor, pads: Sequence[int], value: Any = 0) -> Parts | None:
    if min(pads) < 0:
        return None
    # The pads come in pairs, those of the last axis first.
    lows = [0] * (tensor.dim() - len(pads) // 2) + list(pads)[-2::-2]
    return [(value, ()), (tensor, tuple(lows))]


def _beside(tensors: Sequence[torch.Tensor], dim: int, out: torch.Tensor) -> Parts:
    parts, begin = [], 0
    for tensor in tensors:
        if tensor.dim() != out.dim():
            continue  # cat takes an empty vector beside anything
        parts.append((tensor, tuple(begin if axis == dim else 0 for axis in range(out.dim()))))
        begin += tensor.shape[dim]
    return parts


def _repeated(tensor: torch.Tensor, repeats: Sequence[int]) -> Parts | None:
    if math.prod(repeats) > MAX_PIECES:
        return None
    while tensor.dim() < len(repeats):
        tensor = tensor.unsqueeze(0)
    tiles = itertools.product(
        *(range(0, n * size, size or 1) for n, size in zip(repeats, tensor.shape, strict=True))
    )
    return [(tensor, tile) for tile in tiles]


def _picked(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> Parts | None:
    """The parts of a selection by an index that is known, one for each run of numbers that follow."""
    if index.is_meta or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return None
    dim, extent = dim % tensor.dim(), tensor.shape[dim % tensor.dim()]
    numbers = [number % extent for number in index.tolist()]
    begins = [i for i in range(len(numbers)) if not i or numbers[i] != numbers[i - 1] + 1]
    if len(begins) > MAX_PIECES:
        return None
    parts: Parts = []
    for begin, end in itertools.pairwise([*begins, len(numbers)]):
        offset = tuple(begin if axis == dim else 0 for axis in range(tensor.dim()))
        parts.append((tensor.narrow(dim, numbers[begin], end - begin), offset))
    return parts


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    found: list[torch.Tensor] = []
    for each in value:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple, dict)):
            found += tensors_in(each)
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with every tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(each, change) for each in value)
    if type(value) is dict:
        return {key: mapped(each, change) for key, each in value.items()}
    return value
