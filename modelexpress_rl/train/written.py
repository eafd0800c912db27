"""Noticing that a tensor was written while it was being captured, by torch's own count of such writes.

torch counts what operations write in place, optimizers included, for the sake of autograd. What writes memory
behind its back (a kernel of one's own, `tensor.data`, numpy) is not noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelexpress_rl.errors import StateError
from modelexpress_rl.train.adapter import SourceBox


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Tensors with their counts at one time: names, tensors and counts of equal length."""

    names: tuple[str, ...]
    tensors: tuple[Any, ...]
    counts: tuple[int, ...]

    @classmethod
    def now(cls, boxes: Sequence[SourceBox]) -> Unwritten:
        """The counts of the torch tensors that own these boxes; others can't be noticed."""
        owners: dict[int, tuple[str, Any]] = {}
        for box in boxes:
            if hasattr(box.owner, "_version") and not box.owner.is_inference():
                owners.setdefault(id(box.owner), (box.name, box.owner))
        names, tensors = zip(*owners.values(), strict=True) if owners else ((), ())
        return cls(names, tensors, tuple(int(tensor._version) for tensor in tensors))

    def check(self) -> None:
        """Pass where nothing was written since.

        Raises:
            StateError: something was: it is named.
        """
        for name, tensor, count in zip(self.names, self.tensors, self.counts, strict=True):
            if tensor._version != count:
                raise StateError(
                    f"tensor {name!r} was written while it was captured, the version would be a mixture: "
                    "wait for weights_free before the optimizer step, or publish with overlap=PUBLISH"
                )
