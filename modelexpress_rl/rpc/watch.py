"""Watching versions: a stream where the server has our service, polling where it does not.

Both survive a server that is away for a while or comes back empty, and yield changes only.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace

import anyio
import grpc

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import DeadlineExceeded, TryAgainError, VersionGone
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.rpc.convert import (
    version_status_from_pb,
    version_status_from_record,
    weight_version_from_pb,
)
from modelexpress_rl.rpc.errors import NotFound, RpcError, Unimplemented, rpc_error
from modelexpress_rl.rpc.retry import Backoff
from modelexpress_rl.version import VersionState, VersionStatus, WeightVersionState

_END = tuple(VersionState)
# All watchers of a server lose it at once: they come back spread over a tenth of a second, then over more.
_REDIAL = Backoff(0.2, 3.0)
_POLL = Backoff(0.05, 1.0)
_RNG = random.Random()
_PASSING = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED})


@dataclass(frozen=True, slots=True)
class WatchPolicy:
    """How long a watch waits for what.

    A stream that says nothing for twice `heartbeat_s` (the server is asked to speak once in each) is
    dialled again. A server that can't be reached for `unreachable_s` ends the watch; so does one that
    can't be reached for the client's `rpc_timeout_s` at the very beginning. Polling begins at
    `poll.first_s` after each change and slows down to `poll.limit_s`.
    """

    heartbeat_s: float = 5.0
    unreachable_s: float = 120.0
    redial: Backoff = _REDIAL
    poll: Backoff = _POLL
    rng: random.Random = _RNG
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep


DEFAULT_POLICY = WatchPolicy()


async def watch_version(
    plane: ControlPlane,
    version_id: str,
    *,
    wait_for_creation: bool = False,
    policy: WatchPolicy = DEFAULT_POLICY,
) -> AsyncGenerator[VersionStatus, None]:
    """Yields the status of a version: the current one, then each change.

    Ends after RETIRED or FORGOTTEN (on a server of 0.7 a version is FORGOTTEN when it is no longer
    found). A version that was seen and is not known to a server that came back is FORGOTTEN. Lease
    renewals are no changes.

    Raises:
        NotFound: it is unknown from the beginning, and `wait_for_creation` is not set.
        RpcError: the server refuses, or has not been reachable for as long as the policy allows.
    """
    last: VersionStatus | None = None
    contact = _Contact(plane, policy)
    attempt = _stream_version
    while True:
        try:
            async with contextlib.aclosing(
                attempt(plane, version_id, wait_for_creation and last is None, policy, contact)
            ) as statuses:
                async for status in statuses:
                    if last is None or not same(status, last):
                        last = status
                        yield status
                    if status.state.ended:
                        return
            await contact.lost(_stream_ended(plane))
        except Unimplemented:
            if attempt is _poll_version:
                raise
            attempt = _poll_version
        except _Gone as gone:
            if last is not None:
                yield _forgotten(last)
                return
            if not wait_for_creation:
                raise gone.error from None
            await contact.idle()
        except RpcError as error:
            await contact.lost(error)


async def watch_model(
    plane: ControlPlane, model_name: str, *, policy: WatchPolicy = DEFAULT_POLICY
) -> AsyncGenerator[VersionStatus, None]:
    """Yields the status of every version of a model: all present ones, then each change; never ends.

    A version that is not in the listing of a server that came back is yielded as FORGOTTEN.

    Raises:
        Unimplemented: a server of 0.7 can't list versions; watch them one by one.
        RpcError: as `watch_version`.
    """
    last: dict[str, VersionStatus] = {}
    contact = _Contact(plane, policy)
    request = v1.WatchModelRequest(model_name=model_name, heartbeat_ms=int(policy.heartbeat_s * 1000))
    while True:
        present: set[str] = set()
        try:
            async with plane.watch_model(request, silence_s=2 * policy.heartbeat_s) as messages:
                async for message in messages:
                    contact.heard()
                    if message.HasField("status"):
                        status = version_status_from_pb(message.status)
                        present.add(status.version_id)
                        known = last.get(status.version_id)
                        if known is None or not same(status, known):
                            last[status.version_id] = status
                            yield status
                        if status.state is VersionState.FORGOTTEN:
                            del last[status.version_id]
                    if message.snapshot_complete:
                        for version_id in sorted(last.keys() - present):
                            yield _forgotten(last.pop(version_id))
            await contact.lost(_stream_ended(plane))
        except Unimplemented:
            raise
        except RpcError as error:
            await contact.lost(error)


async def _stream_version(
    plane: ControlPlane, version_id: str, wait: bool, policy: WatchPolicy, contact: _Contact
) -> AsyncGenerator[VersionStatus, None]:
    # No `from_revision`: a store that lost the version may have reached the same revision anew.
    request = v1.WatchVersionRequest(
        version_id=version_id,
        wait_for_creation=wait,
        heartbeat_ms=int(policy.heartbeat_s * 1000),
    )
    try:
        async with plane.watch_version(request, silence_s=2 * policy.heartbeat_s) as messages:
            async for message in messages:
                contact.heard()
                if message.HasField("status"):
                    yield version_status_from_pb(message.status)
    except NotFound as error:
        raise _Gone(error) from error


async def _poll_version(
    plane: ControlPlane, version_id: str, wait: bool, policy: WatchPolicy, contact: _Contact
) -> AsyncGenerator[VersionStatus, None]:
    last: VersionStatus | None = None
    unchanged = 0
    while True:
        try:
            status = await fetch_status(plane, version_id)
        except NotFound as error:
            contact.heard()
            raise _Gone(error) from error
        contact.heard()
        unchanged = unchanged + 1 if status == last else 1
        last = status
        yield status
        await policy.sleep(policy.poll.delay_s(unchanged, policy.rng))


async def wait_for_state(
    plane: ControlPlane,
    version_id: str,
    state: VersionState | WeightVersionState,
    *,
    timeout_s: float,
    wait_for_creation: bool = False,
    policy: WatchPolicy = DEFAULT_POLICY,
) -> VersionStatus:
    """Waits until a version is in `state`, and returns its status then.

    A `WeightVersionState` is met by every state that the wire shows as it. RELEASING and RETIRED are
    also met by what comes after them.

    Raises:
        DeadlineExceeded: not within `timeout_s`; the message says how the version stands.
        VersionGone: it is being released, or was, and will not reach `state` any more.
        NotFound: it is unknown, and `wait_for_creation` is not set.
        RpcError: as `watch_version`.
    """
    last: VersionStatus | None = None
    policy = replace(policy, unreachable_s=max(timeout_s, policy.unreachable_s))
    try:
        with anyio.fail_after(timeout_s):
            watch = watch_version(plane, version_id, wait_for_creation=wait_for_creation, policy=policy)
            async with contextlib.aclosing(watch) as statuses:
                async for status in statuses:
                    last = status
                    if _meets(status.state, state):
                        return status
                    if status.state.ending and not _is_an_end(state):
                        raise VersionGone(f"version {version_id!r} will not become {state}: {status}")
    except DeadlineExceeded:
        raise
    except TimeoutError as error:
        stands = str(last) if last is not None else "not known to the control plane"
        raise DeadlineExceeded(
            f"version {version_id!r} is not {state} after {timeout_s:g} s: {stands}"
        ) from error
    raise VersionGone(f"version {version_id!r} will not become {state}: {last}")


async def fetch_status(plane: ControlPlane, version_id: str) -> VersionStatus:
    """The status as far as RefitService tells it, which every server has.

    Raises:
        NotFound: the version is unknown.
        RpcError: the server can't be reached, or refuses.
    """
    answer = await plane.get_weight_version(refit.GetWeightVersionRequest(uid=version_id))
    version = weight_version_from_pb(answer.version)
    if not version.expected_source_slots:
        return version_status_from_record(version, None)
    listed = await plane.list_weight_version_shards(
        refit.ListWeightVersionShardsRequest(version_id=version_id)
    )
    return version_status_from_record(version, list(listed.shards))


class _Gone(Exception):
    """The server does not know the version."""

    def __init__(self, error: NotFound) -> None:
        super().__init__(str(error))
        self.error = error


class _Contact:
    """Whether the server has been heard, and for how long it may still be away."""

    def __init__(self, plane: ControlPlane, policy: WatchPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._idle = 0
        self._patience_s = plane.rpc_timeout_s
        self._heard_at_s = anyio.current_time()

    def heard(self) -> None:
        self._failures = 0
        self._idle = 0
        self._patience_s = self._policy.unreachable_s
        self._heard_at_s = anyio.current_time()

    async def lost(self, error: RpcError) -> None:
        """Waits before the next attempt, or raises `error`: it does not pass, or lasts too long."""
        if not _passes(error):
            raise error
        self._failures += 1
        delay_s = self._policy.redial.delay_s(self._failures, self._policy.rng)
        away_s = anyio.current_time() - self._heard_at_s
        if away_s + delay_s > self._patience_s:
            raise error
        await self._policy.sleep(delay_s)

    async def idle(self) -> None:
        """Waits before asking again for a version that does not exist yet."""
        self._idle += 1
        await self._policy.sleep(self._policy.poll.delay_s(self._idle, self._policy.rng))


def _stream_ended(plane: ControlPlane) -> RpcError:
    return rpc_error(
        grpc.StatusCode.UNAVAILABLE,
        "the server ended the stream",
        method="Watch",
        address=str(plane.address),
        outcome_unknown=False,
    )


def _passes(error: RpcError) -> bool:
    return isinstance(error, TryAgainError) or error.code() in _PASSING


def _meets(state: VersionState, wanted: VersionState | WeightVersionState) -> bool:
    if isinstance(wanted, WeightVersionState):
        return state.wire is wanted
    return state is wanted or (_is_an_end(wanted) and _END.index(state) > _END.index(wanted))


def _is_an_end(state: VersionState | WeightVersionState) -> bool:
    return state.value in ("RELEASING", "RETIRED", "FORGOTTEN")


def same(one: VersionStatus, other: VersionStatus) -> bool:
    """Whether nothing differs that a reader of statuses acts on; a renewed lease is no difference."""
    return _significant(one) == _significant(other)


def _significant(status: VersionStatus) -> VersionStatus:
    return replace(status, revision=None, last_lease_deadline_unix_ms=None, now_unix_ms=None)


def _forgotten(last: VersionStatus) -> VersionStatus:
    return replace(
        last, state=VersionState.FORGOTTEN, live_leases=0, reason="the control plane does not know it"
    )
