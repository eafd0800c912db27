"""What an FSDP trainer says of its tensors: where they come from, their wire dtypes, their conversion."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelexpress_rl.train.config import TrainerEngineContext

if TYPE_CHECKING:
    from modelexpress_rl.train.engines.fsdp.adapter import FSDPAdapter
    from modelexpress_rl.train.engines.fsdp.casting import CastBuffers
    from modelexpress_rl.train.engines.fsdp.trace import Published, Signature


class Kept:
    """What outlives one adapter: a client makes an adapter for each state dict that it is given."""

    def __init__(self) -> None:
        self.traced: tuple[Signature, Published] | None = None
        # A deque, whose pop is one step: clients in several threads may share a context.
        self.spare: deque[CastBuffers] = deque(maxlen=1)


@dataclass(frozen=True, slots=True, eq=False)
class FSDPTrainerContext(TrainerEngineContext):
    """A trainer whose tensors are DTensors (FSDP2's `fully_shard`, tensor parallel, both) or plain ones.

    Floating-point tensors of two bytes or more travel as `wire_dtype`, or as what
    `wire_dtype_overrides` says for their name (a name of the state dict, or a published one); None is
    the dtype that they have. Dtypes are torch's, or their names. All others travel as they are. The
    copy modes cast while they capture; IN_PLACE lends memory as it is and refuses a tensor whose wire
    dtype is another one.

    `convert_native_to_hf` makes the published tensors out of the state dict, by views (slices, splits,
    transpositions, reshapes), copies, casts of the dtype, concatenations and stacks. It is called once,
    with tensors of the global shapes that have no storage; the rank's own memory is then published
    under the new names without a copy. It may change the dict in place and return None.

    `tensors` is what is published where `bind_tensors` isn't called: a model, a state dict, pairs of
    name and tensor, or a function that makes one of these. A model's state dict, and a function's
    result, is made anew for every version. `torch.compile`'s and activation checkpointing's prefixes
    are left out of names.
    """

    wire_dtype_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wire_dtype: Any = "bfloat16"
    convert_native_to_hf: Callable[[dict[str, Any]], Mapping[str, Any] | None] | None = None
    tensors: Any = None
    kept: Kept = field(default_factory=Kept, init=False, repr=False)

    def create_adapter(self) -> FSDPAdapter:
        """See `TrainerEngineContext`."""
        from modelexpress_rl.train.engines.fsdp.adapter import FSDPAdapter

        return FSDPAdapter(self)
