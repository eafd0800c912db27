"""The orchestrator's client: creates versions, watches them, ends them.

`AsyncModelExpressControlClient` is the implementation; `ModelExpressControlClient` is the same for
callers that block.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from typing import Self, TypeVar

from modelexpress_rl import arguments
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.blocking import BlockingIterator, Portal
from modelexpress_rl.object_storage import ObjectStorageSource
from modelexpress_rl.rpc import watch as watching
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.rpc.convert import (
    object_storage_to_pb,
    payload_format_to_pb,
    state_to_pb,
    version_state_to_pb,
    version_status_from_pb,
    weight_version_from_pb,
    worker_status_from_pb,
)
from modelexpress_rl.rpc.retry import retry
from modelexpress_rl.rpc.watch import WatchPolicy
from modelexpress_rl.version import (
    VersionState,
    VersionStatus,
    WeightPayloadFormat,
    WeightVersion,
    WeightVersionRef,
    WeightVersionState,
    WorkerStatus,
)

T = TypeVar("T")

STAGING = WeightVersionState.STAGING
VersionLike = str | WeightVersionRef | WeightVersion
"""What names a version: its id, a reference, or a record."""


class AsyncModelExpressControlClient:
    """Talks to the control plane from one event loop. Made by `connect`; an async context manager.

    Every call is idempotent and is tried again while the server is away, `rpc_timeout_seconds` in all.
    What fails then is a `grpc.RpcError` with `.code()`.
    """

    def __init__(self, plane: ControlPlane, *, policy: WatchPolicy = watching.DEFAULT_POLICY) -> None:
        self._plane = plane
        self._policy = policy

    @classmethod
    def connect(cls, server_url: str | None = None, rpc_timeout_seconds: float = 30.0) -> Self:
        """A client of the control plane at `server_url` (default: the environment's, or localhost:8001).

        Nothing is sent before the first call.

        Raises:
            UsageError: the address can't be read.
        """
        return cls(ControlPlane.dial(server_url, rpc_timeout_s=rpc_timeout_seconds))

    async def create_weight_version(
        self,
        model_name: str,
        idempotency_key: str,
        payload_format: WeightPayloadFormat | str,
        expected_source_slots: Iterable[str] | None = None,
        base_version_id: str | None = None,
        object_storage: ObjectStorageSource | None = None,
        state: WeightVersionState | str = STAGING,
        uid: str | None = None,
    ) -> WeightVersion:
        """Creates a version, or returns the one that the same request with the same key created.

        It becomes READY when every expected slot is published. `uid` is the version's id; the server
        makes one where it is absent.

        Raises:
            RpcError: INVALID_ARGUMENT, or ALREADY_EXISTS where the key or uid stands for another
                request; NOT_FOUND and FAILED_PRECONDITION concern the base version.
        """
        payload = arguments.choice(WeightPayloadFormat, "payload_format", payload_format)
        slots = () if expected_source_slots is None else expected_source_slots
        request = refit.CreateWeightVersionRequest(
            model_name=arguments.text("model_name", model_name),
            idempotency_key=arguments.text("idempotency_key", idempotency_key),
            payload_format=payload_format_to_pb(payload),
            base_version_id=_text_or_none("base_version_id", base_version_id),
            expected_source_slots=arguments.texts("expected_source_slots", slots),
            object_storage=object_storage_to_pb(object_storage) if object_storage else None,
            state=state_to_pb(arguments.choice(WeightVersionState, "state", state)),
            uid=_text_or_none("uid", uid),
        )
        answer = await self._retried(partial(self._plane.create_weight_version, request))
        return weight_version_from_pb(answer.version)

    async def get_weight_version(self, version_id: VersionLike) -> WeightVersion:
        """A version's record.

        Raises:
            RpcError: NOT_FOUND.
        """
        request = refit.GetWeightVersionRequest(uid=_id(version_id))
        answer = await self._retried(partial(self._plane.get_weight_version, request))
        return weight_version_from_pb(answer.version)

    async def update_weight_version_state(
        self, version_id: VersionLike, state: WeightVersionState | str
    ) -> WeightVersion:
        """Moves a version to `state`; the state that it has is no error.

        Raises:
            RpcError: FAILED_PRECONDITION for a step back, or for READY with slots: their publications
                make it READY.
        """
        number = state_to_pb(arguments.choice(WeightVersionState, "state", state))
        request = refit.UpdateWeightVersionStateRequest(uid=_id(version_id), state=number)
        answer = await self._retried(partial(self._plane.update_weight_version_state, request))
        return weight_version_from_pb(answer.version)

    async def delete_weight_version(self, version_id: VersionLike) -> WeightVersion:
        """Begins the release of a version; repeats are harmless. Its readers drain within the server's
        default deadline.

        Raises:
            RpcError: NOT_FOUND.
        """
        request = refit.DeleteWeightVersionRequest(uid=_id(version_id))
        answer = await self._retried(partial(self._plane.delete_weight_version, request))
        return weight_version_from_pb(answer.version)

    async def release_weight_version(
        self, version_id: VersionLike, drain_deadline_s: float | None = None
    ) -> VersionStatus:
        """Begins the release; no lease is renewed once `drain_deadline_s` has passed (0: at once).

        Raises:
            RpcError: NOT_FOUND; UNIMPLEMENTED from a server of 0.7: use `delete_weight_version`.
        """
        deadline_ms = None
        if drain_deadline_s is not None:
            deadline_ms = round(1000 * arguments.seconds("drain_deadline_s", drain_deadline_s, or_zero=True))
        request = v1.ReleaseVersionRequest(version_id=_id(version_id), drain_deadline_ms=deadline_ms)
        answer = await self._retried(partial(self._plane.release_version, request))
        return version_status_from_pb(answer.status)

    async def evict_weight_version(self, version_id: VersionLike) -> VersionStatus:
        """For an operator: no lease on the version is granted or renewed any more, as of now.

        Readers under way go on until their lease ends, at most one lease TTL. Again is harmless.

        Raises:
            RpcError: NOT_FOUND; UNIMPLEMENTED from a server of 0.7: use `delete_weight_version`.
        """
        request = v1.EvictVersionRequest(version_id=_id(version_id))
        answer = await self._retried(partial(self._plane.evict_version, request))
        return version_status_from_pb(answer.status)

    async def list_weight_versions(
        self,
        model_name: str | None = None,
        states: Iterable[VersionState | str] = (),
    ) -> list[WeightVersion]:
        """Versions of a model (default: of every model), oldest first; `states` leaves out the others.

        Raises:
            RpcError: UNIMPLEMENTED from a server of 0.7, which can't list.
        """
        return [weight_version_from_pb(each.version) for each in await self._listed(model_name, states)]

    async def list_version_statuses(
        self,
        model_name: str | None = None,
        states: Iterable[VersionState | str] = (),
    ) -> list[VersionStatus]:
        """As `list_weight_versions`, but how each stands: real state, coverage and leases."""
        return [version_status_from_pb(each.status) for each in await self._listed(model_name, states)]

    async def list_workers(
        self, model_name: str | None = None, *, include_expired: bool = False
    ) -> list[WorkerStatus]:
        """The workers of a model (default: of every model): who is live, and who serves which version.

        Raises:
            RpcError: UNIMPLEMENTED from a server of 0.7, which can't list.
        """
        model = arguments.text("model_name", "" if model_name is None else model_name)
        request = v1.ListWorkersRequest(model_name=model, include_expired=include_expired)
        answer = await self._retried(partial(self._plane.list_workers, request))
        return [worker_status_from_pb(each) for each in answer.workers]

    async def wait_for_state(
        self,
        version_id: VersionLike,
        state: VersionState | WeightVersionState | str,
        timeout: float,
        *,
        wait_for_creation: bool = False,
    ) -> VersionStatus:
        """Waits until a version is in `state`, at most `timeout` seconds, and returns how it stands.

        A `WeightVersionState` (and a string that names one) is met by every state that the wire shows
        as it, so STAGING by DEGRADED; RELEASING also by RETIRED and FORGOTTEN.

        Raises:
            DeadlineExceeded: not in time; a TimeoutError whose message says how the version stands.
            VersionGone: it was released and will not reach `state`.
            RpcError: NOT_FOUND, unless `wait_for_creation`.
        """
        return await watching.wait_for_state(
            self._plane,
            _id(version_id),
            _state(state),
            timeout_s=arguments.seconds("timeout", timeout, or_zero=True, or_for_ever=True),
            wait_for_creation=wait_for_creation,
            policy=self._policy,
        )

    def watch(
        self, version_id: VersionLike, *, wait_for_creation: bool = False
    ) -> AsyncGenerator[VersionStatus, None]:
        """An iterator over how a version stands: now, and at each change until it is RETIRED or gone.

        It survives a server that restarts, and polls where the server has no watch. `aclose` it (or use
        `contextlib.aclosing`) when leaving early. A cancelled wait ends it.

        Raises:
            RpcError: from the iterator: NOT_FOUND, unless `wait_for_creation`; UNAVAILABLE where the
                server stays away for two minutes.
        """
        return watching.watch_version(
            self._plane, _id(version_id), wait_for_creation=wait_for_creation, policy=self._policy
        )

    def watch_model(self, model_name: str) -> AsyncGenerator[VersionStatus, None]:
        """As `watch`, for all versions of a model; it does not end by itself.

        Raises:
            UsageError: at once: that is no model's name.
            RpcError: from the iterator: UNIMPLEMENTED from a server of 0.7.
        """
        model_name = arguments.name("model_name", model_name)
        return watching.watch_model(self._plane, model_name, policy=self._policy)

    async def close(self) -> None:
        """Closes the connection; idempotent."""
        await self._plane.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _listed(
        self, model_name: str | None, states: Iterable[VersionState | str]
    ) -> list[v1.ListedVersion]:
        request = v1.ListVersionsRequest(
            model_name=arguments.text("model_name", "" if model_name is None else model_name),
            states=[version_state_to_pb(arguments.choice(VersionState, "states", state)) for state in states],
        )
        listed: list[v1.ListedVersion] = []
        while True:
            page = await self._retried(partial(self._plane.list_versions, request))
            listed.extend(page.versions)
            if not page.next_page_token:
                return listed
            request.page_token = page.next_page_token

    async def _retried(self, call: Callable[..., Awaitable[T]]) -> T:
        done = await retry(lambda timeout_s: call(timeout_s=timeout_s), total_s=self._plane.rpc_timeout_s)
        return done.value


class ModelExpressControlClient:
    """`AsyncModelExpressControlClient` for callers that block; may be used from any thread.

    Made by `connect`; a context manager. Its event loop runs in a daemon thread until `close`.
    """

    def __init__(self, client: AsyncModelExpressControlClient, portal: Portal) -> None:
        self._client = client
        self._portal = portal

    @classmethod
    def connect(cls, server_url: str | None = None, rpc_timeout_seconds: float = 30.0) -> Self:
        """See `AsyncModelExpressControlClient.connect`."""
        client = AsyncModelExpressControlClient.connect(server_url, rpc_timeout_seconds)
        portal = Portal("control client")
        return cls(portal.enter(client), portal)

    def create_weight_version(
        self,
        model_name: str,
        idempotency_key: str,
        payload_format: WeightPayloadFormat | str,
        expected_source_slots: Iterable[str] | None = None,
        base_version_id: str | None = None,
        object_storage: ObjectStorageSource | None = None,
        state: WeightVersionState | str = STAGING,
        uid: str | None = None,
    ) -> WeightVersion:
        """See `AsyncModelExpressControlClient.create_weight_version`."""
        return self._portal.call(
            self._client.create_weight_version,
            model_name,
            idempotency_key,
            payload_format,
            expected_source_slots,
            base_version_id,
            object_storage,
            state,
            uid,
        )

    def get_weight_version(self, version_id: VersionLike) -> WeightVersion:
        """See `AsyncModelExpressControlClient.get_weight_version`."""
        return self._portal.call(self._client.get_weight_version, version_id)

    def update_weight_version_state(
        self, version_id: VersionLike, state: WeightVersionState | str
    ) -> WeightVersion:
        """See `AsyncModelExpressControlClient.update_weight_version_state`."""
        return self._portal.call(self._client.update_weight_version_state, version_id, state)

    def delete_weight_version(self, version_id: VersionLike) -> WeightVersion:
        """See `AsyncModelExpressControlClient.delete_weight_version`."""
        return self._portal.call(self._client.delete_weight_version, version_id)

    def release_weight_version(
        self, version_id: VersionLike, drain_deadline_s: float | None = None
    ) -> VersionStatus:
        """See `AsyncModelExpressControlClient.release_weight_version`."""
        return self._portal.call(self._client.release_weight_version, version_id, drain_deadline_s)

    def evict_weight_version(self, version_id: VersionLike) -> VersionStatus:
        """See `AsyncModelExpressControlClient.evict_weight_version`."""
        return self._portal.call(self._client.evict_weight_version, version_id)

    def list_weight_versions(
        self, model_name: str | None = None, states: Iterable[VersionState | str] = ()
    ) -> list[WeightVersion]:
        """See `AsyncModelExpressControlClient.list_weight_versions`."""
        return self._portal.call(self._client.list_weight_versions, model_name, states)

    def list_version_statuses(
        self, model_name: str | None = None, states: Iterable[VersionState | str] = ()
    ) -> list[VersionStatus]:
        """See `AsyncModelExpressControlClient.list_version_statuses`."""
        return self._portal.call(self._client.list_version_statuses, model_name, states)

    def list_workers(
        self, model_name: str | None = None, *, include_expired: bool = False
    ) -> list[WorkerStatus]:
        """See `AsyncModelExpressControlClient.list_workers`."""
        listing = partial(self._client.list_workers, include_expired=include_expired)
        return self._portal.call(listing, model_name)

    def wait_for_state(
        self,
        version_id: VersionLike,
        state: VersionState | WeightVersionState | str,
        timeout: float,
        *,
        wait_for_creation: bool = False,
    ) -> VersionStatus:
        """See `AsyncModelExpressControlClient.wait_for_state`."""
        wait = partial(self._client.wait_for_state, wait_for_creation=wait_for_creation)
        return self._portal.call(wait, version_id, state, timeout)

    def watch(
        self, version_id: VersionLike, *, wait_for_creation: bool = False
    ) -> BlockingIterator[VersionStatus]:
        """See `AsyncModelExpressControlClient.watch`; `close` the iterator when leaving early."""
        return self._portal.iterate(self._client.watch(version_id, wait_for_creation=wait_for_creation))

    def watch_model(self, model_name: str) -> BlockingIterator[VersionStatus]:
        """See `AsyncModelExpressControlClient.watch_model`."""
        return self._portal.iterate(self._client.watch_model(model_name))

    def close(self) -> None:
        """Closes the connection and ends the thread; idempotent."""
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _id(version: VersionLike) -> str:
    if isinstance(version, (WeightVersion, WeightVersionRef)):
        return version.version_id
    return WeightVersionRef(version).version_id


def _state(state: VersionState | WeightVersionState | str) -> VersionState | WeightVersionState:
    if isinstance(state, (VersionState, WeightVersionState)):
        return state
    with contextlib.suppress(ValueError):
        return WeightVersionState(state)
    return arguments.choice(VersionState, "state", state)


def _text_or_none(what: str, value: str | None) -> str | None:
    return None if value is None else arguments.text(what, value)
