"""Noticing that a tensor was written while it was being captured, by torch's own count of such writes.

torch counts what operations write in place, most optimizers' too, for the sake of autograd. What writes
memory behind its back is not noticed: a kernel of one's own, `tensor.data`, numpy, an optimizer with
`fused=True`, and whatever is written through a DTensor, as FSDP2's optimizers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelexpress_rl.errors import StateError
from modelexpress_rl.train.adapter import SourceBox


def _is_counted(owner: Any) -> bool:
    """Whether it is a torch tensor whose writes are counted; what was made in inference mode is not."""
    is_inference = getattr(owner, "is_inference", None)
    return callable(is_inference) and not is_inference() and hasattr(owner, "_version")


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
            if _is_counted(box.owner):
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
