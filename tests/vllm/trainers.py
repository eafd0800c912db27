"""A trainer of tests that publishes a checkpoint's tensors as a version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from modelexpress_rl import (
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
    WeightVersionState,
)
from modelexpress_rl.train.engines.plain import PlainTrainerContext

MODEL = "policy"


class Trainer:
    """One trainer that holds all tensors whole, under the names of the checkpoint."""

    def __init__(
        self,
        control: ModelExpressControlClient,
        client: ModelExpressTrainerClient,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self._control = control
        self._client = client
        self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        client.bind_tensors(self._tensors)

    def publish(self, name: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Create the version and publish these values; answers the version's id."""
        for each, tensor in tensors.items():
            self._tensors[each].copy_(tensor)
        version = self._control.create_weight_version(
            model_name=MODEL,
            idempotency_key=name,
            payload_format=WeightPayloadFormat.FULL_TENSOR,
            expected_source_slots=[self._client.source_slot_id],
        )
        self._client.publish_version(WeightVersionRef(version.version_id))
        return version.version_id

    def release(self, version_id: str) -> None:
        """The version is not needed any more: its memory is free for the next."""
        self._control.update_weight_version_state(version_id, WeightVersionState.RELEASING)
        self._client.release_version(WeightVersionRef(version_id))


@contextlib.contextmanager
def trainer(tensors: Mapping[str, torch.Tensor]) -> Iterator[Trainer]:
    """A trainer, registered; it copies what it publishes, so that the next step may write at once."""
    config = ModelExpressTrainerConfig(
        model_name=MODEL,
        device_id=0,
        staging_mode="COPY_TO_HOST",
        engine_context=PlainTrainerContext(slot_id="trainer:0"),
    )
    with (
        ModelExpressControlClient.connect() as control,
        ModelExpressTrainerClient.initialize(config) as client,
    ):
        yield Trainer(control, client, tensors)
