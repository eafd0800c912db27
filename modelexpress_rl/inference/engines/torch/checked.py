"""What loaders by copies share: a check resolves every copy, an install only makes what was checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch

from modelexpress_rl.errors import StateError
from modelexpress_rl.inference.adapter import StagedTensor
from modelexpress_rl.inference.engines.torch.dtypes import as_tensor
from modelexpress_rl.inference.engines.torch.mapping import Expected, as_expected, writing
from modelexpress_rl.reshard.needs import Need

Copy = TypeVar("Copy")


class CheckedLoader(ABC, Generic[Copy]):
    """A `WeightLoader` that keeps its copies for as long as neither parameters nor staging move.

    `expected` are the parameters that it writes, as they were when it was made.
    """

    def __init__(
        self, module: torch.nn.Module, needs: Sequence[Need], expected: Mapping[str, Expected]
    ) -> None:
        self._module = module
        self._needs = tuple(needs)
        self._expected = expected
        self._staged: Sequence[StagedTensor] | None = None
        self._where: list[tuple[torch.device, int, tuple[int, ...]]] = []
        self._copies: list[Copy] = []
        self._checked = False

    @property
    def needs(self) -> tuple[Need, ...]:
        """See `WeightLoader.needs`."""
        return self._needs

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """See `WeightLoader.check`."""
        tensors = {
            name: as_expected(self._module, name, expected) for name, expected in self._expected.items()
        }
        # Where neither the parameters nor the staging moved, the views of the last check are good still.
        where = [(tensor.device, tensor.data_ptr(), tensor.stride()) for tensor in tensors.values()]
        if self._staged is not staged or self._where != where:
            if [each.need for each in staged] != list(self._needs):
                raise StateError("the staged tensors are not those that this loader asked for")
            self._copies = self._matched([as_tensor(each) for each in staged], tensors)
            self._staged, self._where = staged, where
        self._checked = True

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """Write what `check` has just resolved; see `WeightLoader.install`."""
        if not self._checked or self._staged is not staged:
            raise StateError("install: it was not checked just before")
        self._checked = False
        with writing(self._target(copy) for copy in self._copies):
            for copy in self._copies:
                self._write(copy)

    @abstractmethod
    def _matched(self, boxes: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[Copy]:
        """Every copy from a staged box, in the order of the needs, into a view of a parameter."""

    @abstractmethod
    def _target(self, copy: Copy) -> torch.Tensor:
        """The view that a copy writes."""

    @abstractmethod
    def _write(self, copy: Copy) -> None:
        """Make one copy."""
