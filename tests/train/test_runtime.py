"""What `TrainerRuntime` keeps: one method, its resources, refusals, and an orderly end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.background import Background
from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.object_storage import ObjectStorageConfig
from modelexpress_rl.rpc.registration import Registration
from modelexpress_rl.timing import RefitRecord
from modelexpress_rl.train.adapter import (
    ShardStaging,
    StagedWeightVersionShardData,
    TrainerEngineAdapter,
    WeightVersionShardManifest,
)
from modelexpress_rl.train.config import ModelExpressTrainerConfig, TrainerEngineContext, TrainerStagingMode
from modelexpress_rl.train.engines.plain import PlainAdapter, PlainTrainerContext
from modelexpress_rl.train.fences import Fence, completed_fence
from modelexpress_rl.train.runtime import TrainerRuntime
from modelexpress_rl.train.settings import resolve
from modelexpress_rl.transport.inprocess import Hub
from modelexpress_rl.transport.port import Agent
from modelexpress_rl.version import WeightPayloadFormat, WeightVersionRef
from statemachines.back_pressure import BackPressure, Limits
from tests.train.support import MODEL, Buffer, FaultyControl, Orchestrator

pytestmark = pytest.mark.anyio
V1 = WeightVersionRef("v1")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MODEL_NAME", "MX_WORKER_GRPC_PORT", "MX_METADATA_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")


def config(address: str = "localhost:1", **more: Any) -> ModelExpressTrainerConfig:
    given: dict[str, Any] = {"device_id": 0, "model_name": MODEL, "server_url": address}
    given["engine_context"] = PlainTrainerContext({"a": np.zeros(4, np.float32)}, slot_id="s")
    return ModelExpressTrainerConfig(**{**given, **more})


class Opened:
    """A runtime, and what a test may look at beside it."""

    def __init__(self, runtime: TrainerRuntime, agents: list[Agent], control: FaultyControl) -> None:
        self.runtime = runtime
        self.agents = agents
        self.control = control


@contextlib.asynccontextmanager
async def opened(address: str, **more: Any) -> AsyncIterator[Opened]:
    hub, agents = Hub(), []

    async def create_agent(where: Any) -> Agent:
        agents.append(hub.agent(where.agent_name))
        return agents[-1]

    settings = resolve(config(address, **more))
    control = FaultyControl(address)
    registration = Registration(
        control,
        worker_id=settings.worker_id,
        role=refit.WORKER_ROLE_TRAINER,
        model_name=MODEL,
        ttl_s=30,
    )
    background = await Background.start("runtime under test")
    runtime = await TrainerRuntime.open(
        settings, control, registration, background, create_agent=create_agent
    )
    await registration.register()
    try:
        yield Opened(runtime, agents, control)
    finally:
        await runtime.close()
        await control.aclose()
        await background.aclose()


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"model_name": None}, "model_name: not set, and neither is MODEL_NAME"),
            ({"device_id": None}, "device_id: not set, and neither is LOCAL_RANK"),
            ({"engine_context": None}, "engine_context: required without object_storage"),
            ({"engine_context": object()}, "engine_context: expected a TrainerEngineContext, got object"),
            ({"staging_mode": "SIDEWAYS"}, "staging_mode: expected one of .*COPY_TO_HOST.* got 'SIDEWAYS'"),
            ({"payload_format": "ZIP"}, "payload_format: expected one of .* got 'ZIP'"),
            ({"staging_mode": "WRITE_TO_STORAGE"}, "WRITE_TO_STORAGE needs object_storage"),
            ({"registration_ttl_seconds": 0}, "registration_ttl_seconds"),
            ({"registration_ttl_seconds": 2.5}, "registration_ttl_seconds"),
            ({"rpc_timeout_seconds": 0}, "rpc_timeout_seconds"),
            ({"server_url": "nowhere"}, "server_url: 'nowhere'"),
            ({"overlap": "SOME"}, "overlap: expected one of NONE, PUBLISH, CAPTURE, got 'SOME'"),
            ({"back_pressure": "DROP"}, "back_pressure: expected one of WAIT, SKIP, GROW, got 'DROP'"),
            ({"generations": 0}, "generations: expected a whole number from 1 to 1024, got 0"),
            (
                {"generations": 3, "max_generations": 2},
                "max_generations: expected at least generations, .* 3",
            ),
        ],
    )
    def test_a_config_that_can_not_be(self, change: dict[str, Any], problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            resolve(config(**change))

    def test_object_storage_needs_its_mode_and_format(self) -> None:
        storage = ObjectStorageConfig("S3", "s3://bucket/prefix")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="object_storage needs staging_mode WRITE_TO_STORAGE"):
            resolve(config(object_storage=storage))
        with pytest.raises(ValueError, match="needs payload_format XOR_DELTA, not FULL_TENSOR"):
            resolve(config(object_storage=storage, staging_mode="WRITE_TO_STORAGE"))
        settings = resolve(
            config(
                object_storage=storage,
                staging_mode="WRITE_TO_STORAGE",
                payload_format="XOR_DELTA",
                engine_context=None,
                device_id=None,
            )
        )
        assert settings.object_storage is storage

    def test_the_environment_fills_gaps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setenv("MODEL_NAME", "from-env")
        monkeypatch.setenv("MX_TRAINER_STAGING_MODE", "copy_to_host")
        monkeypatch.setenv("MODEL_EXPRESS_URL", "10.0.0.1:1234")
        monkeypatch.setenv("MX_HEARTBEAT_INTERVAL_SECS", "7")
        settings = resolve(config(model_name=None, device_id=None, server_url=None))
        assert settings.device_index == 3
        assert settings.model_name == "from-env"
        assert settings.staging_mode is TrainerStagingMode.COPY_TO_HOST
        assert str(settings.address) == "10.0.0.1:1234"
        assert settings.registration_ttl_s == 21
        assert len(settings.worker_id) == 8

    def test_how_it_overlaps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = resolve(config())
        assert (settings.overlap, settings.limits) == ("NONE", Limits(2, 4, BackPressure.WAIT))
        monkeypatch.setenv("MX_TRAINER_OVERLAP", "capture")
        monkeypatch.setenv("MX_TRAINER_GENERATIONS", "3")
        monkeypatch.setenv("MX_TRAINER_MAX_GENERATIONS", "5")
        monkeypatch.setenv("MX_TRAINER_BACK_PRESSURE", "grow")
        settings = resolve(config())
        assert (settings.overlap, settings.limits) == ("CAPTURE", Limits(3, 5, BackPressure.GROW))
        settings = resolve(
            config(overlap="PUBLISH", generations=1, max_generations=1, back_pressure=BackPressure.SKIP)
        )
        assert (settings.overlap, settings.limits) == ("PUBLISH", Limits(1, 1, BackPressure.SKIP))

    async def test_a_mode_that_the_adapter_lacks_is_named_at_the_first_tensor_operation(
        self, address: str
    ) -> None:
        class InPlaceOnly(PlainAdapter):
            supported_staging_modes = frozenset({TrainerStagingMode.IN_PLACE})

        class Context(PlainTrainerContext):
            def create_adapter(self) -> PlainAdapter:
                return InPlaceOnly(self)

        async with opened(address, staging_mode="COPY_TO_DEVICE", engine_context=Context()) as it:
            with pytest.raises(ValueError, match="staging_mode COPY_TO_DEVICE: InPlaceOnly supports"):
                it.runtime.bind_tensors({"a": np.zeros(4, np.float32)})

    async def test_a_format_that_the_adapter_lacks_is_named(self, address: str) -> None:
        async with opened(address, payload_format="FULL_HF_CHECKPOINT") as it:
            with pytest.raises(ValueError, match="payload_format FULL_HF_CHECKPOINT: PlainAdapter supports"):
                await it.runtime.stage(V1)

    async def test_an_operation_of_the_other_method_says_which_it_needs(self, address: str) -> None:
        async with opened(address) as it:
            with pytest.raises(RuntimeError, match=r"needs the canonical method \(object_storage"):
                await it.runtime.prepare_delta_base([])
            with pytest.raises(ValueError, match="hf_tensor_iter: only a trainer with object_storage"):
                await it.runtime.stage(V1, hf_tensor_iter=[])


class TestBinding:
    async def test_none_is_a_value_error_and_a_second_bind_a_runtime_error(self, address: str) -> None:
        async with opened(address) as it:
            with pytest.raises(ValueError, match="tensors: expected the tensors to bind, got None"):
                it.runtime.bind_tensors(None)
            assert it.runtime.bind_tensors({"a": np.zeros(4, np.float32)}) == "s"
            with pytest.raises(RuntimeError, match="bound already"):
                it.runtime.bind_tensors({"a": np.zeros(4, np.float32)})

    async def test_a_bind_that_failed_may_be_repeated(self, address: str) -> None:
        async with opened(address) as it:
            with pytest.raises(UsageError, match="must be contiguous"):
                it.runtime.bind_tensors({"a": np.zeros((4, 4), np.float32).T[1:]})
            it.runtime.bind_tensors({"a": np.zeros(4, np.float32)})

    async def test_the_adapter_is_built_at_the_first_tensor_operation(self, address: str) -> None:
        built: list[str] = []

        class Late(TrainerEngineContext):
            def create_adapter(self) -> TrainerEngineAdapter:
                built.append("adapter")
                return PlainTrainerContext({"a": np.zeros(4, np.float32)}).create_adapter()

        async with opened(address, engine_context=Late()) as it:
            assert built == []
            assert it.runtime.source_slot_id.startswith("plain:partition:")
            assert built == ["adapter"]


class TestObjectStorage:
    def _settings(self) -> Any:
        return resolve(
            config(
                object_storage=ObjectStorageConfig("S3", "s3://bucket/prefix"),  # type: ignore[arg-type]
                staging_mode="WRITE_TO_STORAGE",
                payload_format="XOR_DELTA",
                engine_context=None,
            )
        )

    async def _open(self, **more: Any) -> TrainerRuntime:
        control = FaultyControl("localhost:1")
        registration = Registration(
            control, worker_id="w", role=refit.WORKER_ROLE_TRAINER, model_name=MODEL, ttl_s=30
        )
        background = await Background.start("runtime under test")

        async def no_agent(_: Any) -> Agent:
            raise AssertionError("the canonical method needs no transport")

        try:
            return await TrainerRuntime.open(
                self._settings(), control, registration, background, create_agent=no_agent, **more
            )
        finally:
            await background.aclose()

    async def test_it_is_not_implemented_yet_and_says_so(self) -> None:
        with pytest.raises(UsageError, match="object storage is not implemented in this version"):
            await self._open()

    async def test_the_method_is_built_at_once_without_transport_or_registration(self) -> None:
        runtime = await self._open(build_canonical=lambda storage: _Canonical(storage))
        assert not runtime.requires_registration
        assert runtime.endpoint == ""
        await runtime.prepare_delta_base([])
        await runtime.close()


class _Canonical:
    """Stands for the method that comes later."""

    name = "canonical"
    requires_registration = False
    source_slot_id = ""

    def __init__(self, storage: ObjectStorageConfig, *, breaks: bool = False) -> None:
        self.storage = storage
        self.closed = 0

    def bind_tensors(self, tensors: Any) -> str:
        raise StateError("no")

    async def stage(self, version_id: str, record: RefitRecord, **_: Any) -> Any:
        raise StateError("no")

    room = None

    def release(self, version_id: str) -> Fence:
        return completed_fence(version_id)

    async def prepare_delta_base(self, hf_tensor_iter: Iterable[Any]) -> None:
        return

    async def aclose(self) -> None:
        self.closed += 1
        raise RuntimeError("the upload pool is stuck")


class TestTheEnd:
    async def test_close_closes_the_rest_where_one_part_fails(
        self, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(address) as it:
            it.runtime.bind_tensors({"a": np.zeros(4, np.float32)})
            await it.runtime.stage(V1)

            async def fail() -> None:
                raise RuntimeError("the method is stuck")

            monkeypatch.setattr(it.runtime._method, "aclose", fail)
            with caplog.at_level(logging.ERROR):
                await it.runtime.close()
                await it.runtime.close()
            assert caplog.text.count("closing the method FULL_TENSOR") == 1
            assert "the method is stuck" in caplog.text
            with pytest.raises(StateError, match="closed"):
                await it.agents[0].metadata()

    async def test_a_failure_on_the_way_closes_what_was_opened(self, address: str) -> None:
        async def no_agent(_: Any) -> Agent:
            raise UsageError("NIXL isn't installed")

        control = FaultyControl(address)
        background = await Background.start("runtime under test")
        registration = Registration(
            control, worker_id="w", role=refit.WORKER_ROLE_TRAINER, model_name=MODEL, ttl_s=30
        )
        with pytest.raises(UsageError, match="NIXL isn't installed"):
            await TrainerRuntime.open(
                resolve(config(address)), control, registration, background, create_agent=no_agent
            )
        await background.aclose()
        await control.aclose()

    async def test_it_drops_the_bound_tensors(self, address: str) -> None:
        import gc
        import weakref

        class Held(np.ndarray[Any, Any]):
            pass

        async with opened(address) as it:
            tensor = np.zeros(4, np.float32).view(Held)
            gone = weakref.ref(tensor)
            it.runtime.bind_tensors({"a": tensor})
            await it.runtime.stage(V1)
            del tensor
            await it.runtime.close()
            gc.collect()
            assert gone() is None


class TestAnAdapterOfAnotherKind:
    async def test_its_manifest_is_served_and_its_fences_are_kept(
        self, address: str, orchestrator: Orchestrator
    ) -> None:
        buffer, captured = Buffer(), _BlockingFence()

        class Foreign(TrainerEngineAdapter):
            source_slot_id = "foreign"
            supported_staging_modes = frozenset({TrainerStagingMode.IN_PLACE})
            supported_payload_formats = frozenset({WeightPayloadFormat.FULL_TENSOR})

            def bind_tensors(self, tensors: Any) -> str:
                return "foreign"

            async def stage_shard(
                self, version: WeightVersionRef, staging: ShardStaging
            ) -> StagedWeightVersionShardData:
                manifest = WeightVersionShardManifest(b"opaque", 1, 8, transport="its own")
                return StagedWeightVersionShardData(manifest, captured, completed_fence("its own"), buffer)

        class Context(TrainerEngineContext):
            def create_adapter(self) -> TrainerEngineAdapter:
                return Foreign()

        await orchestrator.create("v1", "foreign")
        async with opened(address, engine_context=Context()) as it:
            staged = await it.runtime.publish_bound(V1)
            assert captured.waited == 1
            [shard] = await orchestrator.shards("v1")
            assert shard.total_bytes == 8
            await orchestrator.release("v1")
            await staged.source_reuse_ready.wait()
            assert buffer.released == 1


class _BlockingFence:
    """A fence as 0.7's adapters have it: `wait` blocks."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1
