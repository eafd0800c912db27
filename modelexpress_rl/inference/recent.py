"""What was used in the last few versions: a trainer with several arenas comes back to each in turn."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

TURNS = 4


class Recent(Generic[K, V]):
    """A mapping that forgets what no one has asked for in the last `turns` turns; a turn is a version."""

    def __init__(self, turns: int = TURNS) -> None:
        self._turns = turns
        self._turn = 0
        self._kept: dict[K, V] = {}
        self._used: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def get(self, key: K) -> V | None:
        """What is kept, which counts as its use in this turn."""
        if key not in self._kept:
            return None
        self._used[key] = self._turn
        return self._kept[key]

    def put(self, key: K, value: V) -> None:
        """Keep a value."""
        self._kept[key] = value
        self._used[key] = self._turn

    def discard(self, key: K) -> None:
        """Forget one, if it is kept."""
        self._kept.pop(key, None)
        self._used.pop(key, None)

    def end_turn(self) -> None:
        """A version is through: forget what has not been used for long."""
        for key in [key for key, turn in self._used.items() if turn <= self._turn - self._turns]:
            self.discard(key)
        self._turn += 1
