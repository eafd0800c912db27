"""One of two replicas is killed in the middle of a pull, over real NIXL between real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

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
from tests.e2e.processes import Running, running, serve
from tests.e2e.replica_trainer import MODEL, SLOT, TENSOR_BYTES, TENSORS, weights

pytest.importorskip("nixl")
pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

IN_FLIGHT_BYTES = 8 << 20


class Many(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(TENSOR_BYTES // 4) for _ in range(TENSORS))


# By default processes of one host copy straight out of each other's memory, and a read is over when it
# was posted; over tcp the one that is killed is really sending.
@pytest.mark.parametrize("transports", ["", "tcp"])
async def test_one_of_two_replicas_is_killed_in_the_middle_of_a_pull(
    transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    monkeypatch.setenv("MX_TRANSFER_TIMEOUT", "60")
    model = Many()
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(serve())
        environment = {"MODEL_EXPRESS_URL": address} | ({"UCX_TLS": transports} if transports else {})
        async with AsyncModelExpressControlClient.connect(address) as control:
            await control.create_weight_version(MODEL, "k", "FULL_TENSOR", [SLOT], uid="v1")
        command = [sys.executable, "-m", "tests.e2e.replica_trainer", "v1"]
        trainers = {
            name: stack.enter_context(running([*command, name], environment)) for name in ("one", "two")
        }
        for trainer in trainers.values():
            await anyio.to_thread.run_sync(trainer.wait_for_line, "published", 60)
        config = ModelExpressGeneratorConfig(
            engine_context=TorchGeneratorContext(model),
            model_name=MODEL,
            server_url=address,
            max_in_flight_bytes=IN_FLIGHT_BYTES,
        )
        async with await AsyncModelExpressGeneratorClient.initialize(config) as generator:
            killed = _kill_at_its_second_read(generator, trainers, monkeypatch)
            with anyio.fail_after(60):
                staged = await generator.stage_weight("v1")
                await generator.apply_weight(staged)
    assert len(killed) == 1
    for name, parameter in model.named_parameters():
        assert parameter.detach().numpy().tobytes() == weights()[name].tobytes(), name
    metrics = staged.metrics
    assert metrics["transfer_attempts"] == 2
    assert metrics["unverified_bytes"] == 0
    assert metrics["needed_bytes"] == TENSORS * TENSOR_BYTES
    # What had landed before is not read again: at most what was in flight, or could not be verified
    # because its publisher was gone before it had told the digests.
    assert metrics["needed_bytes"] < metrics["bytes"] <= metrics["needed_bytes"] + 2 * IN_FLIGHT_BYTES


def _kill_at_its_second_read(
    generator: AsyncModelExpressGeneratorClient, trainers: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Whoever is read a second time is stopped before and killed after that read is posted."""
    agent = generator._parts.agent
    post, peers, killed = agent.post, [], []

    async def post_and_kill(prepared):  # type: ignore[no-untyped-def]
        peers.append(prepared.peer)
        if killed or peers.count(prepared.peer) < 2:
            return await post(prepared)
        killed.append(prepared.peer)
        pid = trainers[prepared.peer].process.pid
        os.kill(pid, signal.SIGSTOP)
        read = await post(prepared)
        os.kill(pid, signal.SIGKILL)
        return read

    monkeypatch.setattr(agent, "post", post_and_kill)
    return killed
