"""What trainer tests share: a virtual clock, a control plane that loses replies, and a rig without bytes."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import grpc

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.background import Background
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.rpc import Address, ControlPlane, parse_address
from modelexpress_rl.rpc.errors import rpc_error
from modelexpress_rl.rpc.registration import MARGIN_MS, Registration
from modelexpress_rl.server.app import serving
from modelexpress_rl.server.settings import Settings
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import Store
from modelexpress_rl.train.adapter import StagedWeightVersionShardData, WeightVersionShardManifest
from modelexpress_rl.train.manifest_service import ManifestService
from modelexpress_rl.train.publication import Publication
from modelexpress_rl.train.publication_ports import PublicationPorts
from modelexpress_rl.train.publications import Publications

MODEL = "m"
SLOT = "s"
V1_METHODS = frozenset(v1.DESCRIPTOR.services_by_name["RefitControlService"].methods_by_name)


class VirtualClock:
    """A clock that moves when a test says so, and wakes its sleepers in order."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms
        self._sleepers: list[tuple[int, int, anyio.Event]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return self._now_ms

    async def sleep(self, delay_s: float) -> None:
        woken = anyio.Event()
        at_ms = self._now_ms + max(0, round(delay_s * 1000))
        heapq.heappush(self._sleepers, (at_ms, next(self._order), woken))
        await woken.wait()

    async def advance(self, delay_ms: int) -> None:
        """Let everything that is due within `delay_ms` happen, one sleeper after the other."""
        end_ms = self._now_ms + delay_ms
        await _let_all_run()
        while self._sleepers and self._sleepers[0][0] <= end_ms:
            at_ms, _, woken = heapq.heappop(self._sleepers)
            self._now_ms = max(self._now_ms, at_ms)
            woken.set()
            await _let_all_run()
        self._now_ms = end_ms


async def _let_all_run() -> None:
    """Enough rounds of the loop for tasks that wait for nothing real."""
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


Handler = Callable[[Any], Any]


class ScriptedControl(ControlPlane):
    """A control plane without a network: handlers answer, by method name; what has none is UNAVAILABLE."""

    def __init__(self, **handlers: Handler) -> None:
        super().__init__(Address("scripted", 1), rpc_timeout_s=5.0)
        self.handlers = handlers
        self.calls: list[str] = []

    async def call(self, method: Any, request: Any, timeout_s: float | None, metadata: Any = None) -> Any:
        self.calls.append(method.name)
        await anyio.lowlevel.checkpoint()
        return self._answer(method.name, request)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: Any, request: Any, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[Any], None]:
        self.calls.append(method.name)

        async def messages() -> AsyncIterator[Any]:
            yield self._answer(method.name, request)
            await anyio.sleep_forever()

        yield messages()

    def _answer(self, name: str, request: Any) -> Any:
        handler = self.handlers.get(name)
        if handler is None:
            raise failure(grpc.StatusCode.UNAVAILABLE, name)
        return handler(request)


class FaultyControl(ControlPlane):
    """The real control plane behind a network that can be told to fail.

    `faults[name]` is a list of what happens to the next calls of that method: "lost" (applied, the
    reply is lost), "unsent" (never arrives). `always` does it for every call. `down` cuts everything.
    """

    def __init__(self, address: str, *, rpc_timeout_s: float = 5.0, modern: bool = True) -> None:
        super().__init__(parse_address(address), rpc_timeout_s=rpc_timeout_s)
        self.faults: dict[str, list[str]] = {}
        self.always: dict[str, str] = {}
        self.down = False
        self.modern = modern
        self.calls: list[str] = []

    async def call(self, method: Any, request: Any, timeout_s: float | None, metadata: Any = None) -> Any:
        self.calls.append(method.name)
        self._check(method.name)
        fault = self.always.get(method.name) or next(iter(self.faults.get(method.name, [])), None)
        if self.faults.get(method.name):
            self.faults[method.name].pop(0)
        if fault == "unsent":
            raise failure(grpc.StatusCode.UNAVAILABLE, method.name)
        answer = await super().call(method, request, timeout_s, metadata)
        if fault == "lost":
            raise failure(grpc.StatusCode.UNAVAILABLE, method.name, outcome_unknown=True)
        return answer

    @contextlib.asynccontextmanager
    async def stream(
        self, method: Any, request: Any, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[Any], None]:
        self.calls.append(method.name)
        async with super().stream(method, request, silence_s) as messages:

            async def checked() -> AsyncIterator[Any]:
                self._check(method.name)
                async for message in messages:
                    self._check(method.name)
                    yield message

            yield checked()

    def _check(self, name: str) -> None:
        if self.down:
            raise failure(grpc.StatusCode.UNAVAILABLE, name)
        if not self.modern and name in V1_METHODS:
            raise failure(grpc.StatusCode.UNIMPLEMENTED, name)


def failure(code: grpc.StatusCode, name: str, *, outcome_unknown: bool = False) -> Exception:
    return rpc_error(code, "as the test wants", method=name, address="test", outcome_unknown=outcome_unknown)


@dataclass
class Buffer:
    """Stands for what is lent."""

    name: str = "buffer"
    released: int = 0

    def release(self) -> None:
        self.released += 1


def staged_data(buffer: Buffer, **more: Any) -> StagedWeightVersionShardData:
    manifest = WeightVersionShardManifest(f"manifest of {buffer.name}".encode(), 1, 4)
    return StagedWeightVersionShardData(manifest, buffer_owner=buffer, **more)


@dataclass
class Rig:
    """The publications of one trainer, with a control plane and no transport."""

    control: ControlPlane
    registration: Registration
    background: Background
    service: ManifestService
    publications: Publications
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def stage(self, version_id: str, buffer: Buffer | None = None, **more: Any) -> Publication:
        """Stage a buffer as this version; `more` goes into the staged data."""
        buffer = buffer or self.buffers.setdefault(version_id, Buffer(f"buffer of {version_id}"))
        publication, is_new = self.publications.begin(version_id, SLOT, buffer.name)
        if is_new:
            with publication.capturing():
                publication.captured(staged_data(buffer, **more))
        return publication


@contextlib.asynccontextmanager
async def rig_of(
    control: ControlPlane,
    *,
    clock: Clock = MONOTONIC,
    ttl_s: int = 30,
    rpc_timeout_s: float = 5.0,
    release_grace_s: float = 0.05,
    max_lease_ttl_ms: int = 300_000,
    engine_fence_timeout_s: float = 5.0,
) -> AsyncGenerator[Rig, None]:
    registration = Registration(
        control,
        worker_id="trainer",
        role=refit.WORKER_ROLE_TRAINER,
        model_name=MODEL,
        ttl_s=ttl_s,
        clock=clock,
    )
    service = ManifestService("127.0.0.1")
    await service.start()
    background = await Background.start("trainer under test")
    ports = PublicationPorts(
        control=control,
        registration=registration,
        background=background,
        service=service,
        clock=clock,
        rpc_timeout_s=rpc_timeout_s,
        release_grace_s=release_grace_s,
        max_lease_ttl_ms=max_lease_ttl_ms,
        margin_ms=MARGIN_MS,
        engine_fence_timeout_s=engine_fence_timeout_s,
    )
    publications = Publications(ports)
    registration.on_change = publications.registration_changed
    background.on_crash = publications.crashed
    await registration.register()
    background.spawn(registration.run)
    try:
        yield Rig(control, registration, background, service, publications)
    finally:
        await publications.aclose(0.0)
        await control.aclose()
        await background.aclose()
        await service.aclose()


class Orchestrator:
    """Creates and releases versions, and reads them as a generator does."""

    def __init__(self, address: str) -> None:
        self.plane = ControlPlane(parse_address(address))

    async def create(self, version_id: str, *slots: str) -> None:
        await self.plane.create_weight_version(
            refit.CreateWeightVersionRequest(
                model_name=MODEL,
                idempotency_key=version_id,
                uid=version_id,
                payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
                expected_source_slots=slots or (SLOT,),
                state=refit.WEIGHT_VERSION_STATE_STAGING,
            )
        )

    async def state(self, version_id: str) -> int:
        answer = await self.plane.get_weight_version(refit.GetWeightVersionRequest(uid=version_id))
        return answer.version.state

    async def release(self, version_id: str) -> None:
        await self.plane.delete_weight_version(refit.DeleteWeightVersionRequest(uid=version_id))

    async def shards(self, version_id: str) -> list[refit.WeightVersionShard]:
        request = refit.ListWeightVersionShardsRequest(version_id=version_id)
        return list((await self.plane.list_weight_version_shards(request)).shards)

    async def lease(self, version_id: str, ttl_ms: int = 60_000) -> str:
        worker = refit.WorkerRegistration(
            worker_id="reader", role=refit.WORKER_ROLE_GENERATOR, model_name=MODEL
        )
        await self.plane.register_worker(refit.RegisterWorkerRequest(worker=worker, ttl_seconds=120))
        request = v1.AcquireVersionLeaseRequest(version_id=version_id, worker_id="reader", ttl_ms=ttl_ms)
        return (await self.plane.acquire_version_lease(request)).lease.lease_id

    async def return_lease(self, version_id: str, lease_id: str) -> None:
        await self.plane.delete_version_lease(
            refit.DeleteVersionLeaseRequest(version_id=version_id, lease_id=lease_id, worker_id="reader")
        )


@contextlib.asynccontextmanager
async def control_plane(
    settings: Settings | None = None, *, port: int = 0, store: Store | None = None
) -> AsyncGenerator[str, None]:
    """A real server, with an empty store where none is given; yields its address."""
    async with serving(store or MemoryStore(), settings=settings, port=port) as running:
        yield running.address


async def eventually(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Poll until the condition (which may be a coroutine function) holds."""
    with anyio.fail_after(timeout_s):
        while True:
            met = condition()
            if hasattr(met, "__await__"):
                met = await met
            if met:
                return
            await anyio.sleep(0.005)


async def within(timeout_s: float, fence: Any) -> None:
    """Wait for a fence, bounded."""
    with anyio.fail_after(timeout_s):
        await fence.wait()
