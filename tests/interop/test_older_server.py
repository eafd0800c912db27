"""All our clients against a control plane that speaks 0.7 only: watches and renewals fall back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import anyio
import grpc.aio
import pytest

torch = pytest.importorskip("torch")

from modelexpress_rl._pb import refit_pb2_grpc  # noqa: E402
from modelexpress_rl.control import AsyncModelExpressControlClient  # noqa: E402
from modelexpress_rl.inference.client import AsyncModelExpressGeneratorClient  # noqa: E402
from modelexpress_rl.inference.config import ModelExpressGeneratorConfig  # noqa: E402
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext  # noqa: E402
from modelexpress_rl.monitor import ReadinessMonitor  # noqa: E402
from modelexpress_rl.rpc.errors import RpcError  # noqa: E402
from modelexpress_rl.server.registry import Registry  # noqa: E402
from modelexpress_rl.server.service import RefitService  # noqa: E402
from modelexpress_rl.server.stores.memory import MemoryStore  # noqa: E402
from modelexpress_rl.train.client import AsyncModelExpressTrainerClient  # noqa: E402
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerStagingMode  # noqa: E402
from modelexpress_rl.train.engines.plain import PlainTrainerContext  # noqa: E402
from modelexpress_rl.transport.inprocess import Hub  # noqa: E402
from modelexpress_rl.version import VersionState, WeightVersionState  # noqa: E402
from tests.inference.world import true_soon  # noqa: E402

pytestmark = pytest.mark.anyio

MODEL = "m"


class Counted(grpc.aio.ServerInterceptor):
    """Counts the calls by method, those that the server doesn't know too."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        self.calls[name] = self.calls.get(name, 0) + 1
        return await continuation(details)


class Job:
    """Our clients, one of each kind, over the in-process transport."""

    def __init__(self, address: str, counted: Counted, stack: AsyncExitStack) -> None:
        self.address = address
        self.counted = counted
        self.hub = Hub()
        self._stack = stack

    async def trainer(self, tensors: dict[str, Any], **config: Any) -> AsyncModelExpressTrainerClient:
        async def agent(where: Any) -> Any:
            return self.hub.agent(where.agent_name)

        return await self._stack.enter_async_context(
            await AsyncModelExpressTrainerClient.initialize(
                ModelExpressTrainerConfig(
                    device_id=0,
                    agent_name="trainer",
                    model_name=MODEL,
                    server_url=self.address,
                    rpc_timeout_seconds=10.0,
                    release_grace_seconds=0.05,
                    close_timeout_seconds=2.0,
                    engine_context=PlainTrainerContext(tensors, slot_id="s0"),
                    **config,
                ),
                create_agent=agent,
            )
        )

    async def generator(self, model: torch.nn.Module) -> AsyncModelExpressGeneratorClient:
        return await self._stack.enter_async_context(
            await AsyncModelExpressGeneratorClient.initialize(
                ModelExpressGeneratorConfig(
                    engine_context=TorchGeneratorContext(model),
                    model_name=MODEL,
                    server_url=self.address,
                    rpc_timeout_seconds=10.0,
                    lease_ttl_seconds=1,
                ),
                agent=self.hub.agent("generator"),
            )
        )

    async def control(self) -> AsyncModelExpressControlClient:
        return await self._stack.enter_async_context(AsyncModelExpressControlClient.connect(self.address))

    async def monitor(self) -> ReadinessMonitor:
        return await self._stack.enter_async_context(ReadinessMonitor.connect(self.address))


@pytest.fixture
async def job(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Job]:
    for name in ("LOCAL_RANK", "MODEL_NAME", "MX_WORKER_GRPC_PORT", "MX_METADATA_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    store, counted = MemoryStore(), Counted()
    async with Registry.running(store) as registry:
        server = grpc.aio.server(interceptors=[counted])
        refit_pb2_grpc.add_RefitServiceServicer_to_server(RefitService(registry), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with AsyncExitStack() as stack:
                yield Job(f"127.0.0.1:{port}", counted, stack)
        finally:
            await server.stop(grace=0)
    await store.close()


@pytest.mark.parametrize("mode", [TrainerStagingMode.IN_PLACE, TrainerStagingMode.COPY_TO_HOST])
async def test_a_whole_refit_step_after_step(job: Job, mode: TrainerStagingMode) -> None:
    weight = torch.zeros(64, 128)
    model = torch.nn.Linear(128, 64, bias=False)
    trainer = await job.trainer({"weight": weight}, staging_mode=mode)
    generator, control, monitor = await job.generator(model), await job.control(), await job.monitor()
    for step in (1, 2, 3):
        version = f"v{step}"
        weight.fill_(step)
        seen: list[VersionState] = []

        async def watch(version: str = version, seen: list[VersionState] = seen) -> None:
            async with aclosing(control.watch(version)) as watched:
                async for status in watched:
                    seen.append(status.state)
                    if status.state is VersionState.RELEASING:
                        return

        await control.create_weight_version(MODEL, f"key {version}", "FULL_TENSOR", ["s0"], uid=version)
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            shard = await trainer.publish_version(version)
            await monitor.wait_until_ready(version, 20)
            await control.wait_for_state(version, WeightVersionState.READY, 20)
            await generator.apply_weight(await generator.stage_weight(version))
            assert torch.equal(model.weight, torch.full((64, 128), float(step)))
            await control.delete_weight_version(version)
            with anyio.fail_after(20):
                await shard.release().wait()
        assert seen[-1] is VersionState.RELEASING
    calls = job.counted.calls
    assert calls["RegisterVersionLease"] >= 3
    assert calls["DeleteVersionLease"] == calls["DeleteWeightVersionShard"] == 3


async def test_a_fence_waits_for_a_reader(job: Job) -> None:
    trainer = await job.trainer({"weight": torch.ones(64, 128)})
    model = torch.nn.Linear(128, 64, bias=False)
    generator, control = await job.generator(model), await job.control()
    await control.create_weight_version(MODEL, "key", "FULL_TENSOR", ["s0"], uid="v1")
    shard = await trainer.publish_version("v1")
    job.hub.hold("trainer")
    staged: list[Any] = []

    async def stage() -> None:
        staged.append(await generator.stage_weight("v1"))

    async with anyio.create_task_group() as group:
        group.start_soon(stage)
        await true_soon(lambda: job.counted.calls.get("RegisterVersionLease", 0) > 0)
        await control.delete_weight_version("v1")
        fence = shard.release()
        # The lease lives a second, and is renewed: also while the version is released.
        await true_soon(lambda: job.counted.calls["RegisterVersionLease"] > 4)
        with anyio.move_on_after(0.1) as while_it_reads:
            await fence.wait()
        assert while_it_reads.cancelled_caught
        job.hub.resume("trainer")
    await generator.apply_weight(staged[0])
    with anyio.fail_after(10):
        await fence.wait()


async def test_what_only_our_server_can_do_says_so(job: Job) -> None:
    control = await job.control()
    for call in (
        control.list_weight_versions,
        control.list_workers,
        lambda: control.release_weight_version("v"),
        lambda: control.evict_weight_version("v"),
    ):
        with pytest.raises(RpcError) as caught:
            await call()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
