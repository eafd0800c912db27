"""What NeMo-RL's `refit_transport: model_express` does, step by step, in our own words.

A policy actor makes its client before Megatron makes process groups. When those exist, it builds specs of its
Megatron-Bridge conversion tasks and binds them, once. The synchronizer, in a process of its own, calls the
actors: it creates a version of their slots, has every actor publish, requires that the version is READY then,
has the generators update, and deletes and releases the version whatever came of that. An update that failed
is tried again as another attempt.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from modelexpress_rl import (
    MegatronTrainerContext,
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
)
from modelexpress_rl.cli.demo import model as demo
from modelexpress_rl.cli.demo.reference import reference_state_dict
from modelexpress_rl.train.engines.megatron import build_megatron_tensor_specs
from modelexpress_rl.train.engines.megatron.hf_naming import llama_names

MODEL = "nemo-rl/policy"
SIZES: dict[str, Any] = {
    "hidden": 32, "layers": 2, "heads": 8, "kv_groups": 2, "ffn": 48, "vocab": 64, "seq": 16,
}  # fmt: skip


@dataclass
class Mapping:
    """A Megatron-Bridge mapping: its class says how the tensor is sharded."""

    hf_param: str | dict[str, str]


class QKVMapping(Mapping): ...


class GatedMLPMapping(Mapping): ...


class ColumnParallelMapping(Mapping): ...


class RowParallelMapping(Mapping): ...


class ReplicatedMapping(Mapping): ...


@dataclass
class ConversionTask:
    """A Megatron-Bridge conversion task, as far as specs are made of it."""

    global_param_name: str
    param_weight: torch.Tensor
    mapping: Mapping
    megatron_module: Any = None


def conversion_tasks(model: Any) -> Iterator[ConversionTask]:
    """The tasks that Megatron-Bridge would make of a model."""
    for name, parameter in model.named_parameters():
        names = llama_names(name)
        if "linear_qkv" in name:
            mapping: Mapping = QKVMapping(dict(zip("qkv", names, strict=True)))
        elif "linear_fc1" in name:
            mapping = GatedMLPMapping(dict(zip(("gate", "up"), names, strict=True)))
        elif "linear_proj" in name or "linear_fc2" in name:
            mapping = RowParallelMapping(names[0])
        elif "word_embeddings" in name or "output_layer" in name:
            mapping = ColumnParallelMapping(names[0])
        else:
            mapping = ReplicatedMapping(names[0])
        yield ConversionTask(name, parameter, mapping)


class PolicyActor:
    """One Megatron rank."""

    def __init__(self, server_url: str) -> None:
        assert not dist.is_initialized(), "NeMo-RL makes the client first"
        self._client = ModelExpressTrainerClient.initialize(
            ModelExpressTrainerConfig(
                engine_context=MegatronTrainerContext(),
                model_name=MODEL,
                device_id=int(os.environ["LOCAL_RANK"]),
                server_url=server_url,
            )
        )

    def initialize(self) -> str:
        """Build the model, and bind its tensors; answers the slot."""
        self._model = demo.build_gpt(**SIZES, seed=11)
        self._optimizer = demo.build_optimizer(self._model)
        rank, size = dist.get_rank(), dist.get_world_size()
        specs = build_megatron_tensor_specs(
            conversion_tasks=list(conversion_tasks(self._model)),
            transformer_config=self._model.config,
            tensor_parallel_size=size,
            tensor_parallel_rank=rank,
        )
        return self._client.bind_tensors(specs)

    def train(self, step: int) -> dict[str, torch.Tensor]:
        """One step; rank 0 answers all weights, gathered and converted by code of another kind."""
        demo.train_step(self._model, self._optimizer, step)
        return reference_state_dict(self._model)

    def publish(self, version: WeightVersionRef) -> dict[str, float]:
        """Publish this rank's part, in place."""
        self._client.publish_version(version=version)
        return self._client.pop_metrics()

    def release(self, version: WeightVersionRef) -> None:
        """Want the buffers back."""
        self._client.release_version(version=version)

    def close(self) -> None:
        self._client.close()


class Synchronizer:
    """NeMo-RL's driver; `policy(method, ...)` calls every actor, `update(ref)` every generator."""

    def __init__(
        self,
        server_url: str,
        policy: Callable[..., list[Any]],
        update: Callable[[WeightVersionRef], None],
    ) -> None:
        self.control = ModelExpressControlClient.connect(server_url=server_url)
        self._policy, self._update = policy, update
        self._run, self._number, self._attempt = uuid.uuid4().hex[:8], 1, 1
        self._slots: list[str] = []

    def init_communicator(self) -> list[str]:
        """Have every actor bind; answers their slots."""
        self._slots = sorted(set(self._policy("initialize")))
        return self._slots

    def sync_weights(self) -> list[dict[str, float]]:
        """One update; answers the actors' metrics."""
        version = self.control.create_weight_version(
            model_name=MODEL,
            idempotency_key=f"{self._run}:{self._number}:{self._attempt}",
            payload_format=WeightPayloadFormat.FULL_TENSOR,
            expected_source_slots=self._slots,
        )
        self._attempt += 1
        try:
            metrics = self._policy("publish", version.ref)
            state = self.control.get_weight_version(version.version_id).state
            if state.value != "READY":
                raise RuntimeError(f"version {version.version_id} is {state} when all have published")
            self._update(version.ref)
        finally:
            self.control.delete_weight_version(version.version_id)
            self._policy("release", version.ref)
        self._number += 1
        return metrics
