"""Loading through the module's own `load_weights`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from modelexpress_rl.errors import ModelExpressError, StateError
from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.engines.torch.capture import Load, load_weights
from modelexpress_rl.inference.engines.torch.dtypes import as_tensor, torch_dtype
from modelexpress_rl.inference.engines.torch.mapping import named_tensors, writing
from modelexpress_rl.reshard.needs import Need


class ModuleAdapter:
    """Hands every published tensor, whole, to `module.load_weights`."""

    def __init__(self, module: torch.nn.Module, load: Load | None = None) -> None:
        self._module = module
        self._load = load or load_weights

    def loader(self, published: Mapping[str, PublishedTensor]) -> ModuleLoader:
        """See `GeneratorEngineAdapter.loader`."""
        for name, tensor in published.items():
            torch_dtype(tensor.dtype, tensor=name)
        return ModuleLoader(self._module, self._load, published)


class ModuleLoader:
    """One structure of published tensors, in the order of their names.

    Where `load_weights` says which parameters it loaded (as vLLM's models do), one that it left out is
    an error. So is a parameter that it made an alias of the staged bytes: those are overwritten later.
    """

    def __init__(self, module: torch.nn.Module, load: Load, published: Mapping[str, PublishedTensor]) -> None:
        self._module = module
        self._load = load
        self._needs = tuple(
            Need(name, tensor.dtype, (0,) * len(tensor.shape), tensor.shape)
            for name, tensor in sorted(published.items())
        )

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `WeightLoader.needs`."""
        return self._needs

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.check`."""
        if [each.need for each in staged] != list(self._needs):
            raise StateError("the staged tensors are not those that this loader asked for")
        for name, tensor in named_tensors(self._module).items():
            if tensor.is_meta:
                raise StateError(f"parameter {name!r} has no storage (it is on the meta device)")

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.install`."""
        with writing(self._module.parameters()):
            loaded = self._load(self._module, _named(staged))
        if isinstance(loaded, (set, frozenset, list, tuple)):
            self._require_all(loaded)
        self._require_no_alias(staged)

    def _require_all(self, loaded: Iterable[object]) -> None:
        tensors = named_tensors(self._module)
        done = {id(tensors[name]) for name in loaded if isinstance(name, str) and name in tensors}
        left = [name for name, parameter in self._module.named_parameters() if id(parameter) not in done]
        if done and left:
            raise ModelExpressError(
                f"load_weights loaded {len(done)} parameters, but not {', '.join(map(repr, left[:5]))}"
                f"{' and others' if len(left) > 5 else ''}"
            )

    def _require_no_alias(self, staged: Sequence[StagedTensor]) -> None:
        begins = np.array([each.data.ctypes.data for each in staged], np.uint64)
        order = np.argsort(begins)
        begins, sizes = begins[order], np.array([each.data.size for each in staged], np.uint64)[order]
        for name, tensor in named_tensors(self._module).items():
            if tensor.device.type != "cpu" or not tensor.numel():
                continue
            addr = tensor.data_ptr()
            at = int(np.searchsorted(begins, np.uint64(addr), side="right")) - 1
            if at >= 0 and addr < int(begins[at]) + int(sizes[at]):
                raise ModelExpressError(f"load_weights made parameter {name!r} an alias of the staged bytes")


def _named(staged: Sequence[StagedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for each in staged:
        yield each.need.name, as_tensor(each)
