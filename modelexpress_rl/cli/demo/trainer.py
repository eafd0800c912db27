"""One trainer rank of the demo: trains for real, and hands each step's weights to whoever reads them.

Started once per rank (by torchrun for Megatron). The orchestrator says when; everything else goes over
the control plane and the transport, as in a job of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import anyio

from modelexpress_rl.cli.demo.child import die_with_parent
from modelexpress_rl.cli.demo.wires import Line, connect
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient, StagedWeightVersionShard
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerStagingMode
from modelexpress_rl.version import WeightVersionRef

MODEL_NAME = "demo"
TENSOR_PARALLEL = 2


class Trained(Protocol):
    """A model that this rank holds a part of."""

    def engine_context(self) -> Any:
        """What the trainer client needs to know of the engine."""
        ...

    def tensors(self) -> Any:
        """What to bind."""
        ...

    def step(self, step: int) -> float:
        """Train one step and return the loss."""
        ...

    def save_reference(self, path: Path) -> None:
        """Rank 0 saves the whole model under Hugging Face names, by a conversion of its own."""
        ...


class Rank:
    """The commands that the orchestrator may give."""

    def __init__(
        self, model: Trained, client: AsyncModelExpressTrainerClient, line: Line, in_place: bool
    ) -> None:
        self._model = model
        self._client = client
        self._line = line
        self._in_place = in_place
        self._shards: dict[str, StagedWeightVersionShard] = {}
        self._idle_since = 0.0

    async def train(self, step: int, reference: str) -> None:
        """Train one step; the weights are then those of version `step`."""
        stall_s = time.perf_counter() - self._idle_since if self._idle_since else 0.0
        started = time.perf_counter()
        loss = await anyio.to_thread.run_sync(self._model.step, step)
        await anyio.to_thread.run_sync(self._model.save_reference, Path(reference))
        await self._line.send(
            event="trained", step=step, loss=loss, train_s=time.perf_counter() - started, stall_s=stall_s
        )

    async def publish(self, version: str) -> None:
        """Stage and publish what is bound; in copy modes training may go on once it is staged."""
        started = self._idle_since = time.perf_counter()
        shard = await self._client.stage_shard(WeightVersionRef(version))
        staged_s = time.perf_counter() - started
        await shard.publish()
        self._shards[version] = shard
        metrics = self._client.pop_metrics()
        published_s = time.perf_counter() - started
        await self._line.send(
            event="published", version=version, staged_s=staged_s, published_s=published_s, metrics=metrics
        )

    async def release(self, version: str) -> None:
        """Release the version and wait for the fence that gives the buffers back."""
        shard = self._shards.pop(version, None)
        started = time.perf_counter()
        await self._client.release_version(WeightVersionRef(version))
        if shard is not None:
            await shard.source_reuse_ready.wait()
        now = time.perf_counter()
        stall_s = now - self._idle_since
        await self._line.send(event="reusable", version=version, fence_s=now - started, stall_s=stall_s)


async def run(arguments: argparse.Namespace) -> None:
    """Serve the orchestrator's commands until it says stop, or is gone."""
    rank = int(os.environ["RANK"])
    line = await connect()
    sizes = json.loads(arguments.sizes)
    model = await anyio.to_thread.run_sync(lambda: _build(arguments.trainer, rank, sizes))
    config = ModelExpressTrainerConfig(
        device_id=rank,
        model_name=MODEL_NAME,
        staging_mode=TrainerStagingMode(arguments.mode),
        server_url=arguments.server,
        registration_ttl_seconds=arguments.registration_ttl,
        engine_context=model.engine_context(),
    )
    client = await AsyncModelExpressTrainerClient.initialize(config)
    try:
        slot = await client.bind_tensors(model.tensors())
        await line.send(event="hello", role="trainer", rank=rank, slot=slot, worker=client.worker_id)
        commands = Rank(model, client, line, arguments.mode == "IN_PLACE")
        async for message in line:
            name = message.pop("cmd")
            if name == "stop":
                break
            try:
                await getattr(commands, name)(**message)
            except Exception as failure:  # noqa: BLE001  the orchestrator decides what a failed step means
                await line.send(event="failed", what=name, error=f"{type(failure).__name__}: {failure}")
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(20):
            await client.close()
            await line.aclose()


def _build(kind: str, rank: int, sizes: dict[str, int]) -> Trained:
    if kind == "toy":
        from modelexpress_rl.cli.demo.toy import ToyModel

        return ToyModel(rank, TENSOR_PARALLEL, sizes)
    from modelexpress_rl.cli.demo.megatron_rank import MegatronRank

    return MegatronRank(TENSOR_PARALLEL, sizes)


def main() -> None:
    """Parse what the orchestrator passes, and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--registration-ttl", type=int, default=30)
    die_with_parent()  # torchrun starts it in a session of its own
    anyio.run(run, parser.parse_args())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
