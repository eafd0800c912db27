"""The trainer clients: the async one, and the blocking one that 0.7's users call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, TypeVar

import anyio

from modelexpress_rl import envs
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.background import Background
from modelexpress_rl.blocking import Portal
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.rpc import ControlPlane, TokenFile
from modelexpress_rl.rpc.network import GRPC, Network
from modelexpress_rl.rpc.registration import Registration
from modelexpress_rl.train.config import ModelExpressTrainerConfig
from modelexpress_rl.train.fences import BlockingFence, Fence
from modelexpress_rl.train.methods.port import StagedShard
from modelexpress_rl.train.resources import AgentFactory, nixl_agent
from modelexpress_rl.train.runtime import TrainerRuntime
from modelexpress_rl.train.settings import TrainerSettings, resolve
from modelexpress_rl.train.streams import Marks, marks_now
from modelexpress_rl.version import WeightVersionRef

_log = logging.getLogger(__name__)

T = TypeVar("T")


class StagedWeightVersionShard:
    """A staged version of this rank; see `AsyncModelExpressTrainerClient.stage_shard`."""

    def __init__(self, runtime: TrainerRuntime, staged: StagedShard) -> None:
        self._runtime = runtime
        self._staged = staged

    @property
    def version_id(self) -> str:
        """The version."""
        return self._staged.version_id

    @property
    def source_slot_id(self) -> str:
        """The slot that it fills."""
        return self._staged.slot_id

    @property
    def publish_ready(self) -> Fence:
        """Completes when the bytes are in place; in the copy modes training may go on then."""
        return self._staged.publish_ready

    @property
    def published(self) -> Fence:
        """Completes when the control plane has confirmed the version; breaks, saying why, where it won't."""
        return self._staged.published

    @property
    def weights_free(self) -> Fence:
        """Completes when the trainer may write its weights again, whatever the staging mode.

        `publish_ready` in the copy modes, `source_reuse_ready` IN_PLACE. Where it breaks, the capture failed:
        the weights may be written, and the version is not published.
        """
        return self._staged.weights_free

    @property
    def skipped(self) -> bool:
        """Whether readers held every generation and `back_pressure` is SKIP: the version is not published.

        Then `publish` does nothing, `publish_ready` and `published` are broken and say by which versions the
        generations are held, `source_reuse_ready` and `weights_free` are complete. Nobody waits for this
        rank in vain who asks whether the version will be READY only once it is released: whoever created
        the version should release it, unless another replica publishes this slot.
        """
        return self._staged.skipped

    @property
    def source_reuse_ready(self) -> Fence:
        """Completes when nobody may read the published buffers any more.

        IN_PLACE these are the trainer's tensors: the optimizer step waits for this. It breaks
        (`FenceBroken`) where the client is closed before the readers had drained.
        """
        return self._staged.source_reuse_ready

    async def publish(self) -> None:
        """Announce the version; returns once the control plane confirms it; again is harmless.

        Raises:
            RpcError: refused (it is also a `grpc.RpcError`); the buffers are free again.
            Unavailable: no confirmation within the RPC timeout. It counts as announced, and the
                announcement goes on in the background; or it never was, where the control plane has been
                away for very long, and the buffers are free again.
            StateError: it was released before it was published.
        """
        await self._runtime.publish(self._staged)

    def release(self) -> Fence:
        """Want the buffers back; returns `source_reuse_ready`. Again is harmless."""
        return self._runtime.release(WeightVersionRef(self.version_id))


class AsyncModelExpressTrainerClient:
    """One trainer rank: stages, publishes and releases versions.

    `await AsyncModelExpressTrainerClient.initialize(config)` and `await client.close()`, or
    `async with await ...initialize(config) as client`. It belongs to the event loop it was made in.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        control: ControlPlane,
        registration: Registration,
        background: Background,
        runtime: TrainerRuntime,
    ) -> None:
        self.model_name = settings.model_name
        self.worker_id = settings.worker_id
        self.server_url = str(settings.address)
        self.worker_endpoint = runtime.endpoint
        self._control = control
        self._registration = registration
        self._background = background
        self._runtime = runtime
        self._closed = False

    @classmethod
    async def initialize(
        cls,
        config: ModelExpressTrainerConfig | None = None,
        *,
        clock: Clock = MONOTONIC,
        create_agent: AgentFactory = nixl_agent,
        network: Network = GRPC,
    ) -> Self:
        """Start what the config asks for and register this worker; a failure closes what was opened.

        Raises:
            UsageError: the config or the environment is not acceptable; the message names what.
            RpcError: the worker could not be registered within the RPC timeout.
        """
        settings = resolve(config or ModelExpressTrainerConfig())
        token_path = envs.auth_token_path()
        control = network.control_plane(
            settings.address,
            rpc_timeout_s=settings.rpc_timeout_s,
            credentials=None if token_path is None else TokenFile(token_path),
        )
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(control.aclose)
            registration = Registration(
                control,
                worker_id=settings.worker_id,
                role=refit.WORKER_ROLE_TRAINER,
                model_name=settings.model_name,
                ttl_s=settings.registration_ttl_s,
                clock=clock,
            )
            background = await Background.start(f"trainer {settings.worker_id}")
            opened.push_async_callback(background.aclose)
            runtime = await TrainerRuntime.open(
                settings,
                control,
                registration,
                background,
                clock=clock,
                create_agent=create_agent,
                network=network,
            )
            background.on_crash = runtime.crashed
            opened.push_async_callback(runtime.close)
            if runtime.requires_registration:
                await registration.register()
                background.spawn(registration.run)
            opened.pop_all()
        return cls(settings, control, registration, background, runtime)

    @property
    def source_slot_id(self) -> str:
        """The slot of the bound tensors, or of those that the engine context names.

        Raises:
            StateError: nothing is bound.
        """
        return self._runtime.source_slot_id

    async def bind_tensors(self, tensors: Any) -> str:
        """Fix the tensors that are published from now on; returns their slot.

        Raises:
            UsageError: None, or not what the engine expects.
            StateError: tensors are bound already.
        """
        self._background.check()
        return self._runtime.bind_tensors(tensors)

    async def stage_shard(
        self,
        version: WeightVersionRef | Any,
        tensors: Any = None,
        hf_tensor_iter: Iterable[Any] | None = None,
    ) -> StagedWeightVersionShard:
        """Capture a version: the bound tensors, or `tensors`; returns at `publish_ready`.

        `version` is a ref, a `WeightVersion`, or an id. The same version and tensors again give what
        is staged already.

        Raises:
            StateError: other tensors are staged or published as this version, or a bound tensor moved.
            DeadlineExceeded: in the copy modes, and every generation was being read until the deadline.
        """
        self._background.check()
        staged = await self._runtime.stage(_ref(version), tensors=tensors, hf_tensor_iter=hf_tensor_iter)
        return StagedWeightVersionShard(self._runtime, staged)

    async def publish_version(
        self, version: WeightVersionRef | Any, tensors: Any = None
    ) -> StagedWeightVersionShard:
        """Stage and publish the bound tensors, or `tensors`; raises as `stage_shard` and `publish` do.

        By the config's `overlap` it returns when the control plane has confirmed the version (NONE), when the
        bytes are in place (PUBLISH), or once the capture has begun (CAPTURE): then the weights may be written
        when `weights_free` of what is returned completes. What goes on afterwards raises nothing here: its
        failure breaks `published`, or `publish_ready` where it is the capture's. Where readers hold every
        generation, `back_pressure` decides; see `skipped`.
        """
        return await self.publish_version_after(version, tensors, marks_now())

    async def publish_version_after(
        self, version: WeightVersionRef | Any, tensors: Any, after: Marks
    ) -> StagedWeightVersionShard:
        """As `publish_version`, with weights that are complete once what the marks stand for has ended."""
        self._background.check()
        staged = await self._runtime.publish_bound(_ref(version), tensors=tensors, after=after)
        return StagedWeightVersionShard(self._runtime, staged)

    @property
    def room(self) -> int | None:
        """How many versions can be captured now without waiting or skipping; None IN_PLACE.

        Ranks that must skip the same versions can agree on the least of theirs before they publish.
        """
        return self._runtime.room

    async def release_version(self, version: WeightVersionRef | Any) -> Fence:
        """Want a version's buffers back; returns the fence that says when they are.

        A version that isn't staged here has nothing to wait for. Again is harmless.
        """
        return self._runtime.release(_ref(version))

    async def prepare_delta_base(self, hf_tensor_iter: Iterable[Any]) -> None:
        """Fix the base of the first delta.

        Raises:
            StateError: this client does not publish deltas.
        """
        await self._runtime.prepare_delta_base(hf_tensor_iter)

    def pop_metrics(self) -> dict[str, float]:
        """The numbers of the publication that ended last, handed out once."""
        return self._runtime.pop_metrics()

    async def close(self) -> None:
        """Release everything, wait for readers within the close timeout, and leave; idempotent.

        Shielded and bounded; fences that have not completed by then break.
        """
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._runtime.close()
            if self._runtime.requires_registration and self._background.failure is None:
                await self._registration.leave()
            await self._control.aclose()
            await self._background.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class BlockingStagedShard:
    """The blocking view of a staged version."""

    def __init__(self, portal: Portal, staged: StagedWeightVersionShard) -> None:
        self._portal = portal
        self._staged = staged

    @property
    def version_id(self) -> str:
        """The version."""
        return self._staged.version_id

    @property
    def source_slot_id(self) -> str:
        """The slot that it fills."""
        return self._staged.source_slot_id

    @property
    def publish_ready(self) -> BlockingFence:
        """As `StagedWeightVersionShard.publish_ready`, with a blocking `wait`."""
        return BlockingFence(self._staged.publish_ready)

    @property
    def published(self) -> BlockingFence:
        """As `StagedWeightVersionShard.published`, with a blocking `wait`."""
        return BlockingFence(self._staged.published)

    @property
    def weights_free(self) -> BlockingFence:
        """As `StagedWeightVersionShard.weights_free`, with a blocking `wait`."""
        return BlockingFence(self._staged.weights_free)

    @property
    def skipped(self) -> bool:
        """As `StagedWeightVersionShard.skipped`."""
        return self._staged.skipped

    @property
    def source_reuse_ready(self) -> BlockingFence:
        """As `StagedWeightVersionShard.source_reuse_ready`, with a blocking `wait`."""
        return BlockingFence(self._staged.source_reuse_ready)

    def publish(self) -> None:
        """As `StagedWeightVersionShard.publish`."""
        self._portal.call(self._staged.publish)

    def release(self) -> BlockingFence:
        """As `StagedWeightVersionShard.release`."""
        return BlockingFence(self._portal.call(_as_async, self._staged.release))


class ModelExpressTrainerClient:
    """The blocking trainer client: a facade over the async one, which runs in a thread of its own."""

    def __init__(self, portal: Portal, client: AsyncModelExpressTrainerClient) -> None:
        self.model_name = client.model_name
        self.worker_id = client.worker_id
        self.server_url = client.server_url
        self.worker_endpoint = client.worker_endpoint
        self._portal = portal
        self._client = client

    @classmethod
    def initialize(
        cls, config: ModelExpressTrainerConfig | None = None, *, create_agent: AgentFactory = nixl_agent
    ) -> Self:
        """As `AsyncModelExpressTrainerClient.initialize`; also a context manager."""
        portal = Portal("trainer client")
        try:
            client = portal.call(
                partial(AsyncModelExpressTrainerClient.initialize, config, create_agent=create_agent)
            )
        except BaseException:
            portal.close()
            raise
        return cls(portal, client)

    @property
    def source_slot_id(self) -> str:
        """As `AsyncModelExpressTrainerClient.source_slot_id`."""
        return self._portal.call(_as_async, lambda: self._client.source_slot_id)

    def bind_tensors(self, tensors: Any) -> str:
        """As `AsyncModelExpressTrainerClient.bind_tensors`."""
        return self._portal.call(self._client.bind_tensors, tensors)

    def stage_shard(
        self,
        version: WeightVersionRef | Any,
        tensors: Any = None,
        hf_tensor_iter: Iterable[Any] | None = None,
    ) -> BlockingStagedShard:
        """As `AsyncModelExpressTrainerClient.stage_shard`."""
        staged = self._portal.call(self._client.stage_shard, version, tensors, hf_tensor_iter)
        return BlockingStagedShard(self._portal, staged)

    def publish_version(self, version: WeightVersionRef | Any, tensors: Any = None) -> BlockingStagedShard:
        """As `AsyncModelExpressTrainerClient.publish_version`."""
        staged = self._portal.call(self._client.publish_version_after, version, tensors, marks_now())
        return BlockingStagedShard(self._portal, staged)

    @property
    def room(self) -> int | None:
        """As `AsyncModelExpressTrainerClient.room`."""
        return self._portal.call(_as_async, lambda: self._client.room)

    def release_version(self, version: WeightVersionRef | Any) -> BlockingFence:
        """As `AsyncModelExpressTrainerClient.release_version`."""
        return BlockingFence(self._portal.call(self._client.release_version, version))

    def prepare_delta_base(self, hf_tensor_iter: Iterable[Any]) -> None:
        """As `AsyncModelExpressTrainerClient.prepare_delta_base`."""
        self._portal.call(self._client.prepare_delta_base, hf_tensor_iter)

    def pop_metrics(self) -> dict[str, float]:
        """As `AsyncModelExpressTrainerClient.pop_metrics`."""
        return self._client.pop_metrics()

    def close(self) -> None:
        """As `AsyncModelExpressTrainerClient.close`; ends the thread. In a forked child it does nothing."""
        if self._portal.closed or self._portal.forked:
            return
        try:
            self._portal.call(self._client.close)
        finally:
            self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _as_async(function: Callable[[], T]) -> T:
    return function()


def _ref(version: WeightVersionRef | Any) -> WeightVersionRef:
    if isinstance(version, WeightVersionRef):
        return version
    return WeightVersionRef(version if isinstance(version, str) else getattr(version, "version_id", version))
