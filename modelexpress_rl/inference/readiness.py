"""Waiting until a version can be leased.

NOT_FOUND means "not yet" and "gone". A version that is not known when the wait begins is given a short
grace to appear; one that was seen and is no longer known is gone.
"""

from __future__ import annotations

import contextlib

import anyio

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import DeadlineExceeded, ModelExpressError, VersionGone
from modelexpress_rl.rpc import ControlPlane, NotFound
from modelexpress_rl.rpc.watch import DEFAULT_POLICY, WatchPolicy, watch_version
from modelexpress_rl.version import VersionState
from statemachines.ids import VersionId

GRACE_S = 2.0


async def wait_until_ready(
    control: ControlPlane,
    version_id: VersionId,
    deadline: float,
    *,
    grace_s: float | None = None,
    policy: WatchPolicy = DEFAULT_POLICY,
) -> None:
    """Return when the version is READY; `deadline` is on the clock of `anyio.current_time()`.

    Raises:
        VersionGone: it is released, retired or forgotten, or not known within the grace.
        DeadlineExceeded: it is not READY in time; the message says what was missing.
        RpcError: the control plane refuses, or has been away for longer than the policy allows.
    """
    wait = _Wait(control, version_id, GRACE_S if grace_s is None else grace_s, policy)
    try:
        with anyio.fail_at(deadline):
            while not await wait.watched():
                await wait.require_known()
    except TimeoutError as error:
        if isinstance(error, ModelExpressError):
            raise
        raise DeadlineExceeded(f"version {version_id} was not READY in time: {wait.last}") from error


class _Wait:
    """One wait; `last` says in words how far the version has come."""

    def __init__(
        self, control: ControlPlane, version_id: VersionId, grace_s: float, policy: WatchPolicy
    ) -> None:
        self.last = "the control plane does not know it"
        self._control = control
        self._version_id = version_id
        self._grace_s = grace_s
        self._policy = policy

    async def watched(self) -> bool:
        """Return True when READY; False where the version did not appear within the grace."""
        with anyio.move_on_after(self._grace_s) as unknown:
            statuses = watch_version(
                self._control, self._version_id, wait_for_creation=True, policy=self._policy
            )
            async with contextlib.aclosing(statuses):
                async for status in statuses:
                    unknown.deadline = float("inf")
                    self.last = str(status)
                    if status.state.ending:
                        raise VersionGone(f"version {status}: it can't be staged any more")
                    if status.state is VersionState.READY:
                        return True
        return False

    async def require_known(self) -> None:
        """Pass where the control plane knows the version, or was away when we waited for it."""
        try:
            await self._control.get_weight_version(refit.GetWeightVersionRequest(uid=self._version_id))
        except NotFound as error:
            raise VersionGone(
                f"version {self._version_id} is not known to the control plane, and was not created within "
                f"{self._grace_s:g} s"
            ) from error
