"""A mixture of experts from TP 4 / EP 4 in four training processes to generators of TP 2 and of EP 2."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch

from modelexpress_rl import (
    AsyncModelExpressControlClient,
    AsyncModelExpressGeneratorClient,
    ModelExpressGeneratorConfig,
    TorchGeneratorContext,
)
from tests.e2e.processes import running, serve

pytest.importorskip("nixl")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

STEPS = 3
STEP_S = 90.0


async def test_every_byte_is_proven_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.e2e.moe_generators import Part, hugging_face
    from tests.e2e.moe_model import RANKS
    from tests.e2e.moe_trainer import MODEL

    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    parts = [Part(tp_size=2, tp_rank=rank) for rank in range(2)]
    parts += [Part(ep_size=2, ep_rank=rank) for rank in range(2)]
    modules = [part.module() for part in parts]
    before: list[dict[str, bytes]] = [{} for _ in parts]
    async with contextlib.AsyncExitStack() as stack:
        _, address = stack.enter_context(serve())
        environment = {"MODEL_EXPRESS_URL": address, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.e2e.moe_trainer", str(tmp_path)]
        trainers = [
            stack.enter_context(running([*command, str(rank), str(STEPS)], environment))
            for rank in range(RANKS)
        ]
        control = await stack.enter_async_context(AsyncModelExpressControlClient.connect(address))
        generators = [
            await stack.enter_async_context(
                await AsyncModelExpressGeneratorClient.initialize(
                    ModelExpressGeneratorConfig(
                        engine_context=TorchGeneratorContext(module, slices=part.slices()),
                        model_name=MODEL,
                        server_url=address,
                    )
                )
            )
            for part, module in zip(parts, modules, strict=True)
        ]
        slots = []
        for trainer in trainers:
            line = await anyio.to_thread.run_sync(trainer.wait_for_line, "slot ", STEP_S)
            slots.append(line.split()[-1])
        assert len(set(slots)) == RANKS
        for step in range(1, STEPS + 1):
            name = f"step-{step}"
            with anyio.fail_after(STEP_S):
                await control.create_weight_version(MODEL, name, "FULL_TENSOR", slots, uid=name)
                async with anyio.create_task_group() as group:
                    for generator in generators:
                        group.start_soon(_refit, generator, name)
                raw = [torch.load(tmp_path / f"{name}.rank-{rank}") for rank in range(RANKS)]
                await control.delete_weight_version(name)
            whole = hugging_face(raw)
            for part, module, old in zip(parts, modules, before, strict=True):
                expected = part.expected(whole)
                held = {n: p.detach().numpy().tobytes() for n, p in module.named_parameters()}
                assert held.keys() == expected.keys()
                for parameter, tensor in expected.items():
                    assert held[parameter] == tensor.contiguous().numpy().tobytes(), (name, part, parameter)
                    assert held[parameter] != old.get(parameter), (name, part, parameter)
                old.update(held)
        for trainer in trainers:
            assert await anyio.to_thread.run_sync(trainer.wait, STEP_S) == 0, trainer.text
    assert all("Warning" not in trainer.text for trainer in trainers)


async def _refit(generator: AsyncModelExpressGeneratorClient, name: str) -> None:
    staged = await generator.stage_weight(name)
    assert staged.metrics["unverified_bytes"] == 0
    await generator.apply_weight(staged)
