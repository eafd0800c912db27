"""Loads of tensors that a trainer publishes under names and in layouts of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from modelexpress_rl.errors import ModelExpressError, UsageError
from modelexpress_rl.inference.engines.torch.capture import Load, load_weights

Convert: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any] | None]
"""Makes Hugging Face tensors out of native ones; may change the dict in place, and return None."""


def converting(convert: Convert, load: Load = load_weights) -> Load:
    """A load that hands over what `convert` makes of the published tensors.

    In a capture these have no memory: `convert` slices, transposes, splits, joins and renames, as a
    `load_weights` may.
    """

    def load_converted(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
        native = dict(weights)
        try:
            converted = convert(native)
        except ModelExpressError:
            raise
        except Exception as error:
            raise UsageError(f"convert_native_to_hf: failed: {type(error).__name__}: {error}") from error
        return load(model, iter((native if converted is None else converted).items()))

    return load_converted
