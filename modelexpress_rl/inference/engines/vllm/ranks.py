"""What the ranks of one engine tell each other: whether each could do its part, and what it holds."""

from __future__ import annotations

import torch.distributed
from vllm.distributed.parallel_state import get_world_group


def failures_of_ranks(failure: Exception | None, holds: str | None = None) -> str:
    """Every rank calls it; each gets what failed on which rank, and what each holds, or "" where nothing did.

    It waits for the slowest rank, at most as long as vLLM's own process group waits.
    """
    group = get_world_group()
    own = (None if failure is None else f"{type(failure).__name__}: {failure}", holds)
    said: list[tuple[str | None, str | None]] = [own]
    if group.world_size > 1:
        said = [own] * group.world_size
        torch.distributed.all_gather_object(said, own, group=group.cpu_group)
    failures = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(said) if each is not None]
    held = [f"rank {rank} holds {each}" for rank, (_, each) in enumerate(said) if each is not None]
    return "; ".join(failures + held) if failures else ""
