"""Calls that are tried again: when, how often, and what is said where it does not help."""

from __future__ import annotations

import signal

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl import rpc
from modelexpress_rl._pb import refit_pb2 as refit
from tests.wire.fake_server import STAGING, FakeControlPlane
from tests.wire.planes import REGISTER, get, plane_at, served_process, version

pytestmark = pytest.mark.anyio


async def test_retry_reaches_a_server_that_was_killed_and_restarted() -> None:
    with served_process(0) as (first, port):
        async with plane_at(f"127.0.0.1:{port}") as plane, anyio.create_task_group() as tasks:
            for _ in range(3):
                with pytest.raises(rpc.NotFound):
                    await plane.get_weight_version(get("v"))

            async def in_flight() -> None:
                with pytest.raises(rpc.Unavailable) as caught:
                    await plane.register_worker(REGISTER)
                assert caught.value.outcome_unknown

            tasks.start_soon(in_flight)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(rpc.NotFound):  # the call above is on the wire before this is answered
                await plane.get_weight_version(get("v"))
            first.send_signal(signal.SIGKILL)
            first.wait(10)
            with pytest.raises(rpc.Unavailable):
                await plane.get_weight_version(get("v"))
            with served_process(port):
                create = refit.CreateWeightVersionRequest(
                    model_name="m", idempotency_key="k", state=STAGING, uid="v"
                )
                done = await rpc.retry(
                    lambda timeout_s: plane.create_weight_version(create, timeout_s=timeout_s), total_s=20.0
                )
                assert done.value.version.uid == "v"
                assert not done.any_unknown


async def test_a_stopped_server_costs_one_deadline_and_is_reached_again() -> None:
    with served_process(0) as (server, port):
        async with plane_at(f"127.0.0.1:{port}") as plane:
            with pytest.raises(rpc.NotFound):
                await plane.get_weight_version(get("v"))
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(rpc.DeadlineExceeded):
                await plane.get_weight_version(get("v"), timeout_s=0.1)
            server.send_signal(signal.SIGCONT)
            with pytest.raises(rpc.NotFound):
                await rpc.retry(
                    lambda timeout_s: plane.get_weight_version(get("v"), timeout_s=timeout_s), total_s=20.0
                )


async def test_retry_reports_an_unknown_outcome(fake: FakeControlPlane) -> None:
    await fake.store.put(version("v"))
    fake.store.failures = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED]
    slept: list[float] = []
    failed: list[rpc.RpcError] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    async with plane_at(fake.url) as plane:
        done = await rpc.retry(
            lambda timeout_s: plane.get_weight_version(get("v"), timeout_s=timeout_s),
            total_s=30.0,
            sleep=sleep,
            on_failure=failed.append,
        )
        assert (done.attempts, done.any_unknown) == (3, True)
        assert [type(error) for error in failed] == [rpc.Unavailable, rpc.Aborted]
        assert 0.025 <= slept[0] <= 0.05 <= slept[1] <= 0.1

        fake.store.failures = [grpc.StatusCode.CANCELLED]  # so an overloaded server sheds calls
        await rpc.retry(
            lambda timeout_s: plane.get_weight_version(get("v"), timeout_s=timeout_s),
            total_s=30.0,
            sleep=sleep,
        )

        fake.store.failures = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND]
        with pytest.raises(rpc.NotFound) as caught:
            await rpc.retry(
                lambda timeout_s: plane.get_weight_version(get("v"), timeout_s=timeout_s),
                total_s=30.0,
                sleep=sleep,
            )
        assert caught.value.outcome_unknown


async def test_retry_ends_within_its_total_and_gives_each_attempt_what_is_left() -> None:
    now_s = 100.0
    given: list[float] = []

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += delay_s

    async def call(timeout_s: float) -> None:
        nonlocal now_s
        given.append(timeout_s)
        now_s += timeout_s / 2
        raise rpc.Unavailable(
            grpc.StatusCode.UNAVAILABLE, "away", method="M", address="a:1", outcome_unknown=False
        )

    with pytest.raises(rpc.Unavailable):
        await rpc.retry(call, total_s=10.0, attempt_s=4.0, now=lambda: now_s, sleep=sleep)
    assert given[0] == 4.0
    assert all(timeout_s <= 4.0 for timeout_s in given)
    assert now_s <= 110.0


async def test_a_deadline_that_passes_in_a_retry_says_why_it_was_retried() -> None:
    now_s = 0.0

    async def call(timeout_s: float) -> None:
        nonlocal now_s
        code, details = grpc.StatusCode.UNAVAILABLE, "the disk is full"
        if now_s > 5:
            now_s, code, details = 10.0, grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s} s"
        raise rpc.errors.rpc_error(code, details, method="M", address="a:1", outcome_unknown=False)

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += 3.0

    with pytest.raises(
        rpc.DeadlineExceeded, match=r"no answer within 4.0 s; before that UNAVAILABLE: the disk"
    ):
        await rpc.retry(call, total_s=10.0, now=lambda: now_s, sleep=sleep)
