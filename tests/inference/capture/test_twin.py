"""Twins: nothing of the module itself is in them, but what can't be copied."""

from __future__ import annotations

import enum
import functools
import threading
import weakref
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.engines.torch.capture.twin import twin
from tests.inference.capture.support import state

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


@dataclass
class Settings:
    rank: int
    owner: Any
    parts: list[Any] = field(default_factory=list)


class Slots:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.__hidden = [shown]

    def hidden(self) -> Any:
        return self.__hidden


class Closes:
    """An object that owns something: a copy of it would let go of that a second time."""

    closed = 0

    def __del__(self) -> None:
        Closes.closed += 1


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.nn.Parameter(torch.ones(2, 3))
        self.weight = weight
        self.child = torch.nn.Linear(3, 2)
        self.child.weight = weight  # tied
        self.register_buffer("steps", torch.zeros(1))
        self.settings = Settings(1, self, [weight])
        self.slots = Slots(weight)
        self.mixed = {"deque": deque([weight], maxlen=3), "pair": Pair(weight, 1), "by": {weight: self}}
        self.found = defaultdict(list, a=[weight])
        self.frozen = (1, ("a", frozenset({2})))
        self.lock = threading.Lock()
        self.colour = Colour.RED
        self.closes = Closes()
        self.seen = {weight}
        self.back = weakref.ref(self.child)
        self.dead = weakref.ref(Settings(0, None))
        self.bound = self.forward
        self.partial = functools.partial(self.scaled, weight, factor=weight)
        self.closure = lambda: (weight, self)
        self.recursive = self._recursive()
        self.defaults = lambda module=self: module
        weight.loader = functools.partial(Holder.scaled, self)
        weight.owner = self

    def _recursive(self) -> Any:
        def count(n: int) -> Any:
            return self if n == 0 else count(n - 1)

        return count

    def scaled(self, *args: Any, **named: Any) -> Any:
        return self, args, named

    def forward(self) -> Any:
        return self


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return torch.nn.Parameter(meta) if isinstance(tensor, torch.nn.Parameter) else meta


def test_a_twin_names_only_itself() -> None:
    module = Holder()
    before = state(module)
    copy: Any = twin(module, stand_in)
    weight = copy.weight
    assert weight.is_meta
    assert copy.child.weight is weight
    assert copy.steps.is_meta
    assert (copy.settings.owner, copy.settings.parts, copy.settings.rank) == (copy, [weight], 1)
    assert copy.slots.shown is weight
    assert copy.slots.hidden()[0] is weight
    assert copy.mixed["deque"][0] is weight
    assert copy.mixed["deque"].maxlen == 3
    assert copy.mixed["pair"] == Pair(weight, 1)
    assert copy.mixed["by"][weight] is copy
    assert copy.found["a"] == [weight]
    assert copy.found["b"] == []
    assert copy.seen == {weight}
    assert copy.back() is copy.child
    assert copy.dead() is None
    assert copy.bound() is copy
    assert copy.partial() == (copy, (weight,), {"factor": weight})
    assert copy.closure() == (weight, copy)
    assert copy.recursive(2) is copy
    assert copy.defaults() is copy
    assert weight.loader()[0] is copy
    assert weight.owner is copy
    assert state(module) == before


def test_what_can_not_be_copied_is_shared() -> None:
    module = Holder()
    copy: Any = twin(module, stand_in)
    assert copy.lock is module.lock
    assert copy.colour is Colour.RED
    assert copy.frozen is module.frozen
    assert copy.closes is module.closes
    closed = Closes.closed
    del copy
    assert Closes.closed == closed


def test_a_twin_of_a_module_that_closes_something_closes_nothing() -> None:
    class Closing(torch.nn.Linear):
        def __del__(self) -> None:
            Closes.closed += 1

    module = Closing(2, 2)
    closed = Closes.closed
    copy = twin(module, stand_in)
    assert isinstance(copy, Closing)
    assert (type(copy).__name__, copy.weight.is_meta) == ("Closing", True)
    del copy
    assert Closes.closed == closed
    del module
    assert Closes.closed == closed + 1


def test_a_twin_does_not_keep_its_module_alive() -> None:
    module = torch.nn.Linear(2, 2)
    gone = weakref.ref(module)
    copy = twin(module, stand_in)
    del module
    assert gone() is None
    assert copy.weight.is_meta


def test_attributes_that_are_nested_too_deep_are_refused() -> None:
    module = torch.nn.Linear(2, 2)
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    module.nested = nested  # type: ignore[assignment]
    with pytest.raises(UsageError, match="nested too deep"):
        twin(module, stand_in)
