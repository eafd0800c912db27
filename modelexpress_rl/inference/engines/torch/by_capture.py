"""Loading as the module's own `load_weights` does, captured once: each rank reads only what it loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from modelexpress_rl.inference.adapter import PublishedTensor
from modelexpress_rl.inference.engines.torch.capture import Captured, CapturedCopy, Load, capture
from modelexpress_rl.inference.engines.torch.checked import CheckedLoader
from modelexpress_rl.inference.engines.torch.mapping import Expected, named_tensors

Value = torch.Tensor | bool | int | float | complex


class CaptureAdapter:
    """Runs `module.load_weights` once for each structure of published tensors, on a twin without memory."""

    def __init__(
        self, module: torch.nn.Module, load: Load | None, frozen: frozenset[str], aliases: Mapping[str, str]
    ) -> None:
        self._module = module
        self._load = load
        self._frozen = frozen
        self._aliases = aliases

    def loader(self, published: Mapping[str, PublishedTensor]) -> CaptureLoader:
        """See `GeneratorEngineAdapter.loader`."""
        captured = capture(
            self._module, published, load=self._load, frozen=self._frozen, aliases=self._aliases
        )
        return CaptureLoader(self._module, captured)


Resolved = tuple[torch.Tensor, Value, tuple[torch.dtype, ...]]
"""A view of a parameter, what is written into it, and the casts on the way."""


class CaptureLoader(CheckedLoader[Resolved]):
    """Makes the captured copies, from staged boxes into the live parameters, which keep their addresses."""

    def __init__(self, module: torch.nn.Module, captured: Captured) -> None:
        tensors = dict(module.named_buffers(remove_duplicate=False)) | named_tensors(module)
        names = dict.fromkeys(copy.target.name for copy in captured.copies)
        expected = {name: Expected.of(tensors[name], strided=True) for name in names}
        super().__init__(module, captured.needs, expected)
        self.captured = captured

    def _matched(self, boxes: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[Resolved]:
        flat = [box.reshape(-1) for box in boxes]
        return [
            (target_of(copy, tensors[copy.target.name]), source_of(copy, flat), copy.casts)
            for copy in self.captured.copies
        ]

    def _target(self, copy: Resolved) -> torch.Tensor:
        return copy[0]

    def _write(self, copy: Resolved) -> None:
        target, source, casts = copy
        if not isinstance(source, torch.Tensor):
            target.fill_(source)
            return
        for dtype in casts:
            source = source.to(dtype)
        target.copy_(source)


def target_of(copy: CapturedCopy, tensor: torch.Tensor) -> torch.Tensor:
    view = tensor.detach()
    if view.dtype != copy.target.dtype:
        view = view.view(copy.target.dtype)
    dims = copy.transfer.dims
    return view.as_strided(
        [dim.size for dim in dims],
        [dim.target for dim in dims],
        view.storage_offset() + copy.transfer.target,
    )


def source_of(copy: CapturedCopy, boxes: Sequence[torch.Tensor]) -> Value:
    value = copy.value if copy.need is None else boxes[copy.need]
    assert value is not None
    if not isinstance(value, torch.Tensor):
        return value
    dims = copy.transfer.dims
    if value.dtype != copy.dtype:
        value = value.view(copy.dtype)
    return value.as_strided(
        [dim.size for dim in dims],
        [dim.source for dim in dims],
        copy.transfer.source + value.storage_offset(),
    )
