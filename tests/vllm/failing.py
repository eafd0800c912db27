"""Run in vLLM's workers by `collective_rpc`: has the install fail on rank 1, and what each rank holds."""

from __future__ import annotations

from typing import Any

from modelexpress_rl.inference.engines.vllm.host import Reload

_end = Reload.end


def _failing(self: Reload, model: Any) -> None:
    raise RuntimeError("planted")


def fail_on_rank_1(worker: Any) -> None:
    if worker.rank == 1:
        Reload.end = _failing  # type: ignore[method-assign]


def mend(worker: Any) -> None:
    Reload.end = _end  # type: ignore[method-assign]


def held(worker: Any) -> str | None:
    version_id: str | None = worker.weight_transfer_engine.serving_version_id
    return version_id
