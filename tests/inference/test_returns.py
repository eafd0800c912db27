"""A lease on its way back never ends the next one, which has the same holder and version."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import grpc
import pytest

from modelexpress_rl import errors
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.background import Background
from modelexpress_rl.inference.session import GeneratorSession
from modelexpress_rl.rpc import ControlPlane, DeadlineExceeded, Unavailable, parse_address
from statemachines.ids import ModelName, VersionId, WorkerId

pytestmark = pytest.mark.anyio
V = VersionId("v")


class Control(ControlPlane):
    """Notes what it is asked, and answers returns and grants when it may."""

    def __init__(self) -> None:
        super().__init__(parse_address("control:1"), rpc_timeout_s=5.0)
        self.asked: list[str] = []
        self.returns = anyio.Event()
        self.grants = anyio.Event()
        self.grants.set()

    async def call(self, method: Any, request: Any, *_: Any) -> Any:
        self.asked.append(method.name)
        if isinstance(request, refit.DeleteVersionLeaseRequest):
            await self.returns.wait()
            return refit.DeleteVersionLeaseResponse(deleted=True)
        assert isinstance(request, v1.AcquireVersionLeaseRequest)
        await self.grants.wait()
        lease = refit.VersionLease(lease_id=f"lease.{len(self.asked)}", expires_at_unix_ms=30_000)
        return v1.VersionLeaseResponse(lease=lease, now_unix_ms=0)

    async def until_asked(self, count: int) -> None:
        with anyio.fail_after(5):
            while len(self.asked) < count:  # noqa: ASYNC110 (what it waits for has no event)
                await anyio.sleep(0.001)


@contextlib.asynccontextmanager
async def session(control: Control) -> AsyncIterator[GeneratorSession]:
    background = await Background.start("generator under test")
    try:
        yield GeneratorSession(
            control,
            background,
            worker_id=WorkerId("g"),
            model_name=ModelName("m"),
            registration_ttl_s=60,
            lease_ttl_s=30,
        )
    finally:
        control.returns.set()
        await background.aclose()


def soon() -> float:
    return anyio.current_time() + 5


async def test_a_version_is_leased_again_once_the_return_has_arrived() -> None:
    control = Control()
    async with session(control) as one, anyio.create_task_group() as group:
        one.give_back(await one.acquire(V, soon()))
        group.start_soon(one.acquire, V, soon())
        await control.until_asked(2)
        await anyio.wait_all_tasks_blocked()
        assert control.asked == ["AcquireVersionLease", "DeleteVersionLease"]
        control.returns.set()
        await control.until_asked(3)


async def test_another_version_need_not_wait() -> None:
    control = Control()
    async with session(control) as one:
        one.give_back(await one.acquire(V, soon()))
        await one.acquire(VersionId("other"), soon())


async def test_a_lease_whose_grant_was_not_heard_is_asked_for_by_name_and_returned_before() -> None:
    control = Control()
    control.grants = anyio.Event()
    async with session(control) as one, anyio.create_task_group() as group:
        with anyio.CancelScope() as given_up:
            group.start_soon(_cancel_when_asked, control, given_up)
            await one.acquire(V, soon())
        control.grants.set()
        control.returns.set()
        await one.acquire(V, soon())
        acquire, give_back = "AcquireVersionLease", "DeleteVersionLease"
        assert control.asked == [acquire, acquire, give_back, acquire]


async def _cancel_when_asked(control: Control, scope: anyio.CancelScope) -> None:
    await control.until_asked(1)
    scope.cancel()


async def test_a_grant_that_is_never_heard_of_is_given_up_in_time() -> None:
    control = Control()

    async def unheard(method: Any, request: Any, *_: Any) -> Any:
        control.asked.append(method.name)
        raise DeadlineExceeded(
            grpc.StatusCode.DEADLINE_EXCEEDED, "lost", method="m", address="a", outcome_unknown=True
        )

    control.call = unheard  # type: ignore[method-assign]
    async with session(control) as one:
        with pytest.raises(errors.DeadlineExceeded):  # the last attempt's, or that there was no time for one
            await one.acquire(V, anyio.current_time() + 0.1)
        with pytest.raises(Exception, match="no lease in time"):
            await one.acquire(V, anyio.current_time() + 0.1)


@pytest.mark.parametrize("ended_by", ["a deadline that passed meanwhile", "a cancellation"])
async def test_a_grant_that_was_not_heard_goes_back_however_the_wait_ends(
    ended_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control()
    answer = control.call

    async def lost(method: Any, request: Any, *more: Any) -> Any:
        if control.asked:
            return await answer(method, request, *more)
        control.asked.append(method.name)
        raise Unavailable(grpc.StatusCode.UNAVAILABLE, "lost", method="m", address="a", outcome_unknown=True)

    control.call = lost  # type: ignore[method-assign]
    async with session(control) as one:
        with anyio.CancelScope() as scope:

            async def sleep(delay_s: float) -> None:
                if ended_by == "a cancellation":
                    scope.cancel()
                await anyio.sleep(0.3)  # longer than was meant: the machine is busy

            monkeypatch.setattr(one, "_clock", _Sleeper(sleep))
            with pytest.raises(errors.DeadlineExceeded, match="no lease in time"):
                await one.acquire(V, anyio.current_time() + 0.2)
        monkeypatch.undo()
        control.returns.set()
        await control.until_asked(3)
        assert "DeleteVersionLease" in control.asked


class _Sleeper:
    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.sleep = sleep

    def now_ms(self) -> int:
        return 0
