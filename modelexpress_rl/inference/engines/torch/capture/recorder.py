"""What a capture knows: which storage holds what, and every copy into the module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from modelexpress_rl.inference.engines.torch.capture.contents import (
    Computed,
    Constant,
    Content,
    Copied,
    Known,
    Part,
    Published,
    Resolved,
    StandIn,
    overlaid,
    resolved,
)
from modelexpress_rl.inference.engines.torch.capture.errors import CaptureRefused, refused
from modelexpress_rl.inference.engines.torch.capture.strided import Axes, Fragmented, Transfer, row_major


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A copy into a view of a storage of the live module, `key`; its parts write different elements of it.

    `offset` and `dims` (size, stride) are the view's, in elements of `dtype`.
    """

    key: int
    stand_in: StandIn
    dtype: torch.dtype
    offset: int
    dims: tuple[tuple[int, int], ...]
    parts: tuple[Resolved, ...]


def key_of(tensor: torch.Tensor) -> int | None:
    """Names the storage of a tensor; None where it has none of the usual kind."""
    if tensor.layout != torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def place_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Where a tensor lies in its storage: offset and strides."""
    return int(tensor.storage_offset()), tuple(tensor.stride())


def part_of(view: torch.Tensor, content: Content, offset: tuple[int, ...]) -> Part:
    """A view of `content` as a part of a copy."""
    return Part(offset, tuple(view.shape), content, view.dtype, *place_of(view))


class Recorder:
    """One capture's knowledge. Tensors of the module and published ones are on the meta device."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.refusal: CaptureRefused | None = None
        self.at_work = False
        self._contents: dict[int, Content] = {}
        self._devices: dict[int, torch.device] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no key names two storages
        self._stand_in_of: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()
        self._read: set[int] = set()
        self._written: set[int] = set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What runs in here is the capture's own doing."""
        before, self.at_work = self.at_work, True
        try:
            yield
        finally:
            self.at_work = before

    def publish(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A published tensor, without memory."""
        with self.working():
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._keep(tensor, Published(name, tuple(shape), dtype), torch.device("cpu"))
        return tensor

    def stand_in(self, live: torch.Tensor, name: str, *, is_parameter: bool) -> torch.Tensor:
        """A tensor like `live`, without memory; tensors of one storage get tensors of one storage."""
        key = key_of(live)
        assert key is not None
        if key not in self._stand_in_of:
            storage = live.untyped_storage()
            self._kept.append(storage)
            base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self._keep(base, StandIn(name, live.detach(), is_parameter), live.device)
            self._stand_in_of[key] = base
        return self._geometry(self._stand_in_of[key], live)

    def is_live(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory for which another tensor stands in."""
        return key_of(tensor) in self._stand_in_of

    def swapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or, where it lies in memory of the live module, what stands in for it."""
        key = key_of(tensor)
        base = None if key is None else self._stand_in_of.get(key)
        return tensor if base is None else self._geometry(base, tensor)

    def content(self, tensor: torch.Tensor) -> Content | None:
        """What the tensor's storage holds; None where it has memory of its own."""
        key = key_of(tensor)
        return None if key is None else self._contents.get(key)

    def device(self, tensor: torch.Tensor) -> torch.device | None:
        """The device on which the tensor would be."""
        key = key_of(tensor)
        return None if key is None else self._devices.get(key)

    def made(self, tensor: torch.Tensor) -> None:
        """The loader made a tensor with memory of its own."""
        if (key := key_of(tensor)) is not None:
            self._made.add(key)

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the loader made this memory itself."""
        return key_of(tensor) in self._made

    def hold(self, tensor: torch.Tensor, content: Content, device: torch.device | None) -> None:
        """Remember what a new tensor without memory holds, where it is no view of a known one."""
        key = key_of(tensor)
        if key is not None and key not in self._contents:
            self._keep(tensor, content, device or torch.device("cpu"))

    def new(self, tensor: torch.Tensor, content: Content) -> Copied:
        """A new tensor that is all of `content`, which has its shape where it has any."""
        axes = Axes.of(tensor.shape, tensor.stride())
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if axes is None:
            shape = (math.prod(shape),)
            axes, strides = Axes.row_major(shape), row_major(shape)
        if isinstance(content, (Constant, Computed)):
            strides = (0,) * len(shape)
        return Copied(
            axes,
            tensor.dtype,
            (Part((0,) * len(shape), shape, content, tensor.dtype, 0, strides),),
        )

    def copied(self, out: torch.Tensor, source: torch.Tensor, content: Content) -> Copied:
        """A new tensor that holds a copy of the view `source`."""
        axes = Axes.of(out.shape, out.stride())
        assert axes is not None
        part = part_of(source, content, (0,) * out.dim())
        return Copied(axes, out.dtype, (part,))

    def known(self, tensor: torch.Tensor) -> Known:
        """The values that a tensor with memory has now."""
        return Known(tensor.detach().clone(memory_format=torch.contiguous_format))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Published values are about to be written to memory of the loader: from now on it has none."""
        base = tensor._base if tensor._base is not None else tensor
        key = key_of(base)
        assert key is not None
        if not base.is_contiguous() or base.storage_offset():
            raise self.refuse("published values are written to a strided tensor that load_weights made")
        under = self.new(base.to("meta"), self.known(base))
        storage = base.untyped_storage()
        self._kept.append(storage)
        stand_in = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        self._keep(stand_in, under, base.device)
        self._stand_in_of[key] = stand_in
        return self._geometry(stand_in, tensor)

    def live_values(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """A view of the live memory that `tensor` stands for, to read it.

        Raises:
            CaptureRefused: what it holds depends on the version.
        """
        key, content = key_of(tensor), self.content(tensor)
        assert key is not None
        if not isinstance(content, StandIn) or content.is_parameter:
            raise self.refuse(f"{operation} reads values of {self.described(tensor)} to decide what to do")
        if key in self._written:
            raise self.refuse(f"{operation} reads {content.name!r}, which load_weights itself has written")
        self._read.add(key)
        live = content.live
        if live.dtype != tensor.dtype:
            raise self.refuse(f"{operation} reads {content.name!r} as {tensor.dtype}")
        return live.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write(self, target: torch.Tensor, source: torch.Tensor | None, content: Content) -> None:
        """Record a copy into `target`; `source` is None for a constant.

        Raises:
            CaptureRefused: it can't be expressed.
        """
        if not target.numel():
            return
        key, under = key_of(target), self.content(target)
        assert key is not None
        if source is None:
            place, dtype = (0, (0,) * target.dim()), target.dtype
        else:
            place, dtype = place_of(source.expand(target.shape)), source.dtype
        transfer = Transfer.of(target.shape, place, place_of(target))
        try:
            match under:
                case StandIn():
                    parts = self._expressible(key, under, resolved(content, transfer, dtype))
                    dims = tuple(sorted((dim.size, dim.target) for dim in transfer.dims))
                    self._written.add(key)
                    live = key_of(under.live)
                    assert live is not None
                    self.writes.append(Write(live, under, target.dtype, transfer.target, dims, parts))
                case Copied():
                    self._contents[key] = overlaid(under, transfer, content, dtype)
                case _:
                    raise refused(f"{self.described(target)} is overwritten")
        except Fragmented as error:
            into = under.name if isinstance(under, StandIn) else "a temporary tensor"
            names = ", ".join(map(repr, self.names(content)))
            raise self.refuse(f"tensor {names} into {into!r}: {error}") from error
        except CaptureRefused as error:
            raise self.keep_refusal(error) from None

    def _expressible(self, key: int, stand_in: StandIn, parts: list[Resolved]) -> tuple[Resolved, ...]:
        into = f"parameter {stand_in.name!r}" if stand_in.is_parameter else f"{stand_in.name!r}"
        if key in self._read:
            raise refused(f"{into} is read and then written")
        for part in parts:
            match part.content:
                case Computed(operation, names):
                    of = ", ".join(map(repr, names)) or "nothing that is published"
                    raise refused(f"{into} gets the result of {operation} on tensor {of}")
                case StandIn(name=name):
                    raise refused(f"{into} gets a copy of parameter {name!r}")
                case Published(name, _, dtype) if dtype.itemsize != part.dtype.itemsize:
                    raise refused(f"tensor {name!r}, published as {dtype}, is viewed as {part.dtype}")
        return tuple(parts)

    def described(self, tensor: torch.Tensor) -> str:
        """Names a tensor by what it holds."""
        match self.content(tensor):
            case Published(name):
                return f"tensor {name!r}"
            case StandIn(name=name, is_parameter=is_parameter):
                return f"parameter {name!r}" if is_parameter else f"{name!r}"
            case None:
                return "a tensor that is not of the module"
            case content:
                return f"what was made of tensor {', '.join(map(repr, self.names(content)))}"

    def names(self, content: Content | None) -> tuple[str, ...]:
        """The published tensors (or those of the module) of which something was made."""
        match content:
            case Published(name) | StandIn(name=name):
                return (name,)
            case Computed(_, names):
                return names
            case Copied(parts=parts):
                return tuple(dict.fromkeys(name for part in parts for name in self.names(part.content)))
            case _:
                return ()

    def refuse(self, what: str) -> CaptureRefused:
        """The first refusal is kept, for a loader that swallows it."""
        return self.keep_refusal(refused(what))

    def keep_refusal(self, error: CaptureRefused) -> CaptureRefused:
        """See `refuse`."""
        self.refusal = self.refusal or error
        return error

    def _keep(self, tensor: torch.Tensor, content: Content, device: torch.device) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._kept.append(storage)
        self._contents[key] = content
        self._devices[key] = device

    def _geometry(self, base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        with self.working():
            return torch.empty(0, dtype=like.dtype, device="meta").set_(
                base.untyped_storage(), like.storage_offset(), like.size(), like.stride()
            )
