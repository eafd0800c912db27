"""One generator of the demo: a client per rank, all in this process, each with its own part of the model."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import anyio

from modelexpress_rl.cli.demo.generator_model import GeneratorModel, GeneratorShape, generator_slices
from modelexpress_rl.cli.demo.proof import prove
from modelexpress_rl.cli.demo.trainer import MODEL_NAME
from modelexpress_rl.cli.demo.wires import Line, connect
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.torch import TensorSlice, TorchGeneratorContext
from modelexpress_rl.version import WeightVersionRef


class GeneratorRank:
    """One rank: its part of the model, its client, and what its parameters held before."""

    def __init__(self, shape: GeneratorShape, server: str, lease_ttl_s: int) -> None:
        self.shape = shape
        self._model = GeneratorModel(shape)
        self._before: dict[str, bytes] = {}
        self._config = ModelExpressGeneratorConfig(
            engine_context=TorchGeneratorContext(self._model, slices=_mapping(shape)),
            model_name=MODEL_NAME,
            server_url=server,
            registration_ttl_seconds=30,
            lease_ttl_seconds=lease_ttl_s,
        )
        self._client: AsyncModelExpressGeneratorClient | None = None

    async def open(self) -> None:
        """Register with the control plane."""
        self._client = await AsyncModelExpressGeneratorClient.initialize(self._config)

    async def refit(self, version: str, reference: Path) -> dict[str, Any]:
        """Stage, install at a safe point (nothing generates here), and prove the bytes."""
        assert self._client is not None
        started = time.perf_counter()
        staged = await self._client.stage_weight(WeightVersionRef(version))
        await self._client.apply_weight(staged)
        refit_s = time.perf_counter() - started
        proof = await anyio.to_thread.run_sync(prove, self._model, self.shape, reference, self._before)
        return {
            "rank": self.shape.tp_rank,
            "refit_s": refit_s,
            "metrics": dict(staged.metrics),
            "serving": self._client.serving_version_id,
            "parameters": proof.parameters,
            "size_bytes": proof.size_bytes,
            "digest": proof.digest,
            "wrong": proof.wrong,
            "unchanged": proof.unchanged,
        }

    async def close(self) -> None:
        """Leave."""
        if self._client is not None:
            await self._client.close()


def _mapping(shape: GeneratorShape) -> list[TensorSlice]:
    return [
        TensorSlice(
            hf_name=piece.hf_name,
            hf_shape=piece.hf_shape,
            hf_offset=piece.hf_offset,
            shape=piece.shape,
            parameter=piece.parameter,
            parameter_offset=piece.parameter_offset,
        )
        for piece in generator_slices(shape)
    ]


async def run(arguments: argparse.Namespace) -> None:
    """Serve the orchestrator's commands until it says stop, or is gone."""
    line = await connect()
    sizes = json.loads(arguments.sizes)
    sizes["kv_heads"] = sizes.pop("kv_groups")
    ranks = [
        GeneratorRank(
            GeneratorShape(**sizes, tp_size=arguments.tp, tp_rank=rank, fused=arguments.tp > 1),
            arguments.server,
            arguments.lease_ttl,
        )
        for rank in range(arguments.tp)
    ]
    try:
        async with anyio.create_task_group() as group:
            for rank in ranks:
                group.start_soon(rank.open)
        await line.send(event="hello", role="generator", tp=arguments.tp)
        async for message in line:
            if message["cmd"] == "stop":
                break
            await _refit_all(ranks, line, message["version"], Path(message["reference"]))
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(20):
            async with anyio.create_task_group() as group:
                for rank in ranks:
                    group.start_soon(rank.close)
            await line.aclose()


async def _refit_all(ranks: list[GeneratorRank], line: Line, version: str, reference: Path) -> None:
    results: list[dict[str, Any]] = []
    errors: list[str] = []

    async def one(rank: GeneratorRank) -> None:
        try:
            results.append(await rank.refit(version, reference))
        except Exception as failure:  # noqa: BLE001  the orchestrator decides what a failed step means
            errors.append(f"rank {rank.shape.tp_rank}: {type(failure).__name__}: {failure}")

    async with anyio.create_task_group() as group:
        for rank in ranks:
            group.start_soon(one, rank)
    if errors:
        await line.send(event="failed", what="refit", version=version, error="; ".join(sorted(errors)))
    else:
        await line.send(event="refitted", version=version, ranks=sorted(results, key=lambda r: r["rank"]))


def main() -> None:
    """Parse what the orchestrator passes, and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--lease-ttl", type=int, default=20)
    anyio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
