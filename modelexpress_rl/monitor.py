"""Watching readiness: await a version, iterate events, or be called back.

    async with ReadinessMonitor.connect("localhost:8001") as monitor:
        await monitor.wait_until_ready("run:7", timeout_s=60)
        monitor.subscribe(print, model_name="llama")
        async for event in monitor.version_events("run:7"):
            print(event)

Versions are streamed where the server has our service and polled where it does not.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Self

import anyio
import anyio.abc
import anyio.to_thread

from modelexpress_rl import arguments
from modelexpress_rl.errors import DeadlineExceeded, ModelExpressError, StateError, UsageError
from modelexpress_rl.rpc import watch as watching
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.rpc.errors import Unimplemented
from modelexpress_rl.rpc.watch import WatchPolicy
from modelexpress_rl.version import VersionState, VersionStatus, WeightVersionState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """How a version stands, and how it stood at the event before (None: this is the first)."""

    status: VersionStatus
    previous: VersionStatus | None = None

    @property
    def entered(self) -> VersionState | None:
        """The state that was entered with this event, or None where only coverage or leases changed."""
        if self.previous is not None and self.previous.state is self.status.state:
            return None
        return self.status.state

    def __str__(self) -> str:
        before = f"{self.previous.state} -> " if self.previous is not None and self.entered else ""
        return f"{before}{self.status}"


Callback = Callable[[VersionEvent], object] | Callable[[VersionEvent], Awaitable[object]]
"""A plain callback runs in a worker thread, so it may block; an async one in the event loop."""


class ReadinessMonitor:
    """Follows versions through one connection. Made by `connect`; an async context manager.

    Leaving the block ends all subscriptions and iterators. A server that is away is waited for: by
    waits until their timeout, by iterators as long as the policy says, by subscriptions for ever.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        policy: WatchPolicy = watching.DEFAULT_POLICY,
        callback_timeout_s: float = 30.0,
    ) -> None:
        self._plane = plane
        self._policy = policy
        self._callback_timeout_s = callback_timeout_s
        self._group: anyio.abc.TaskGroup | None = None

    @classmethod
    def connect(cls, server_url: str | None = None, *, rpc_timeout_s: float = 10.0) -> Self:
        """A monitor of the control plane at `server_url` (default: the environment's).

        Raises:
            UsageError: the address can't be read.
        """
        return cls(ControlPlane.dial(server_url, rpc_timeout_s=rpc_timeout_s))

    async def wait_until_ready(
        self, version_id: str, timeout_s: float, *, wait_for_creation: bool = True
    ) -> VersionStatus:
        """Waits until a version is READY, also where it is yet to be created.

        Raises:
            DeadlineExceeded: not within `timeout_s`; the message says how the version stands.
            VersionGone: it was released before, or instead.
            RpcError: NOT_FOUND, with `wait_for_creation=False`.
        """
        return await self.wait_for_state(
            version_id, VersionState.READY, timeout_s, wait_for_creation=wait_for_creation
        )

    async def wait_for_state(
        self,
        version_id: str,
        state: VersionState | WeightVersionState,
        timeout_s: float,
        *,
        wait_for_creation: bool = True,
    ) -> VersionStatus:
        """As `wait_until_ready`, for any state."""
        return await watching.wait_for_state(
            self._plane,
            arguments.name("version_id", version_id),
            state,
            timeout_s=arguments.seconds("timeout_s", timeout_s, or_zero=True, or_for_ever=True),
            wait_for_creation=wait_for_creation,
            policy=self._policy,
        )

    async def wait_for_ready_version(
        self, model_name: str, timeout_s: float, *, after_sequence: int = 0
    ) -> VersionStatus:
        """Waits until a model has a READY version with a higher sequence, and returns the first seen.

        Raises:
            DeadlineExceeded: not within `timeout_s`.
            RpcError: UNIMPLEMENTED from a server of 0.7, which can't list the versions of a model.
        """
        try:
            with anyio.fail_after(timeout_s):
                async with contextlib.aclosing(self.model_events(model_name)) as events:
                    async for event in events:
                        newer = (event.status.sequence or 0) > after_sequence
                        if newer and event.status.state is VersionState.READY:
                            return event.status
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"model {model_name!r} has no READY version after sequence {after_sequence}"
                f" after {timeout_s:g} s"
            ) from error
        raise StateError(f"the watch of model {model_name!r} ended")

    async def version_events(
        self, version_id: str, *, wait_for_creation: bool = True
    ) -> AsyncGenerator[VersionEvent, None]:
        """Yields an event for how a version stands and for each change; ends when it is RETIRED or gone.

        `aclose` the iterator when leaving it early.

        Raises:
            RpcError: NOT_FOUND, with `wait_for_creation=False`; UNAVAILABLE where the server stays away.
        """
        watch = watching.watch_version(
            self._plane,
            arguments.name("version_id", version_id),
            wait_for_creation=wait_for_creation,
            policy=self._policy,
        )
        previous: VersionStatus | None = None
        async with contextlib.aclosing(watch) as statuses:
            async for status in statuses:
                yield VersionEvent(status, previous)
                previous = status

    async def model_events(self, model_name: str) -> AsyncGenerator[VersionEvent, None]:
        """Yields an event for every version of a model and for each change; it does not end by itself.

        Raises:
            RpcError: UNIMPLEMENTED from a server of 0.7, which can't list the versions of a model: name
                them to `version_events`; UNAVAILABLE where the server stays away.
        """
        model_name = arguments.name("model_name", model_name)
        watch = watching.watch_model(self._plane, model_name, policy=self._policy)
        previous: dict[str, VersionStatus] = {}
        async with contextlib.aclosing(watch) as statuses:
            async for status in statuses:
                yield VersionEvent(status, previous.get(status.version_id))
                previous[status.version_id] = status
                if status.state is VersionState.FORGOTTEN:
                    del previous[status.version_id]

    def subscribe(
        self,
        callback: Callback,
        *,
        version_id: str | None = None,
        model_name: str | None = None,
        states: Collection[VersionState] = (),
    ) -> Subscription:
        """Calls `callback(event)` for each event of one version or of one model, one at a time.

        With `states`, only when one of them is entered. A callback that raises, or takes longer than
        `callback_timeout_s`, is logged and the next event is delivered nevertheless. While the server is
        away the subscription goes on trying.

        Raises:
            UsageError: not exactly one of `version_id` and `model_name` is given.
            StateError: the monitor was not entered, or was left.
        """
        if (version_id is None) == (model_name is None):
            raise UsageError("give either version_id or model_name")
        if version_id is not None:
            arguments.name("version_id", version_id)
        if model_name is not None:
            arguments.name("model_name", model_name)
        if self._group is None:
            raise StateError("subscribe inside of the monitor's `async with` block")
        what = f"version {version_id!r}" if version_id is not None else f"model {model_name!r}"
        subscription = Subscription(what)

        def events() -> AsyncGenerator[VersionEvent, None]:
            if version_id is not None:
                return self.version_events(version_id)
            assert model_name is not None
            return self.model_events(model_name)

        self._group.start_soon(self._follow, subscription, events, callback, frozenset(states))
        return subscription

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.cancel_scope.cancel()
        try:
            await group.__aexit__(None, None, None)
        finally:
            await self._plane.aclose()

    async def _follow(
        self,
        subscription: Subscription,
        events: Callable[[], AsyncGenerator[VersionEvent, None]],
        callback: Callback,
        states: frozenset[VersionState],
    ) -> None:
        last: dict[str, VersionStatus] = {}
        failures = 0
        try:
            with subscription.scope:
                while not subscription.ended:
                    try:
                        async with contextlib.aclosing(events()) as stream:
                            async for event in stream:
                                failures = 0
                                await self._deliver(subscription, event, last, callback, states)
                        return
                    except Unimplemented as error:
                        _log.error("following %s: %s", subscription.what, error)
                        subscription.end(error)
                    except ModelExpressError as error:
                        failures += 1
                        _log.warning("following %s, failure %d: %s", subscription.what, failures, error)
                        await self._policy.sleep(self._policy.redial.delay_s(failures, self._policy.rng))
        finally:
            subscription.end(None)

    async def _deliver(
        self,
        subscription: Subscription,
        event: VersionEvent,
        last: dict[str, VersionStatus],
        callback: Callback,
        states: frozenset[VersionState],
    ) -> None:
        # A watch that was begun anew reports all versions as new; to the subscriber they are not.
        event = VersionEvent(event.status, last.get(event.status.version_id))
        if event.previous is not None and watching.same(event.previous, event.status):
            return
        last[event.status.version_id] = event.status
        if event.status.state is VersionState.FORGOTTEN:
            del last[event.status.version_id]
        if states and event.entered not in states:
            return
        try:
            with anyio.fail_after(self._callback_timeout_s):
                await _call(callback, event)
        except Exception:  # noqa: BLE001 (the subscriber's own error; the next event is not its fault)
            _log.exception("the callback of %s failed at: %s", subscription.what, event)


class Subscription:
    """A callback's subscription: it ends with its version, with `cancel`, or with the monitor."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.scope = anyio.CancelScope()
        self.error: Unimplemented | None = None
        """Why it ended, where the server can't serve it."""
        self._ended = anyio.Event()

    @property
    def ended(self) -> bool:
        """No event will be delivered any more."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Ends the subscription; a callback that runs is cancelled (one in a thread is left behind)."""
        self.scope.cancel()

    async def wait(self, timeout_s: float) -> None:
        """Waits until it has ended.

        Raises:
            DeadlineExceeded: not within `timeout_s`.
        """
        try:
            with anyio.fail_after(timeout_s):
                await self._ended.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.what} is still followed after {timeout_s:g} s") from error

    def end(self, error: Unimplemented | None) -> None:
        """Marks it as ended; for the monitor."""
        if not self.ended:
            self.error = error
            self._ended.set()


async def _call(callback: Callback, event: VersionEvent) -> None:
    function = callback if inspect.isroutine(callback) else getattr(callback, "__call__", callback)  # noqa: B004
    if inspect.iscoroutinefunction(function):
        await function(event)
        return
    result = await anyio.to_thread.run_sync(callback, event, abandon_on_cancel=True)
    if inspect.isawaitable(result):
        await result
