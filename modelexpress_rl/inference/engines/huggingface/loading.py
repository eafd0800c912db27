"""Loading a `transformers` model as `from_pretrained` does, by copies into the parameters that it has.

Since version 5 a model may keep its parameters otherwise than its checkpoints: `transformers` has rules
for each model that rename, stack, join or transpose. They are applied here to what is published, and as
they only view and copy, a capture sees through them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from modelexpress_rl.errors import GeometryError, ModelExpressError, UsageError


def load_checkpoint(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy the tensors of a checkpoint into `model`; names that it does not have are left aside.

    Raises:
        GeometryError: the tensors for a parameter do not make one of its shape.
        UsageError: this `transformers` has no rules of a kind that is known here.
    """
    rules = _Rules(model)
    for name, tensor in sorted(weights, key=lambda each: _natural(each[0])):
        rules.add(name, tensor)
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, value, made_of in rules.converted():
        target = targets.get(name)
        if target is None:
            continue
        if value.shape != target.shape:
            raise GeometryError(
                f"parameter {name!r} is {tuple(target.shape)}, but {made_of} make {tuple(value.shape)}"
            )
        target.data.copy_(value)


class _Rules:
    """The rules of one model, and what was collected for each of its parameters."""

    def __init__(self, model: Any) -> None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError as error:
            raise UsageError(
                f"transformers 5 or newer is needed for a HuggingFaceGeneratorContext ({error}); "
                f"a model of an older one is loaded by TorchGeneratorContext(model)"
            ) from error
        self._model = model
        self._names: dict[str, Any] = model.state_dict()
        self._rename = rename_source_key
        self._renaming = WeightRenaming
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {p: rule for rule in self._converters for p in rule.source_patterns}
        self._collected: dict[str, Any] = {}
        self._names_of: dict[str, list[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor to those that make the same parameter."""
        target, pattern = self._rename(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._names
        )
        if target not in self._names and name in self._names:
            target, pattern = name, None
        if target not in self._names:
            return
        if target not in self._collected:
            # Each parameter has a rule of its own: it collects.
            rule = None if pattern is None else copy.deepcopy(self._by_pattern[pattern])
            self._collected[target] = rule or self._renaming(name, target)
        self._collected[target].add_tensor(target, name, pattern or name, tensor)
        self._names_of.setdefault(target, []).append(name)

    def converted(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Every parameter's name, the view or copy of tensors that it holds, and of which, in words."""
        for target, rule in self._collected.items():
            names = self._names_of[target]
            made_of = (
                f"{len(names)} tensors ({names[0]!r} to {names[-1]!r})" if names[1:] else f"{names[0]!r}"
            )
            try:
                found = rule.convert(target, model=self._model, config=self._model.config)
            except ModelExpressError:
                raise
            except Exception as error:
                raise GeometryError(
                    f"parameter {target!r}: transformers can't make it of {made_of}: {error}"
                ) from error
            for name, value in found.items():
                yield name, value[0] if isinstance(value, list) else value, made_of


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts numbers between dots as numbers: experts are stacked in their order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
