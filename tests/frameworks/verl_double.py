"""A stand-in for verl's checkpoint engines: the classes that a backend derives from and registers with."""

from __future__ import annotations

import abc
import sys
import types
from collections.abc import Callable
from typing import Any


class CheckpointEngineRegistry:
    """Backends by their names."""

    engines: dict[str, type[Any]] = {}  # noqa: RUF012

    @classmethod
    def register(cls, backend: str) -> Callable[[type[Any]], type[Any]]:
        def kept(engine: type[Any]) -> type[Any]:
            cls.engines[backend] = engine
            return engine

        return kept

    @classmethod
    def new(cls, backend: str, *arguments: Any, **named: Any) -> Any:
        return cls.engines[backend](*arguments, **named)


class CheckpointEngine(abc.ABC):
    """What verl calls."""

    @abc.abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abc.abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[Any, Any]: ...

    @abc.abstractmethod
    def init_process_group(self, **named: Any) -> None: ...

    @abc.abstractmethod
    def finalize(self) -> None: ...

    @abc.abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abc.abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> Any: ...


def install() -> None:
    """Make `verl.checkpoint_engine.base` importable."""
    for name in ("verl", "verl.checkpoint_engine", "verl.checkpoint_engine.base"):
        sys.modules.setdefault(name, types.ModuleType(name))
    base: Any = sys.modules["verl.checkpoint_engine.base"]
    base.CheckpointEngine, base.CheckpointEngineRegistry = CheckpointEngine, CheckpointEngineRegistry
