"""The contract between a generator client and an inference engine: what to load, and how to install it.

An engine's context builds its adapter once. For each structure of published tensors (names, dtypes,
shapes) the adapter makes a `WeightLoader`, which is kept while that structure stays: it says which boxes
of which Hugging Face tensors this rank loads, and writes them into the live model at the safe point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from modelexpress_rl.reshard.needs import Need


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of the version: its dtype ("torch.bfloat16") and global shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StagedTensor:
    """One need whose bytes lie verified in the staging arena, row-major.

    `data` is a view of the arena (uint8, one-dimensional, writable), valid until the install returned:
    an engine copies out of it and never keeps it.
    """

    need: Need
    data: NDArray[np.uint8]


class WeightLoader(Protocol):
    """Loads one structure of published tensors into the engine."""

    @property
    def needs(self) -> Sequence[Need]:
        """What this rank loads. The dtype of a need is the published one; the engine casts as it copies."""
        ...

    def check(self, staged: Sequence[StagedTensor]) -> None:
        """Check, without touching a live weight, everything that could fail in `install`.

        `staged[i]` holds `needs[i]`.

        Raises:
            ModelExpressError: the engine is not as it was when the loader was made; the message names
                the tensor or parameter.
        """
        ...

    def install(self, staged: Sequence[StagedTensor]) -> None:
        """Write every staged tensor into the live model, at the caller's safe point.

        Whatever it raises means that parameters may hold either version.
        """
        ...


class GeneratorEngineAdapter(Protocol):
    """One engine rank, as the client sees it."""

    def loader(self, published: Mapping[str, PublishedTensor]) -> WeightLoader:
        """Make the loader for a version that publishes these tensors; no live weight is touched.

        A tensor that the engine loads and nobody publishes stays in the needs: the plan names it.

        Raises:
            GeometryError: a tensor's global shape or dtype can't be loaded into this engine.
            UsageError: the engine's own description contradicts itself.
        """
        ...


class GeneratorEngineContext(Protocol):
    """What a program hands to `ModelExpressGeneratorConfig.engine_context`."""

    def create_adapter(self) -> GeneratorEngineAdapter:
        """Make the adapter of this engine rank."""
        ...
