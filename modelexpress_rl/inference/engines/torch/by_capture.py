"""Loading as the module's own `load_weights` does, captured once: each rank reads only what it loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from modelexpress_rl.errors import StateError
from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.engines.torch.capture import Captured, CapturedCopy, Load, capture
from modelexpress_rl.inference.engines.torch.dtypes import as_tensor
from modelexpress_rl.inference.engines.torch.mapping import Expected, as_expected, named_tensors, writing
from modelexpress_rl.reshard.needs import Need

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


class CaptureLoader:
    """Makes the captured copies, from staged boxes into the live parameters, which keep their addresses."""

    def __init__(self, module: torch.nn.Module, captured: Captured) -> None:
        self.captured = captured
        self._module = module
        tensors = dict(module.named_buffers(remove_duplicate=False)) | named_tensors(module)
        names = dict.fromkeys(copy.target.name for copy in captured.copies)
        self._expected = {name: Expected.of(tensors[name], strided=True) for name in names}
        self._staged: Sequence[StagedTensor] | None = None
        self._where: list[tuple[torch.device, int]] = []
        self._copies: list[tuple[torch.Tensor, Value, tuple[torch.dtype, ...]]] = []
        self._checked = False

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `WeightLoader.needs`."""
        return self.captured.needs

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.check`."""
        tensors = {
            name: as_expected(self._module, name, expected) for name, expected in self._expected.items()
        }
        # Where neither the parameters nor the staging moved, the views of the last check are good still.
        where = [(tensor.device, tensor.data_ptr()) for tensor in tensors.values()]
        if self._staged is not staged or self._where != where:
            if [each.need for each in staged] != list(self.needs):
                raise StateError("the staged tensors are not those that this loader asked for")
            boxes = [as_tensor(each).reshape(-1) for each in staged]
            self._copies = [
                (target_of(copy, tensors[copy.target.name]), source_of(copy, boxes), copy.casts)
                for copy in self.captured.copies
            ]
            self._staged, self._where = staged, where
        self._checked = True

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """Write what `check` has just resolved; see `WeightLoader.install`."""
        if not self._checked or self._staged is not staged:
            raise StateError("install: it was not checked just before")
        self._checked = False
        with writing(target for target, _, _ in self._copies):
            for target, source, casts in self._copies:
                if not isinstance(source, torch.Tensor):
                    target.fill_(source)
                    continue
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
