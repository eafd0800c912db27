"""The entry point of `vllm.general_plugins`: vLLM calls it in each of its processes, perhaps repeatedly."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from typing import Any

BACKEND = "modelexpress-rl"
BACKEND_OF_VLLM = "modelexpress"
_CALLS = frozenset(
    (
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    )
)
_ENGINE = "modelexpress_rl.inference.engines.vllm.weight_transfer_engine"

_log = logging.getLogger(__name__)


def register() -> None:
    """Offer the backend `modelexpress-rl`, and be `modelexpress` where that package is not installed.

    vLLM's own module of that name imports `modelexpress`, which nothing here stands in for. Where it is
    installed, vLLM's registration is left as it is.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    registry = WeightTransferEngineFactory._registry
    names = [BACKEND]
    if importlib.util.find_spec(BACKEND_OF_VLLM) is None:
        names.append(BACKEND_OF_VLLM)
    for name in names:
        registry.pop(name, None)
        WeightTransferEngineFactory.register_engine(name, _ENGINE, "ModelExpressWeightTransferEngine")
    care_for_updates()


def care_for_updates() -> None:
    """Have vLLM's engine core ask one rank for the outcome of our calls, and drop its caches after updates.

    Where a rank fails, vLLM leaves the other ranks' answers unread, and takes them for those to later calls.
    Ours are alike on all ranks, so that rank 0 answers for all.

    Prefix and encoder caches belong to the scheduler, which lives in another process than the workers, and
    vLLM drops them only where its caller asks for it. Requests that were frozen in the middle are computed
    anew.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if getattr(original, "cares_for_updates", False):
        return

    @functools.wraps(original)
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method not in _CALLS or not _is_ours(self):
            return original(self, method, timeout, args, kwargs)
        ask = self.model_executor.collective_rpc
        if "unique_reply_rank" in inspect.signature(ask).parameters:
            answer = [ask(method, timeout, args, kwargs, unique_reply_rank=0)]
        else:
            answer = ask(method, timeout, args, kwargs)
        if method == "finish_weight_update":
            _drop_caches(self)
        return answer

    collective_rpc.cares_for_updates = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc


def _is_ours(core: Any) -> bool:
    config = core.vllm_config.weight_transfer_config
    return config is not None and config.backend in (BACKEND, BACKEND_OF_VLLM)


def _drop_caches(core: Any) -> None:
    if not core.reset_prefix_cache() and not core.reset_prefix_cache(reset_running_requests=True):
        _log.warning("the prefix cache still holds blocks that were computed with the old weights")
    core.reset_encoder_cache()
