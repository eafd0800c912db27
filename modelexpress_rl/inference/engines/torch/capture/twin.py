"""A twin of a module: the same classes and attributes, and tensors without memory in place of its own.

A weight loader hangs on a parameter as a bound method, a partial or a closure, and these name parameters
and modules. `copy.deepcopy` keeps functions as they are, so their closures would still name the live ones;
here they are made anew. What can't be copied (a lock, a process group, an object of a C extension) is
shared; tensors that a shared object names are caught when they are used.
"""

from __future__ import annotations

import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from modelexpress_rl.errors import UsageError

StandIn = Callable[[torch.Tensor], torch.Tensor]

_SHARED = (enum.Enum, threading.Thread, BaseException, torch.jit.ScriptModule, torch.device, torch.dtype)
_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
)


def twin(module: torch.nn.Module, stand_in: StandIn) -> torch.nn.Module:
    """A copy of `module` in which `stand_in(tensor)` is in the place of every tensor.

    Raises:
        UsageError: what the module holds is nested too deep to copy.
    """
    try:
        copy: torch.nn.Module = _Copier(stand_in).copied(module)
    except RecursionError as error:
        raise UsageError(
            f"{type(module).__name__}: its attributes are nested too deep to copy for a capture"
        ) from error
    return copy


class _Copier:
    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no id names two objects

    def copied(self, value: Any) -> Any:
        if isinstance(value, _ATOMS) and not isinstance(value, torch.nn.Module):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        return self._copied(value)

    def _remember(self, value: Any, copy: Any) -> None:
        self._memo[id(value)] = copy
        self._originals.append(value)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, types.MethodType):
            method = types.MethodType(value.__func__, self.copied(value.__self__))
            return method if method.__self__ is not value.__self__ else value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, weakref.ref):
            target = value()
            return value if target is None else weakref.ref(self.copied(target))
        if type(value) in _CONTAINERS:
            return _CONTAINERS[type(value)](self, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)._make(self.copied(each) for each in value)  # type: ignore[attr-defined]
        return self._object(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._stand_in(tensor)
        self._remember(tensor, copy)
        if copy is not tensor:
            self._attributes(tensor, copy)
        return copy

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if not function.__closure__ and not function.__defaults__ and not function.__kwdefaults__:
            return function
        cells = tuple(self._cell(cell) for cell in function.__closure__ or ())
        copy = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells or None
        )
        self._remember(function, copy)
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            self._fill(old, new)
        copy.__defaults__ = self.copied(function.__defaults__)
        copy.__kwdefaults__ = self.copied(function.__kwdefaults__)
        self._attributes(function, copy)
        copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        copy.__doc__ = function.__doc__
        return copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        """The cell that stands for this one, in every function that shares it."""
        if id(cell) not in self._memo:
            self._remember(cell, types.CellType())
        found: types.CellType = self._memo[id(cell)]
        return found

    def _fill(self, old: types.CellType, new: types.CellType) -> None:
        try:
            new.cell_contents  # noqa: B018 - filled already, by another function that shares it
        except ValueError:
            try:
                contents = old.cell_contents
            except ValueError:
                return
            new.cell_contents = self.copied(contents)

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        arguments = [self.copied(each) for each in value.args]
        named = {key: self.copied(each) for key, each in value.keywords.items()}
        copy = type(value)(self.copied(value.func), *arguments, **named)
        self._remember(value, copy)
        return copy

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if not isinstance(value, torch.nn.Module) and not _is_plain(kind):
            return value
        try:
            copy: Any = object.__new__(_quiet(kind))
        except TypeError:
            return value
        self._remember(value, copy)
        for owner in kind.__mro__:
            for slot in _slots(owner):
                if hasattr(value, slot):
                    object.__setattr__(copy, slot, self.copied(getattr(value, slot)))
        if hasattr(value, "__dict__"):
            self._attributes(value, copy)
        return copy

    def _attributes(self, value: Any, copy: Any) -> None:
        own = dict(vars(value))  # at once: the engine may be at work meanwhile
        copy.__dict__.update({key: self.copied(each) for key, each in own.items()})

    def _mapping(self, value: Any) -> Any:
        copy = type(value)(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        self._remember(value, copy)
        for key, each in list(value.items()):
            copy[self.copied(key)] = self.copied(each)
        return copy

    def _list(self, value: Any) -> Any:
        copy = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
        self._remember(value, copy)
        copy.extend([self.copied(each) for each in list(value)])
        return copy

    def _set(self, value: set[Any]) -> Any:
        copy: set[Any] = set()
        self._remember(value, copy)
        copy.update([self.copied(each) for each in list(value)])
        return copy

    def _frozen(self, value: Any) -> Any:
        copy = [self.copied(each) for each in value]
        same = all(new is old for new, old in zip(copy, value, strict=True))
        return value if same else type(value)(copy)


_CONTAINERS: dict[type, Callable[[_Copier, Any], Any]] = {
    dict: _Copier._mapping,
    OrderedDict: _Copier._mapping,
    defaultdict: _Copier._mapping,
    list: _Copier._list,
    deque: _Copier._list,
    set: _Copier._set,
    tuple: _Copier._frozen,
    frozenset: _Copier._frozen,
}


def _is_plain(kind: type) -> bool:
    """Whether objects of a class are just their attributes: made by a `class` statement, ending quietly."""
    if type(kind).__module__ not in ("builtins", "abc", "typing", "typing_extensions"):
        return False  # an extension's types come with a metaclass of their own
    root = kind.__mro__[-2] if len(kind.__mro__) > 1 else object
    if "__dict__" not in vars(root) and "__slots__" not in vars(root):
        return False
    says_how = any(
        getattr(kind, name) is not getattr(object, name) for name in ("__reduce_ex__", "__reduce__")
    )
    return not says_how and not hasattr(kind, "__del__")


def _quiet(kind: type) -> type:
    """The class itself, or one like it whose objects end without letting go of what is not theirs."""
    if not hasattr(kind, "__del__"):
        return kind
    names = {"__del__": lambda self: None, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)


def _slots(owner: type) -> tuple[str, ...]:
    slots = vars(owner).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    mangled = (
        f"_{owner.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
    )
    return tuple(name for name in mangled if name not in ("__dict__", "__weakref__"))
