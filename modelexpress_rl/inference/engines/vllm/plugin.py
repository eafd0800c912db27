"""The entry point of `vllm.general_plugins`: vLLM calls it in each of its processes, perhaps repeatedly."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

BACKEND = "modelexpress-rl"
BACKEND_OF_VLLM = "modelexpress"
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
    drop_caches_after_updates()


def drop_caches_after_updates() -> None:
    """Have vLLM's engine core drop prefix and encoder caches at the end of each of our updates.

    They belong to the scheduler, which lives in another process than the workers, and vLLM drops them only
    where its caller asks for it. Requests that were frozen in the middle are computed anew.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if getattr(original, "drops_caches", False):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, method, *args, **kwargs)
        if method == "finish_weight_update" and _is_ours(self):
            _drop_caches(self)
        return answer

    collective_rpc.drops_caches = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc


def _is_ours(core: Any) -> bool:
    config = core.vllm_config.weight_transfer_config
    return config is not None and config.backend in (BACKEND, BACKEND_OF_VLLM)


def _drop_caches(core: Any) -> None:
    if not core.reset_prefix_cache() and not core.reset_prefix_cache(reset_running_requests=True):
        _log.warning("the prefix cache still holds blocks that were computed with the old weights")
    core.reset_encoder_cache()
