"""One update of an SGLang engine that has several ranks: all of them install a version, or none does."""

from __future__ import annotations

from typing import Any

import torch.distributed

from modelexpress_rl.errors import EngineUncertain, StateError
from modelexpress_rl.inference.client import ModelExpressGeneratorClient


def update_all_ranks(client: ModelExpressGeneratorClient, version_id: str, group: Any = None) -> None:
    """Stage and install a version; every rank of the engine calls it, between two batches.

    `group` is a process group of the engine's ranks that works on CPUs; SGLang's own where None. It waits for
    the slowest rank, at most as long as that group does.

    Raises:
        StateError: a rank could not stage it: no rank installs it.
        EngineUncertain: a rank could not install it: ranks may hold different versions, or parts of some.
    """
    group = group_of_sglang() if group is None else group
    staged, failure = None, None
    try:
        staged = client.stage_weight(version_id)
    except Exception as error:  # noqa: BLE001 (whatever it was, the other ranks must hear of it)
        failure = error
    said = _said_by_all(client, failure, group)
    if said is not None:
        if staged is not None:
            staged.release()
        raise StateError(f"version {version_id} is not installed: {said}") from failure
    assert staged is not None
    try:
        client.apply_weight(staged)
    except Exception as error:  # noqa: BLE001 (as above)
        failure = error
    said = _said_by_all(client, failure, group)
    if said is not None:
        raise EngineUncertain(f"version {version_id} was not installed on every rank: {said}") from failure


def group_of_sglang() -> Any:
    """The process group of all ranks of this SGLang engine, for what is exchanged on CPUs."""
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group


def _said_by_all(client: ModelExpressGeneratorClient, failure: Exception | None, group: Any) -> str | None:
    """What failed on which rank, and what each holds; None where nothing did. Every rank calls it."""
    own = (None if failure is None else f"{type(failure).__name__}: {failure}", _holds(client))
    said: list[Any] = [own] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(said, own, group=group)
    failures = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(said) if each is not None]
    held = [f"rank {rank} holds {each}" for rank, (_, each) in enumerate(said)]
    return "; ".join(failures + held) if failures else None


def _holds(client: ModelExpressGeneratorClient) -> str:
    if client.uncertain:
        return "parts of several versions until one is installed"
    version_id = client.serving_version_id
    return "what it was started with" if version_id is None else f"version {version_id}"
