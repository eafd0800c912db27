"""Every engine has the same modes: captured beside training, on the host or where the tensors are."""

from __future__ import annotations

from typing import Any

import pytest

from modelexpress_rl.errors import FenceBroken
from tests.train.gate import Gate
from tests.train.job import Job
from tests.train.support import within

torch = pytest.importorskip("torch")
from modelexpress_rl.train.engines.fsdp import FSDPTrainerContext  # noqa: E402
from modelexpress_rl.train.engines.megatron import MegatronTensorSpec, MegatronTrainerContext  # noqa: E402
from modelexpress_rl.train.engines.plain import PlainTrainerContext  # noqa: E402

pytestmark = pytest.mark.anyio


def weights() -> dict[str, Any]:
    return {
        "w": torch.arange(600, dtype=torch.float32).reshape(20, 30),
        "half": torch.arange(7, dtype=torch.bfloat16),
        "count": torch.tensor(3),
    }


def context_of(engine: str, tensors: dict[str, Any]) -> Any:
    if engine == "megatron":
        return MegatronTrainerContext(
            specs=[
                MegatronTensorSpec(name, tensor, "replicated", (name,), tuple(tensor.shape))
                for name, tensor in tensors.items()
            ]
        )
    if engine == "fsdp":
        return FSDPTrainerContext(tensors=tensors)
    return PlainTrainerContext(tensors)


def bytes_of(engine: str, tensors: dict[str, Any]) -> dict[str, bytes]:
    """What is read of them; FSDP casts floating point."""
    if engine == "fsdp":
        tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    return {name: bytes(tensor.contiguous().flatten().view(torch.uint8)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("mode", ["COPY_TO_HOST", "COPY_TO_DEVICE"])
@pytest.mark.parametrize("overlap", ["NONE", "PUBLISH", "CAPTURE"])
@pytest.mark.parametrize("engine", ["plain", "fsdp", "megatron"])
async def test_each_version_is_that_of_its_step(job: Job, engine: str, overlap: str, mode: str) -> None:
    tensors = weights()
    context = context_of(engine, tensors)
    async with await job.open(
        engine_context=context, staging_mode=mode, overlap=overlap, back_pressure="GROW"
    ) as client:
        expected = {}
        for step in range(4):
            await job.orchestrator.create(f"v{step}", client.source_slot_id)
            for tensor in tensors.values():
                tensor.add_(1)
            expected[f"v{step}"] = bytes_of(engine, tensors)
            staged = await client.publish_version(f"v{step}")
            await within(5, staged.weights_free)
            await within(5, staged.published)
        for tensor in tensors.values():
            tensor.zero_()
        for version, wanted in expected.items():
            assert await job.read(version) == wanted


@pytest.mark.parametrize("engine", ["plain", "fsdp", "megatron"])
async def test_a_trainer_that_does_not_wait_is_told_and_publishes_no_mixture(
    job: Job, engine: str, gate: Gate
) -> None:
    tensors = weights()
    parameter = tensors["w"].requires_grad_()
    optimizer = torch.optim.AdamW([parameter])
    async with await job.open(
        engine_context=context_of(engine, tensors), staging_mode="COPY_TO_HOST", overlap="CAPTURE"
    ) as client:
        await job.orchestrator.create("v1", client.source_slot_id)
        gate.hold()
        staged = await client.publish_version("v1")
        await gate.held()
        parameter.sum().backward()  # reads the weights, which is fine
        optimizer.step()
        gate.open.set()
        with pytest.raises(FenceBroken, match=r"tensor 'w' was written while it was captured.*weights_free"):
            await within(5, staged.weights_free)
        again = await client.publish_version("v1")
        parameter.sum().backward()
        await again.publish()
        assert await job.read("v1") == bytes_of(engine, {n: t.detach() for n, t in tensors.items()})
