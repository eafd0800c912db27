"""Which parameter or buffer each recorded copy writes, and whether every parameter is filled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from modelexpress_rl.errors import IncompleteVersionError, ModelExpressError, UsageError
from modelexpress_rl.inference.adapter import PublishedTensor
from modelexpress_rl.inference.engines.torch.capture.captured import Landing, Target
from modelexpress_rl.inference.engines.torch.capture.contents import Published
from modelexpress_rl.inference.engines.torch.capture.errors import refused
from modelexpress_rl.inference.engines.torch.capture.filling import unfilled
from modelexpress_rl.inference.engines.torch.capture.recorder import Write, key_of, place_of
from modelexpress_rl.inference.engines.torch.capture.strided import Aligned, Axes, Fragmented, aligned
from modelexpress_rl.inference.engines.torch.dtypes import require_castable

Named = list[tuple[str, torch.Tensor]]


def landings(module: torch.nn.Module, writes: Sequence[Write], frozen: Collection[str] = ()) -> list[Landing]:
    """The writes as copies into tensors of the live module.

    One that a later one undoes is left out, and one into a tensor that is frozen.

    Raises:
        UsageError: `frozen` names what the module does not have.
        CaptureRefused: a copy writes to several tensors at once, or to one that has no name.
        GeometryError: it would turn one kind of number into another.
    """
    by_key = _by_storage(module)
    tensors = _by_name(module)
    if unknown := sorted(set(frozen) - tensors.keys()):
        raise UsageError(f"frozen: the module has no parameter or buffer {unknown[0]!r}")
    still = {id(tensors[name]) for name in frozen}
    last = {(write.key, write.dtype, write.offset, write.dims): i for i, write in enumerate(writes)}
    found = []
    for i, write in enumerate(writes):
        if last[write.key, write.dtype, write.offset, write.dims] != i:
            continue
        name, tensor = _owner(write, by_key.get(write.key, []))
        if id(tensor) in still:
            continue
        begin, _ = place_of(tensor)
        for part in write.parts:
            if isinstance(part.content, Published):
                require_castable(str(part.last_dtype), write.dtype, tensor=part.content.name, parameter=name)
            transfer = replace(part.transfer, target=part.transfer.target - begin)
            found.append(Landing(Target(name, write.dtype), replace(part, transfer=transfer)))
    return found


def require_filled(
    module: torch.nn.Module,
    found: Sequence[Landing],
    loaded: Any,
    frozen: Collection[str],
    published: Mapping[str, PublishedTensor],
) -> None:
    """Check that every parameter that is not frozen is filled whole, and is one that was said to be loaded.

    Raises:
        IncompleteVersionError: elements of a parameter would be left as they are.
        ModelExpressError: `load_weights` says which parameters it loaded, and leaves one out.
    """
    by_key, tensors = _by_storage(module), _by_name(module)
    still = {id(tensors[name]) for name in frozen}
    required = [(name, t) for name, t in module.named_parameters() if t.numel() and id(t) not in still]
    if isinstance(loaded, (set, frozenset, list, tuple)):
        said = {id(tensors[name]) for name in loaded if isinstance(name, str) and name in tensors}
        if said and (left := [name for name, tensor in required if id(tensor) not in said]):
            raise ModelExpressError(f"load_weights loaded {len(said)} parameters, but not {_listed(left)}")
    written: dict[str, list[Landing]] = {}
    for landing in found:
        written.setdefault(landing.target.name, []).append(landing)
    missing = {}
    for name, tensor in required:
        own = by_key.get(key_of(tensor) or 0, [])
        if count := _unfilled(tensor, own, written):
            missing[name] = count, tensor.numel()
    if missing:
        name, (count, numel) = next(iter(missing.items()))
        taken = {part.resolved.content.name for part in found if isinstance(part.resolved.content, Published)}
        unread = sorted(published.keys() - taken)
        raise IncompleteVersionError(
            f"load_weights leaves {count} of {numel} elements of parameter {name!r} as they are"
            f"{f' ({len(missing)} parameters in all)' if len(missing) > 1 else ''}; "
            f"published but not taken: {_listed(unread) or 'nothing'}. "
            f"List the parameter in `frozen` if it is not to be loaded"
        )


def _unfilled(tensor: torch.Tensor, own: Named, written: Mapping[str, Sequence[Landing]]) -> int:
    """Elements of a tensor that nothing fills, neither under its names nor as part of a bigger tensor."""
    first, last = _span(tensor)
    least = tensor.numel()
    for _, outer in own:
        low, high = _span(outer)
        if low <= first and last <= high and outer.dtype == tensor.dtype:
            inside = [
                (place_of(other)[0] - place_of(outer)[0], landing)
                for name, other in own
                if low <= _span(other)[0] and _span(other)[1] <= high
                for landing in written.get(name, ())
            ]
            least = min(least, unfilled(outer.shape, list(_pieces(outer, inside))))
    return least


def _pieces(tensor: torch.Tensor, landings: Iterable[tuple[int, Landing]]) -> Iterable[Aligned]:
    axes = Axes.of(tensor.shape, tensor.stride())
    if axes is None:
        raise refused("a parameter is expanded: its elements share memory")
    for begin, landing in landings:
        turned = landing.resolved.transfer.turned()
        try:
            yield from aligned(replace(turned, source=turned.source + begin), axes)
        except Fragmented as error:
            raise refused(f"into {landing.target.name!r}: {error}") from error


def _by_name(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, tied ones under each of their names."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return tensors | dict(module.named_buffers(remove_duplicate=False))


def _by_storage(module: torch.nn.Module) -> dict[int, Named]:
    """Parameters and buffers by their storage, parameters first, each under its first name."""
    found: dict[int, Named] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if (key := key_of(tensor)) is not None:
            found.setdefault(key, []).append((name, tensor))
    return found


def _owner(write: Write, named: Named) -> tuple[str, torch.Tensor]:
    """The smallest named tensor that holds all that a write writes."""
    first = write.offset
    last = first + sum((size - 1) * stride for size, stride in write.dims)
    holding = [
        (tensor.numel(), i)
        for i, (_, tensor) in enumerate(named)
        if tensor.dtype.itemsize == write.dtype.itemsize
        and _span(tensor)[0] <= first
        and last <= _span(tensor)[1]
    ]
    if not holding:
        what = f"{write.stand_in.name!r} is written"
        raise refused(f"{what} by a view that is of no one parameter or buffer, as {write.dtype}")
    return named[min(holding)[1]]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last element of its storage that a tensor has, counted in its own elements."""
    first, strides = place_of(tensor)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return first, first + reach


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (" and others" if len(names) > 5 else "")
