"""Wire dtypes: which dtype each tensor travels in, and the buffers into which the others are cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.fsdp.tensors import HeldTensor, without_wrappers

WIRE_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True, slots=True)
class WireDtypes:
    """The dtypes in which tensors travel; None is the dtype that a tensor has."""

    default: torch.dtype | None
    overrides: Mapping[str, torch.dtype | None]

    @classmethod
    def of(cls, default: Any, overrides: Mapping[str, Any]) -> WireDtypes:
        """Read a context's fields.

        Raises:
            UsageError: a dtype is none that a tensor can be cast to; the message names it.
        """
        if not isinstance(overrides, Mapping):
            raise UsageError(
                f"wire_dtype_overrides: expected names and their dtypes, got {type(overrides).__name__}"
            )
        return cls(
            _dtype("wire_dtype", default),
            {
                without_wrappers(name): _dtype(f"wire_dtype_overrides[{name!r}]", dtype)
                for name, dtype in overrides.items()
            },
        )

    def check(self, names: Iterable[str]) -> None:
        """Every override must be about one of these.

        Raises:
            UsageError: it isn't.
        """
        unknown = sorted(set(self.overrides) - set(names))
        if unknown:
            raise UsageError(
                f"wire_dtype_overrides: {unknown[0]!r} is neither in the state dict nor published"
                + (f", and {len(unknown) - 1} more" if len(unknown) > 1 else "")
            )

    def wire(self, name: str, natives: Mapping[str, torch.dtype], dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor travels that is made of `natives` and has `dtype` when it is made.

        Raises:
            UsageError: overrides contradict each other or the conversion, or name no floating point.
        """
        names = [one for one in (name, *natives) if one in self.overrides]
        chosen = {self.overrides[one] or dtype for one in names}
        is_converted = any(native != dtype for native in natives.values())
        if len(chosen) > 1:
            raise UsageError(
                f"tensor {name!r}: wire_dtype_overrides of {', '.join(names)} contradict each other: "
                f"{', '.join(sorted(map(str, chosen)))}"
            )
        if chosen:
            wire = chosen.pop()
            if wire != dtype and not dtype.is_floating_point:
                raise UsageError(f"wire_dtype_overrides[{names[0]!r}]: {dtype} is not cast to {wire}")
            if wire != dtype and is_converted:
                raise UsageError(
                    f"wire_dtype_overrides[{names[0]!r}]: convert_native_to_hf makes {name!r} {dtype}, "
                    f"expected the same, got {wire}"
                )
            return wire
        if self.default is None or is_converted or not dtype.is_floating_point or dtype.itemsize < 2:
            return dtype
        return self.default


def _dtype(field: str, value: Any) -> torch.dtype | None:
    if value is None:
        return None
    name = str(value)
    dtype = WIRE_DTYPES.get(name if name.startswith("torch.") else f"torch.{name}")
    if dtype is None:
        accepted = ", ".join(WIRE_DTYPES)
        raise UsageError(f"{field}: expected one of {accepted}, or None for the tensor's own, got {value!r}")
    return dtype


@dataclass(frozen=True, slots=True)
class CastKey:
    """One cast of a tensor's local part: which, to what, how big and where."""

    native: str
    wire: torch.dtype
    extents: tuple[int, ...]
    device: torch.device


def cast_into(key: CastKey, held: HeldTensor, target: Any) -> None:
    """Cast a tensor into memory of its bytes, row-major; on a GPU this is queued on the current stream."""
    into = target if isinstance(target, torch.Tensor) else torch.from_numpy(target)
    with torch.no_grad():
        into.view(key.wire).view(key.extents).copy_(held.local, non_blocking=True)


class CastBuffers:
    """Row-major copies of local tensors in their wire dtypes: one allocation per dtype and device.

    For what is then packed in blocks of columns; else casts go straight into the memory that is read.
    """

    def __init__(self, keys: Sequence[CastKey]) -> None:
        self.keys = tuple(keys)
        self._views: dict[CastKey, torch.Tensor] = {}
        for dtype, device in dict.fromkeys((key.wire, key.device) for key in keys):
            of_this = [key for key in keys if (key.wire, key.device) == (dtype, device)]
            sizes = [torch.Size(key.extents).numel() for key in of_this]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
            for key, part in zip(of_this, torch.split(flat, sizes), strict=True):
                self._views[key] = part.view(key.extents)

    def __getitem__(self, key: CastKey) -> torch.Tensor:
        return self._views[key]

    def fill(self, held: Mapping[str, HeldTensor]) -> None:
        """Cast every tensor as it is now, and return when that has ended. Run it in a thread."""
        with torch.no_grad():
            for key, view in self._views.items():
                view.copy_(held[key.native].local)
        for device in {key.device for key in self.keys if key.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
