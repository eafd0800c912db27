"""slime's and Miles's calls, by real Megatron ranks; engines of two ranks on a double of SGLang's loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from modelexpress_rl import ModelExpressGeneratorClient, ModelExpressGeneratorConfig, SglangGeneratorContext
from modelexpress_rl.cli.demo.generator_model import (
    GeneratorModel,
    GeneratorShape,
    expected_parameters,
    generator_slices,
)
from tests.frameworks import slime
from tests.frameworks.actors import served
from tests.frameworks.conftest import Framework
from tests.inference.sglang.double import install, runner

pytestmark = pytest.mark.heavy
TENSOR_PARALLEL = 2


class Part(GeneratorModel):
    """One rank's part of the model, fused, loaded as SGLang's models are: tensor by tensor, cut by rank."""

    quant_config = None

    def __init__(self, rank: int) -> None:
        sizes = {**slime.SIZES}
        sizes["kv_heads"] = sizes.pop("kv_groups")
        super().__init__(GeneratorShape(**sizes, tp_size=TENSOR_PARALLEL, tp_rank=rank, fused=True))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            for piece in generator_slices(self.shape):
                if piece.hf_name != name:
                    continue
                target, source = self.get_parameter(piece.parameter).data, tensor
                for axis, extent in enumerate(piece.shape):
                    target = target.narrow(axis, piece.parameter_offset[axis], extent)
                    source = source.narrow(axis, piece.hf_offset[axis], extent)
                target.copy_(source)
                loaded.add(piece.parameter)
        return loaded


class Engine:
    """An SGLang engine as slime sees it; it has its ranks in one process here."""

    def __init__(self, server_url: str, stack: contextlib.ExitStack) -> None:
        self.calls: list[str] = []
        self.parts = [Part(rank) for rank in range(TENSOR_PARALLEL)]
        self._clients = [
            stack.enter_context(
                ModelExpressGeneratorClient.initialize(
                    ModelExpressGeneratorConfig(
                        engine_context=SglangGeneratorContext(runner(part)),
                        model_name=slime.MODEL,
                        server_url=server_url,
                    )
                )
            )
            for part in self.parts
        ]

    def pause_generation(self) -> None:
        self.calls.append("pause")

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def continue_generation(self) -> None:
        self.calls.append("continue")

    def update_weights_from_modelexpress(self, version_id: str) -> None:
        self.calls.append(version_id)
        staged = [client.stage_weight(version_id) for client in self._clients]
        for client, each in zip(self._clients, staged, strict=True):
            client.apply_weight(each)


def test_every_step_reaches_every_engine(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    trainers = framework.trainers
    trainers.call("join")

    def updater(method: str, *arguments: Any) -> list[Any]:
        return trainers.call("slime", method, *arguments)

    with contextlib.ExitStack() as stack:
        engines = [Engine(framework.server_url, stack) for _ in range(2)]
        paths = [
            stack.enter_context(served(framework.folder, f"engine{number}", engine))
            for number, engine in enumerate(engines)
        ]
        updater("connect_rollout_engines", paths)
        stack.callback(updater, "close")
        for step in (1, 2):
            weights, _ = updater("train", step)
            for metrics in updater("update_weights"):
                assert metrics["trainer_refit_e2e_s"] > 0
            for engine in engines:
                assert engine.calls == ["pause", "flush", f"slime:{step}", "continue"]
                engine.calls.clear()
                for part in engine.parts:
                    for name, expected in expected_parameters(part.shape, weights).items():
                        assert torch.equal(part.get_parameter(name), expected), name
