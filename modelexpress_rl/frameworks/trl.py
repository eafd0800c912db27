"""TRL's asynchronous trainers: a `weight_transfer` that refits a `vllm serve` by versions.

AsyncGRPOTrainer(..., weight_transfer=ModelExpressWeightTransfer("http://localhost:8000", "policy"))

TRL calls it on its main process, which it hands every parameter, gathered.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable
from typing import Any

import torch

from modelexpress_rl.control import ModelExpressControlClient
from modelexpress_rl.errors import DeadlineExceeded, PeerError, StateError, Unavailable
from modelexpress_rl.frameworks.tensor_stream import StreamPublisher
from modelexpress_rl.version import WeightPayloadFormat

SLOT = "trl:main"
_POLL_S = 0.5


class ModelExpressWeightTransfer:
    """Has the calls of TRL's `WeightTransferClient`. Nothing is connected before `init_weight_transfer`.

    The server at `vllm_server_url` runs with our backend (`--weight-transfer-config`). `server_url` is the
    control plane (`MODEL_EXPRESS_URL` where None), as the trainer and vLLM's workers reach it. Versions are
    called `run:step`; a run has a name of its own unless one is given.
    """

    def __init__(
        self,
        vllm_server_url: str,
        model_name: str | None = None,
        *,
        server_url: str | None = None,
        run: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.step = 0
        self.run = run or uuid.uuid4().hex[:8]
        self._vllm = vllm_server_url.rstrip("/")
        self._model_name = model_name
        self._server_url = server_url
        self._timeout_s = timeout_s
        self._publisher: StreamPublisher | None = None
        self._control: ModelExpressControlClient | None = None

    def init_weight_transfer(self) -> None:
        """Wait for vLLM to be up, and have it and this process register with the control plane.

        Raises:
            DeadlineExceeded: vLLM does not answer.
            PeerError: vLLM refuses.
        """
        self._wait_for_vllm()
        self._publisher = StreamPublisher(self._model_name, SLOT, server_url=self._server_url)
        self._control = ModelExpressControlClient.connect(self._server_url)
        told = {"model_name": self._model_name, "server_url": self._server_url}
        self._post(
            "init_weight_transfer_engine",
            {"init_info": {name: value for name, value in told.items() if value is not None}},
        )

    def pause(self) -> None:
        """Have vLLM hold its requests."""
        self._post("pause?mode=keep")

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish what comes as the next version, have vLLM install it, and end it.

        Raises:
            PeerError: vLLM did not install it; the message is vLLM's own.
            UsageError, RpcError: it could not be published.
        """
        if self._publisher is None or self._control is None:
            raise StateError("send_weights: call init_weight_transfer first")
        self._publisher.copy(iterator)
        self.step += 1
        version_id = f"{self.run}:{self.step}"
        self._control.create_weight_version(
            model_name=self._publisher.model_name,
            idempotency_key=version_id,
            payload_format=WeightPayloadFormat.FULL_TENSOR,
            expected_source_slots=[SLOT],
            uid=version_id,
        )
        try:
            self._publisher.publish(version_id)
            self._post("start_weight_update")
            self._post("update_weights", {"update_info": {"version_id": version_id}})
            self._post("finish_weight_update", {"weight_version": version_id})
        finally:
            self._control.delete_weight_version(version_id)
            self._publisher.release()

    def resume(self) -> None:
        """Have vLLM go on."""
        self._post("resume")

    def pop_metrics(self) -> dict[str, float]:
        """The numbers of the last publication, once."""
        return {} if self._publisher is None else self._publisher.pop_metrics()

    def destroy(self) -> None:
        """Leave the control plane; idempotent."""
        publisher, self._publisher = self._publisher, None
        control, self._control = self._control, None
        if publisher is not None:
            publisher.close()
        if control is not None:
            control.close()

    def _wait_for_vllm(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{self._vllm}/health", timeout=5):
                    return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"vLLM at {self._vllm} was not up within {self._timeout_s:g} s: {error}"
                    ) from error
            time.sleep(_POLL_S)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        request = urllib.request.Request(
            f"{self._vllm}/{path}",
            data=b"" if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                return
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise PeerError(f"vLLM refused {path}: {error.code}: {said}") from error
        except OSError as error:
            raise Unavailable(f"vLLM at {self._vllm} could not be asked to {path}: {error}") from error
