"""`convert_native_to_hf`, run once on tensors without storage: what it makes out of what.

Views need no record: a view of a storage-free tensor has its strides. What makes a new tensor is seen
by a dispatch mode: copies, casts, concatenations and stacks are kept as joins of views, and of anything
else only its name is kept, for the refusal of what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.fsdp.pieces import Lens, NotABoxError, Piece, row_major

_aten = torch.ops.aten
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_DEVICE_ARGUMENTS = ("device", "pin_memory", "non_blocking")


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """A tensor of the state dict."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A new tensor: views one after the other along `dim`, each cast to its dtype."""

    parts: tuple[View, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: str


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """A new tensor whose values are not those of others."""

    made_by: str
    dtype: torch.dtype


Frame: TypeAlias = Native | Joined | Unknown


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A strided view of a frame, in elements of the frame's row-major order, and who made it."""

    frame: Frame
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    dtype: torch.dtype
    made_by: str


Published: TypeAlias = Mapping[str, View]
Signature: TypeAlias = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, global shape and dtype of every tensor of the state dict."""
Convert: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any] | None]


def as_they_are(signature: Signature) -> Published:
    """Every tensor under its own name."""
    return {
        name: View(Native(name, shape, dtype), shape, row_major(shape), 0, dtype, "the state dict")
        for name, shape, dtype in signature
    }


def trace(convert: Convert, signature: Signature) -> Published:
    """What a conversion publishes, as views of what it was given.

    Raises:
        UsageError: it can't run without values, or gives what is no tensor made of the state dict's.
    """
    recorder = _Recorder()
    tensors = {name: recorder.native(name, shape, dtype) for name, shape, dtype in signature}
    try:
        with torch.no_grad(), recorder:
            result = convert(tensors)
    except Exception as error:
        raise UsageError(
            "convert_native_to_hf: failed on tensors without storage, on which it is tried once (it may "
            f"not look at values): {type(error).__name__}: {error}"
        ) from error
    published = tensors if result is None else result
    if not isinstance(published, Mapping):
        raise UsageError(
            "convert_native_to_hf: expected a mapping of names to tensors, or None where it changed the "
            f"dict in place, got {type(published).__name__}"
        )
    return {str(name): recorder.published(str(name), tensor) for name, tensor in published.items()}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes how each new storage came about."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._frames: dict[int, Frame] = {}
        self._made_by: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # what is known by its identity must not be collected

    def native(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A storage-free tensor that stands for one of the state dict."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._know(tensor, Native(name, shape, dtype), "the state dict")
        return tensor

    def published(self, name: str, tensor: Any) -> View:
        """What a result is a view of."""
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"tensor {name!r}: convert_native_to_hf gave {type(tensor).__name__}, not a tensor"
            )
        if _storage(tensor) not in self._frames:
            raise UsageError(
                f"tensor {name!r}: convert_native_to_hf gave a tensor that is not made of the state dict's"
            )
        return self._view(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is _aten._to_copy.default:
            # There is nothing to move to another device.
            given = {key: value for key, value in given.items() if key not in _DEVICE_ARGUMENTS}
        out = func(*args, **given)
        name = str(func)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for written in _tensors(value):
                    self._know(written, Unknown(name, written.dtype), name)
        for made in _tensors(out):
            if _storage(made) in self._frames:
                says_more = self._made_by.get(id(args[0])) if func is _aten.detach.default else None
                self._made_by[id(made)] = says_more or name
                self._alive.append(made)
            else:
                self._know(made, self._made(func, args, given, made, name), name)
        return out

    def _made(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: torch.Tensor, name: str
    ) -> Frame:
        inputs, dim = _joined_inputs(func, args, kwargs, made)
        strides = made.stride()
        order = sorted(range(made.ndim), key=lambda axis: (-strides[axis], axis))
        laid_out = made.permute(order)
        if (
            not inputs
            or not laid_out.is_contiguous()
            or any(_storage(one) not in self._frames for one in inputs)
        ):
            return Unknown(name, made.dtype)
        parts = tuple(self._view(one.permute(order)) for one in inputs)
        at = order.index(dim) if order else 0
        return Joined(parts, at, tuple(laid_out.shape), made.dtype, name)

    def _view(self, tensor: torch.Tensor) -> View:
        return View(
            self._frames[_storage(tensor)],
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            self._made_by.get(id(tensor), "a view"),
        )

    def _know(self, tensor: torch.Tensor, frame: Frame, made_by: str) -> None:
        self._frames[_storage(tensor)] = frame
        self._made_by[id(tensor)] = made_by
        self._alive.append(tensor)


def _joined_inputs(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: torch.Tensor
) -> tuple[list[torch.Tensor], int]:
    """What a new tensor is put together from, in its own rank, and along which dimension."""
    if func in _COPIES:
        return [args[0]], 0
    if func not in (_aten.cat.default, _aten.stack.default):
        return [], 0
    given: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    dim = given % made.ndim
    if func is _aten.stack.default:
        return [one.unsqueeze(dim) for one in args[0]], dim
    # torch.cat leaves out empty vectors of any rank.
    return [one for one in args[0] if one.ndim == made.ndim], dim


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # its data pointer is 0 for all


def natives_of(view: View) -> dict[str, Native]:
    """The tensors of the state dict that a view shows some of, by name."""
    match view.frame:
        case Native() as native:
            return {native.name: native}
        case Joined() as joined:
            return {name: one for part in joined.parts for name, one in natives_of(part).items()}
        case Unknown():
            return {}


def pieces_of(name: str, view: View, held: Callable[[Native], Sequence[Piece]]) -> list[Piece]:
    """The pieces of a published tensor that this rank holds, where `held` says what it holds of natives.

    Raises:
        UsageError: it is more than views, copies, one cast and concatenations of the state dict's
            tensors; the message names it and the operation.
    """
    frame = view.frame
    if isinstance(frame, Unknown):
        raise UsageError(
            f"tensor {name!r}: convert_native_to_hf makes it by {frame.made_by}, which is no view, copy, "
            "cast or concatenation of the state dict's tensors; publish what it is made of"
        )
    if view.dtype != frame.dtype:
        raise UsageError(
            f"tensor {name!r}: convert_native_to_hf looks at the bytes of {frame.dtype} as {view.dtype} by "
            f"{view.made_by}; only a cast is possible"
        )
    inner = held(frame) if isinstance(frame, Native) else _pieces_of_join(name, frame, held)
    try:
        lens = Lens.of(frame.shape, view.sizes, view.strides, view.start)
    except NotABoxError:
        raise UsageError(
            f"tensor {name!r}: convert_native_to_hf takes {view.sizes} out of {frame.shape} across its "
            f"dimensions by {view.made_by}; a published tensor must be made of boxes"
        ) from None
    return [seen for piece in inner for seen in lens.see(piece)]


def _pieces_of_join(name: str, frame: Joined, held: Callable[[Native], Sequence[Piece]]) -> list[Piece]:
    found, at = [], 0
    for part in frame.parts:
        casts = part.dtype != frame.dtype
        for piece in pieces_of(name, part, held):
            if casts and piece.is_cast:
                raise UsageError(
                    f"tensor {name!r}: convert_native_to_hf casts it twice, by {frame.made_by} last; each "
                    "cast rounds, only one is possible"
                )
            shifted = tuple(
                offset + at if dim == frame.dim else offset for dim, offset in enumerate(piece.offset)
            )
            found.append(replace(piece, offset=shifted, is_cast=casts or piece.is_cast))
        at += part.sizes[frame.dim] if part.sizes else 0
    return found
