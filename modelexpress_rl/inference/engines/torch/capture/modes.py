"""The two modes under which `load_weights` runs: nothing that it does reaches memory of the live module.

`DispatchMode` sees every operation below autograd: views run on storage-free tensors (what they are views
of is their storage), copies are recorded, what else writes or reads values is refused. `FunctionMode` sees
the calls that never get there (`param.data = ...`, `.numpy()`, `.data_ptr()`), puts stand-ins in place of
live tensors that a closure or a global still names, and answers `.device` as the real tensors would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modelexpress_rl.inference.engines.torch.capture.contents import (
    Computed,
    Constant,
    Content,
    Copied,
    StandIn,
)
from modelexpress_rl.inference.engines.torch.capture.operations import (
    ABOUT_MEMORY,
    CONSTANTS,
    COPIES,
    LAZY,
    Kind,
    is_copy,
    joined_of,
    kind_of,
    made_of,
    mapped,
    tensors_in,
)
from modelexpress_rl.inference.engines.torch.capture.recorder import Recorder, part_of

aten = torch.ops.aten


class DispatchMode(TorchDispatchMode):
    """Records into `recorder` what happens to tensors without memory."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to say so would import torch._dynamo: a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        if recorder.at_work:
            return func(*args, **(kwargs or {}))
        args, kwargs, tensors = _swapped(recorder, args, kwargs or {})
        kind = kind_of(func)
        known = [(tensor, recorder.content(tensor)) for tensor in tensors]
        held = [(tensor, content) for tensor, content in known if content is not None]
        if kind.written and not kind.turns_view:
            return self._write(func, kind, args, kwargs, held)
        if not held:
            return self._made(func, args, kwargs)
        if func in LAZY:
            raise recorder.refuse(f"{kind.name} on {recorder.described(held[0][0])}")
        if kind.is_view or kind.turns_view:
            return func(*args, **kwargs)
        return self._new(func, kind, args, kwargs, held)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on nothing that is published or of the module: it runs."""
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if tensor.is_meta:
                self._recorder.hold(tensor, self._recorder.new(tensor, made_of(func, args, kwargs, ())), None)
            elif not kind_of(func).is_view or func is aten.lift_fresh.default:
                self._recorder.made(tensor)
        return out

    def _new(
        self, func: Any, kind: Kind, args: Any, kwargs: Any, held: list[tuple[torch.Tensor, Content]]
    ) -> Any:
        """An operation that makes new tensors out of some without memory."""
        recorder = self._recorder
        first = held[0][0]
        device = kwargs.get("device") or recorder.device(first)
        if func in COPIES:
            view, content = self._source(args[0])
            if content is None:
                return self._made(func, args, kwargs)
            out = func(args[0], **{k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")})
            recorder.hold(out, recorder.copied(out, view, content), device)
            return out
        if func in ABOUT_MEMORY:
            return func(*args, **kwargs)
        if func.overloadpacket is aten.is_pinned:
            return False
        if func in CONSTANTS:
            out = func(*args, **{**kwargs, "device": "meta"})
            recorder.hold(out, recorder.new(out, made_of(func, args, kwargs, ())), device)
            return out
        if all(isinstance(content, StandIn) and not content.is_parameter for _, content in held):
            args, kwargs = (mapped(each, lambda t: self._values(t, kind.name)) for each in (args, kwargs))
            return self._made(func, args, kwargs)
        names = tuple(dict.fromkeys(name for _, content in held for name in recorder.names(content)))
        if not kind.returns_tensors:
            described = recorder.described(held[0][0])
            raise recorder.refuse(f"{kind.name} reads values of {described} to decide what to do")
        out = self._on_meta(func, kind, args, kwargs, held)
        joined = joined_of(func, args, kwargs, out)
        for tensor in tensors_in(out):
            result = recorder.new(tensor, Computed(kind.name, names))
            if joined is not None:
                result = self._laid_out(tensor, result, joined)
            recorder.hold(tensor, result, device)
        return out

    def _laid_out(self, out: torch.Tensor, under: Copied, parts: list[tuple[Any, tuple[int, ...]]]) -> Copied:
        """A new tensor that is made of others, each at an offset; a number is everywhere."""
        found = list(under.parts)
        for value, offset in parts:
            if not isinstance(value, torch.Tensor):
                found += self._recorder.new(out, Constant(value)).parts
            elif value.numel():
                found.append(part_of(*self._known_source(value), offset))
        return replace(under, parts=tuple(found))

    def _on_meta(
        self, func: Any, kind: Kind, args: Any, kwargs: Any, held: list[tuple[torch.Tensor, Content]]
    ) -> Any:
        try:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "meta"}
            return func(*mapped(args, _meta), **mapped(kwargs, _meta))
        except NotImplementedError as error:
            described = self._recorder.described(held[0][0])
            raise self._recorder.refuse(f"{kind.name} on {described} depends on its values") from error

    def _write(
        self, func: Any, kind: Kind, args: Any, kwargs: Any, held: list[tuple[torch.Tensor, Content]]
    ) -> Any:
        """An operation that writes: copies into the module are recorded, others refused."""
        recorder = self._recorder
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                copy = aten.copy_.default
                self._write(copy, kind_of(copy), (target, source), {}, held)
            return None
        found = tensors_in([kwargs.get(w) if isinstance(w, str) else _at(args, w) for w in kind.written])
        for target in found:
            if recorder.content(target) is None and not recorder.is_made(target):
                raise recorder.refuse(f"{kind.name} writes to a tensor that is not of the module")
        if not held:
            return func(*args, **kwargs)
        if len(found) == 1 and is_copy(func):
            self._copy(func, found[0], args)
            return found[0]
        for target in found:
            if recorder.content(target) is None:
                target = recorder.adopt(target)
            if isinstance(recorder.content(target), Copied):
                names = dict.fromkeys(name for _, content in held for name in recorder.names(content))
                recorder.write(target, None, Computed(kind.name, tuple(names)))
                continue
            raise recorder.refuse(f"{kind.name} changes {recorder.described(target)}")
        return found[0] if len(found) == 1 else tuple(found)

    def _copy(self, func: Any, target: torch.Tensor, args: Any) -> None:
        recorder = self._recorder
        if recorder.content(target) is None:
            target = recorder.adopt(target)
        value = 0 if func is aten.zero_.default else args[1]
        if not isinstance(value, torch.Tensor):
            recorder.write(target, None, Constant(value))
            return
        recorder.write(target, *self._known_source(value))

    def _source(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Content | None]:
        """A tensor that is copied from; what lies in a buffer of the live module is known."""
        content = self._recorder.content(tensor)
        if isinstance(content, StandIn) and not content.is_parameter:
            known = self._recorder.known(self._recorder.live_values(tensor, "a copy"))
            return known.tensor, known
        return tensor, content

    def _known_source(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Content]:
        """The same; what has memory of its own is known, too."""
        view, content = self._source(tensor)
        if content is not None:
            return view, content
        known = self._recorder.known(tensor)
        return known.tensor, known

    def _values(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        if self._recorder.content(tensor) is None:
            return tensor
        return self._recorder.live_values(tensor, operation)


class FunctionMode(TorchFunctionMode):
    """What never reaches the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        if recorder.at_work or not args:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if any(isinstance(each, torch.Tensor) and recorder.is_live(each) for each in args):
            args = tuple(mapped(each, recorder.swapped) for each in args)
        first = args[0] if isinstance(args[0], torch.Tensor) else None
        content = None if first is None else recorder.content(first)
        if content is None or first is None:
            return func(*args, **kwargs)
        if func == _GET_ITEM:
            return func(first, _with_memory(args[1]))
        if func in _ASKS_DEVICE:
            return _ASKS_DEVICE[func](recorder.device(first))
        if func == _SET_DATA and isinstance(content, StandIn):
            return self._set_data(first, args[1])
        if func in _LEAVES_TORCH:
            with recorder.working():
                return func(
                    recorder.live_values(first, f"Tensor.{func.__name__}").clone(), *args[1:], **kwargs
                )
        return func(*args, **kwargs)

    def _set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """`param.data = value` keeps the address: it is a copy where nothing else changes."""
        same = (target.shape, target.dtype) == (value.shape, value.dtype)
        if not same:
            raise self._recorder.refuse(
                f"{self._recorder.described(target)}, {target.dtype} {tuple(target.shape)}, is made "
                f"{value.dtype} {tuple(value.shape)} by setting its data"
            )
        target.detach().copy_(value)


_GET_ITEM = torch.Tensor.__getitem__
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ASKS_DEVICE: Mapping[Any, Callable[[Any], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_meta.__get__: lambda device: device.type == "meta",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
_LEAVES_TORCH = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}


def _swapped(recorder: Recorder, args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Arguments with stand-ins in place of live tensors, and the tensors among them."""
    tensors = tensors_in(args)
    if kwargs:
        tensors += tensors_in(kwargs)
    if any(recorder.is_live(tensor) for tensor in tensors):
        args, kwargs = mapped(args, recorder.swapped), mapped(kwargs, recorder.swapped)
        tensors = tensors_in(args) + tensors_in(kwargs)
    return args, kwargs, tensors


def _with_memory(index: Any) -> Any:
    """An index whose lists are tensors: torch would put them beside the indexed one, without memory."""
    if type(index) is tuple:
        return tuple(_with_memory(each) for each in index)
    if type(index) is list and all(type(each) is int for each in index):
        return torch.tensor(index, dtype=torch.int64)
    return index


def _at(args: Sequence[Any], number: int) -> Any:
    return args[number] if number < len(args) else None


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta or not tensor.dim() else tensor.to("meta")
