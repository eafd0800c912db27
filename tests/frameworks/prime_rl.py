"""What PRIME-RL's `mx_refit` transport does, step by step, in our own words.

The trainer offers a step by a file with a token, and every rank calls it by the name `run.token:step`. The
client is made at the first broadcast, and the state dict bound once. Rank 0 creates the version; behind a
barrier all publish; then rank 0 polls until the version is RELEASING, or NOT_FOUND after it was seen; behind
another barrier all release. The orchestrator polls until the version is READY, has every inference worker
update, and deletes the version whatever came of that.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import torch.distributed as dist

from modelexpress_rl import (
    FSDPTrainerContext,
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    TrainerStagingMode,
    WeightPayloadFormat,
    WeightVersionRef,
    WeightVersionState,
)

MODEL = "prime-rl/policy"
OFFER, ACKNOWLEDGED = ".sender_ready", ".receiver_ready"
POLL_S, TIMEOUT_S = 0.05, 60.0


def step_folder(folder: Path, step: int) -> Path:
    found = folder / f"step_{step}"
    found.mkdir(parents=True, exist_ok=True)
    return found


def wait_for(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


class Sender:
    """A trainer rank."""

    def __init__(self, folder: Path, server_url: str, mode: str, run: str = "run") -> None:
        self._folder, self._server_url, self._run = folder, server_url, run
        self._mode = TrainerStagingMode(mode)
        self._client: ModelExpressTrainerClient | None = None
        self._control: ModelExpressControlClient | None = None
        self._slots: list[str] = []

    def broadcast(self, model: Any, step: int, look_again: Path | None = None) -> dict[str, Any]:
        """One step; once seen, the version is looked at again only when `look_again` exists."""
        master = dist.get_rank() == 0
        folder = step_folder(self._folder, step)
        token = [f"{self._run}.{uuid.uuid4().hex[:8]}"]
        if master:
            (folder / "offer").write_text(f"{token[0]}\n")
            os.replace(folder / "offer", folder / OFFER)
            wait_for((folder / ACKNOWLEDGED).exists, "the orchestrator's acknowledgement")
        dist.barrier()
        dist.broadcast_object_list(token, src=0)
        uid = f"{token[0]}:{step}"
        if self._client is None:
            self._initialize(model)
        assert self._client is not None
        if master:
            assert self._control is not None
            self._control.create_weight_version(
                model_name=MODEL,
                idempotency_key=uid,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
                expected_source_slots=self._slots,
                uid=uid,
            )
        dist.barrier()
        self._client.publish_version(version=WeightVersionRef(uid))
        metrics, again = self._client.pop_metrics(), self._client.pop_metrics()
        ended = self._wait_released(uid, look_again) if master else None
        dist.barrier()
        self._client.release_version(version=WeightVersionRef(uid))
        return {"uid": uid, "metrics": metrics, "again": again, "ended": ended, "slots": self._slots}

    def _initialize(self, model: Any) -> None:
        tensors = model.state_dict()
        norms = {name: "float32" for name in tensors if name.endswith("model.norm.weight")}
        self._client = ModelExpressTrainerClient.initialize(
            ModelExpressTrainerConfig(
                engine_context=FSDPTrainerContext(wire_dtype_overrides=norms),
                model_name=MODEL,
                device_id=int(os.environ["LOCAL_RANK"]),
                server_url=self._server_url,
                staging_mode=self._mode,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
            )
        )
        slot = self._client.bind_tensors(tensors)
        if dist.get_rank() == 0:
            self._control = ModelExpressControlClient.connect(server_url=self._server_url)
        slots: list[Any] = [""] * dist.get_world_size()
        dist.all_gather_object(slots, slot)
        self._slots = sorted(set(slots))

    def _wait_released(self, uid: str, look_again: Path | None) -> str:
        assert self._control is not None
        deadline, observed = time.monotonic() + TIMEOUT_S, False
        while True:
            try:
                state = self._control.get_weight_version(uid).state
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND and observed:
                    return "NOT_FOUND"
                raise
            observed = True
            if state is WeightVersionState.RELEASING:
                return "RELEASING"
            if look_again is not None:
                wait_for(look_again.exists, "leave to look again")
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {uid} is still {state}")
            time.sleep(POLL_S)

    def close(self) -> None:
        for each in (self._client, self._control):
            if each is not None:
                each.close()


class Receiver:
    """The orchestrator's end; `update(uid)` has the inference workers install a version."""

    def __init__(self, folder: Path, server_url: str, update: Callable[[str], None]) -> None:
        self._folder = folder
        self._update = update
        self.control = ModelExpressControlClient.connect(server_url=server_url)

    def receive(self, step: int) -> str:
        """Move the workers to the step that is offered; answers the version's name."""
        folder = step_folder(self._folder, step)
        wait_for((folder / OFFER).exists, f"the offer of step {step}")
        (folder / ACKNOWLEDGED).touch()
        uid = f"{(folder / OFFER).read_text().strip()}:{step}"
        wait_for(lambda: self._state(uid) is WeightVersionState.READY, f"version {uid} being READY")
        try:
            self._update(uid)
        finally:
            self.control.delete_weight_version(uid)
        return uid

    def wait_forgotten(self, uid: str) -> None:
        """Until the control plane does not know the version any more."""
        wait_for(lambda: self._state(uid) is None, f"version {uid} being forgotten")

    def _state(self, uid: str) -> WeightVersionState | None:
        try:
            return self.control.get_weight_version(uid).state
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return None
