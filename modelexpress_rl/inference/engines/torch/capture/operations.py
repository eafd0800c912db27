"""What operations do, as far as a capture asks: which copy, which make constants, which write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from modelexpress_rl.inference.engines.torch.capture.contents import Computed, Constant, Content

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


def joined_of(func: Any, args: Any, kwargs: Any, out: Any) -> list[tuple[Any, tuple[int, ...]]] | None:
    """What `cat`, `stack` and `pad` lay where; None for any other operation."""
    if func is aten.constant_pad_nd.default:
        value, pads = args[0], list(args[1])
        if min(pads) < 0:
            return None
        lows = [0] * (value.dim() - len(pads) // 2) + pads[-2::-2]
        return [(args[2] if len(args) > 2 else kwargs.get("value", 0), ()), (value, tuple(lows))]
    if func not in (aten.cat.default, aten.stack.default):
        return None
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    parts, begin = [], 0
    for value in args[0]:
        view = value.unsqueeze(dim) if func is aten.stack.default else value
        if view.dim() != out.dim():
            continue  # cat takes an empty vector beside anything
        parts.append((view, tuple(begin if axis == dim else 0 for axis in range(out.dim()))))
        begin += view.shape[dim]
    return parts
