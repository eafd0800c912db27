"""verl's checkpoint engine `modelexpress-rl`: named in verl's configuration, loaded by verl.

actor_rollout_ref.rollout.checkpoint_engine.backend=modelexpress-rl
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=modelexpress_rl.frameworks.verl

verl hands every actor rank all tensors, gathered one by one. Each rank keeps and publishes its share of them;
each rollout worker reads all, from all of them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from modelexpress_rl.control import ModelExpressControlClient
from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.frameworks.tensor_stream import NamedTensors, StreamPublisher, StreamReceiver
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionState

BACKEND = "modelexpress-rl"


@CheckpointEngineRegistry.register(BACKEND)
class ModelExpressCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One worker's end. `engine_kwargs` of verl's configuration are the keyword arguments.

    `model_name` is MODEL_NAME where None, `server_url` MODEL_EXPRESS_URL. Versions are called
    `run.update:step`, by verl's `global_steps`, so that an update that failed may be tried again. `timeout_s`
    bounds the waits for a version to exist and to be READY.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        model_name: str | None = None,
        server_url: str | None = None,
        timeout_s: float = 600.0,
        **_of_other_engines: Any,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._model_name = model_name
        self._server_url = server_url
        self._timeout_s = timeout_s
        self._life = uuid.uuid4().hex[:8]
        self._updates = 0
        self._run = self._life
        self._rank: int | None = None
        self._slots: list[str] = []
        self._publisher: StreamPublisher | None = None
        self._receiver: StreamReceiver | None = None
        self._control: ModelExpressControlClient | None = None
        self._version_id: str | None = None

    def prepare(self) -> dict[str, Any]:
        """Called on every worker before every update: what the others are to know of it."""
        self._updates += 1
        return {"run": f"{self._life}.{self._updates}"}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What `init_process_group` is called with on each worker; the first actor names the run."""
        run = metadata[0]["run"]
        slots = [f"verl:actor:{rank}" for rank in range(actor_wg_world_size)]

        def arguments(ranks: list[int | None]) -> dict[str, list[Any]]:
            return {"rank": ranks, "run": [run] * len(ranks), "slots": [slots] * len(ranks)}

        return arguments([*range(actor_wg_world_size)]), arguments([None] * rollout_world_size)

    def init_process_group(self, rank: int | None, run: str, slots: list[str]) -> None:
        """Register with the control plane, the first time; a rollout worker's `rank` is None."""
        self._rank, self._run = rank, run
        if self._control is None:
            self._control = ModelExpressControlClient.connect(self._server_url)
        if rank is None:
            if self._receiver is None:
                self._receiver = StreamReceiver(self._model_name, server_url=self._server_url)
            return
        if self._publisher is not None and slots != self._slots:
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            count = len(slots)
            self._publisher = StreamPublisher(
                self._model_name,
                slots[rank],
                server_url=self._server_url,
                keeps=lambda index, _name: index % count == rank,
                counts=True,
            )
        self._slots = list(slots)

    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> dict[str, float]:
        """Publish this rank's share of what comes as the version of the step; answers its numbers."""
        control, publisher = self._connected(), self._publisher
        if publisher is None:
            raise StateError("send_weights: this worker is a rollout")
        self.finalize()  # of an update that failed
        version_id = self._version(global_steps)
        await publisher.copy_async(weights)
        self._version_id = version_id
        await asyncio.to_thread(self._publish, publisher, control, version_id)
        return publisher.pop_metrics()

    def _publish(
        self, publisher: StreamPublisher, control: ModelExpressControlClient, version_id: str
    ) -> None:
        if self._rank == 0:
            control.create_weight_version(
                model_name=publisher.model_name,
                idempotency_key=version_id,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
                expected_source_slots=self._slots,
                uid=version_id,
            )
        else:
            control.wait_for_state(
                version_id, WeightVersionState.STAGING, self._timeout_s, wait_for_creation=True
            )
        publisher.publish(version_id)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Every tensor of the step's version, in host memory, verified; valid until the stream ends."""
        control, receiver = self._connected(), self._receiver
        if receiver is None:
            raise StateError("receive_weights: this worker is an actor")
        version_id = self._version(global_steps)
        await asyncio.to_thread(
            control.wait_for_state,
            version_id,
            WeightVersionState.READY,
            self._timeout_s,
            wait_for_creation=True,
        )
        stream = receiver.receive(version_id)
        try:
            named = await asyncio.to_thread(next, stream, None)
            while named is not None:
                yield named
                named = next(stream, None)
        finally:
            stream.close()

    def finalize(self) -> None:
        """Called on every worker after every update: the version ends, and its memory is free again."""
        version_id, self._version_id = self._version_id, None
        if version_id is None or self._publisher is None:
            return
        if self._rank == 0:
            try:
                self._connected().delete_weight_version(version_id)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:  # else it was never created
                    raise
        self._publisher.release()

    def close(self) -> None:
        """Leave the control plane; idempotent. verl does not call it: its workers just end."""
        for each in (self._publisher, self._receiver, self._control):
            if each is not None:
                each.close()
        self._publisher = self._receiver = self._control = None

    def _connected(self) -> ModelExpressControlClient:
        if self._control is None:
            raise StateError("init_process_group was not called")
        return self._control

    def _version(self, global_steps: int | None) -> str:
        if global_steps is None:
            raise UsageError("global_steps: expected the step of this update, got None")
        return f"{self._run}:{global_steps}"
