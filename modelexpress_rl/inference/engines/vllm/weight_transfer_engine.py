"""vLLM's weight transfer backend: start, update with a version, finish, as vLLM's protocol has it.

vLLM makes one engine per worker, and asks all workers of a model alike. An update stages the version on
every rank; only if all ranks have it, they install, and only if all could, the update succeeded. So the
ranks of an engine hold one version, and every one of them raises where one does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from modelexpress_rl import envs
from modelexpress_rl.errors import EngineUncertain, StateError
from modelexpress_rl.inference.client import ModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.vllm.ahead import Ahead
from modelexpress_rl.inference.engines.vllm.context import VllmGeneratorContext
from modelexpress_rl.inference.engines.vllm.ranks import failures_of_ranks
from modelexpress_rl.inference.handle import StagedWeightHandle

_log = logging.getLogger(__name__)


@dataclass
class ModelExpressWeightTransferInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What `init_weight_transfer_engine` may say; each is as in `ModelExpressGeneratorConfig`.

    `model_name` is MODEL_NAME where None, and where that is unset, the name of vLLM's model.
    """

    model_name: str | None = None
    server_url: str | None = None
    initial_serving_version_id: str | None = None
    registration_ttl_seconds: int | None = None
    lease_ttl_seconds: int | None = None
    max_transfer_attempts: int = 3
    rpc_timeout_seconds: float = 30.0


@dataclass
class ModelExpressWeightTransferUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `update_weights` says: the version to install."""

    version_id: str


class ModelExpressWeightTransferEngine(
    WeightTransferEngine[ModelExpressWeightTransferInitInfo, ModelExpressWeightTransferUpdateInfo]  # type: ignore[misc]
):
    """The generator client of one vLLM worker.

    `start_weight_update`, `update_weights({"version_id": ...})`, `finish_weight_update`. Updates may fail
    and be tried again, in a session of their own. `serving_version_id` is what every parameter of this rank
    provably holds. Draft models are not updated.
    """

    init_info_cls = ModelExpressWeightTransferInitInfo
    update_info_cls = ModelExpressWeightTransferUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._client: ModelExpressGeneratorClient | None = None
        self._doubt: str | None = None
        self._ahead: Ahead | None = None

    @property
    def serving_version_id(self) -> str | None:
        """The version that every parameter of this rank provably holds; None where that can't be said."""
        return None if self._client is None else self._client.serving_version_id

    @property
    def ahead(self) -> Ahead | None:
        """What is staged, or being staged, before it is to be installed."""
        return self._ahead

    def init_transfer_engine(self, init_info: ModelExpressWeightTransferInitInfo) -> None:
        """Register with the control plane, on every rank or on none; once more after `shutdown`.

        Raises:
            UsageError: a value is not acceptable.
            StateError: it is registered already, or another rank could not be.
            Unavailable: the control plane can't be reached.
        """
        if self._client is not None:
            raise StateError("the weight transfer engine is initialized already: shut it down first")
        client, failure = None, None
        try:
            client = self._registered(init_info)
        except Exception as error:  # noqa: BLE001 (whatever it was, the other ranks must hear of it)
            failure = error
        if failures := failures_of_ranks(failure):
            if client is not None:
                client.close()
            raise failure or StateError(f"the weight transfer engine is not initialized: {failures}")
        self._client = client

    def _registered(self, init_info: ModelExpressWeightTransferInitInfo) -> ModelExpressGeneratorClient:
        client = ModelExpressGeneratorClient.initialize(
            ModelExpressGeneratorConfig(
                engine_context=VllmGeneratorContext(self.model, self.vllm_config),
                model_name=init_info.model_name or envs.model_name() or self.model_config.model,
                server_url=init_info.server_url,
                initial_serving_version_id=init_info.initial_serving_version_id,
                registration_ttl_seconds=init_info.registration_ttl_seconds,
                lease_ttl_seconds=init_info.lease_ttl_seconds,
                max_transfer_attempts=init_info.max_transfer_attempts,
                rpc_timeout_seconds=init_info.rpc_timeout_seconds,
            )
        )
        _log.info(
            "rank %d refits model %r as worker %s",
            self.parallel_config.rank,
            client.model_name,
            client.worker_id,
        )
        return client

    def stage_ahead(self, version_id: str) -> bool:
        """Begin to stage a version in the background, and answer whether it is staged; see `StagesAhead`.

        Raises:
            StateError: `init_weight_transfer_engine` was not called.
        """
        client = self._initialized()
        ahead = self._ahead
        if ahead is None or ahead.version_id != version_id or ahead.failed:
            self._ahead = ahead = Ahead(client, version_id, before=ahead)
        return ahead.ended and not ahead.failed

    def start_weight_update(self) -> None:
        """Nothing is prepared: the live weights are left alone until all ranks have staged the version.

        Raises:
            StateError: `init_weight_transfer_engine` was not called.
        """
        self._initialized()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage and install a version, on every rank or on none.

        Raises:
            UsageError: `update_info` is not `{"version_id": ...}`.
            ModelExpressError: a rank could not stage it; the engine serves what it served.
            EngineUncertain: a rank could not install it; ranks may hold different versions, or parts of some.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: ModelExpressWeightTransferUpdateInfo) -> None:
        """See `update_weights`."""
        client = self._initialized()
        version_id = update_info.version_id
        staged, failure = None, None
        try:
            staged = self._staged(client, version_id)
        except Exception as error:  # noqa: BLE001 (whatever it was, the other ranks must hear of it)
            failure = error
        failures = failures_of_ranks(failure, self._holds())
        if failures:
            if staged is not None:
                staged.release()
            raise StateError(f"version {version_id} is not installed: {failures}") from failure
        assert staged is not None
        try:
            client.apply_weight(staged)
        except Exception as error:  # noqa: BLE001 (as above)
            failure = error
        failures = failures_of_ranks(failure, self._holds())
        self._doubt = (
            f"version {version_id} was not installed on every rank: {failures}" if failures else None
        )
        if self._doubt is not None:
            raise EngineUncertain(self._doubt) from failure

    def _staged(self, client: ModelExpressGeneratorClient, version_id: str) -> StagedWeightHandle:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.version_id == version_id:
            if (staged := ahead.staged()) is not None:
                return staged
        elif ahead is not None:
            ahead.discard()
        return client.stage_weight(version_id)

    def finish_weight_update(self) -> None:
        """End the session. What vLLM cached of the old weights is dropped by the plugin, in the scheduler.

        Raises:
            EngineUncertain: the last install failed: the engine must not be said to serve the version.
        """
        if self._doubt is not None:
            raise EngineUncertain(self._doubt)

    def shutdown(self) -> None:
        """Leave the control plane; idempotent. The engine serves on with what it holds."""
        client, self._client, self._ahead = self._client, None, None
        if client is not None:
            client.close()

    def _initialized(self) -> ModelExpressGeneratorClient:
        if self._client is None:
            raise StateError("not initialized: call init_weight_transfer_engine first")
        return self._client

    def _holds(self) -> str:
        client = self._initialized()
        if client.uncertain:
            return "parts of several versions until one is installed"
        version_id = client.serving_version_id
        return "what it was started with" if version_id is None else f"version {version_id}"
