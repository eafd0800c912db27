"""Registration by a virtual clock: renewals, separations, and the bound that readers are gone by."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import grpc
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc import AlreadyExists, RpcError
from modelexpress_rl.rpc.registration import (
    MARGIN_MS,
    Answering,
    Lost,
    Reachable,
    Registration,
    RegistrationEvent,
    Unreachable,
)
from tests.train.support import ScriptedControl, VirtualClock, failure

pytestmark = pytest.mark.anyio
TTL_S = 30
TTL_MS = TTL_S * 1000
LEASE_MS = 60_000


def registered(_: Any) -> refit.RegisterWorkerResponse:
    return refit.RegisterWorkerResponse()


def info(store_id: str = "store-1", max_lease_s: int = 60) -> v1.GetServerInfoResponse:
    return v1.GetServerInfoResponse(store_id=store_id, max_lease_ttl_seconds=max_lease_s)


class Worker:
    """A registration under a virtual clock, and all it told."""

    def __init__(self, **handlers: Any) -> None:
        self.clock = VirtualClock()
        self.control = ScriptedControl(
            **{"RegisterWorker": registered, "GetServerInfo": lambda _: info(), **handlers}
        )
        self.events: list[RegistrationEvent] = []
        self.registration = Registration(
            self.control,
            worker_id="w",
            role=refit.WORKER_ROLE_TRAINER,
            model_name="m",
            ttl_s=TTL_S,
            on_change=self.events.append,
            clock=self.clock,
            rng=random.Random(1),
        )

    def answer(self, name: str, handler: Any) -> None:
        self.control.handlers[name] = handler

    def cut(self, *, after_applying: bool = False) -> None:
        """Nothing is answered any more."""

        def fail(_: Any) -> Any:
            raise failure(grpc.StatusCode.UNAVAILABLE, "any", outcome_unknown=after_applying)

        self.answer("RegisterWorker", fail)
        self.answer("GetServerInfo", fail)

    def mend(self, store_id: str = "store-1") -> None:
        self.answer("RegisterWorker", registered)
        self.answer("GetServerInfo", lambda _: info(store_id))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.registration.register()
        async with anyio.create_task_group() as group:
            group.start_soon(self.registration.run)
            yield
            group.cancel_scope.cancel()


async def test_it_is_renewed_at_a_third_of_the_ttl() -> None:
    worker = Worker()
    async with worker.running():
        assert worker.registration.live
        for _ in range(9):
            await worker.clock.advance(TTL_MS // 3)
        renewals = worker.control.calls.count("RegisterWorker") - 1
        assert 9 <= renewals <= 10  # a little early, by chance, so that a fleet doesn't renew at once
        assert worker.registration.live
    assert worker.events == []


async def test_a_short_absence_is_not_told() -> None:
    worker = Worker()
    async with worker.running():
        await worker.clock.advance(TTL_MS // 3 - 1500)
        worker.cut()
        await worker.clock.advance(5000)
        worker.mend()
        await worker.clock.advance(5000)
        assert worker.registration.live
    assert worker.events == []


async def test_while_it_is_away_it_is_only_asked_what_changes_nothing() -> None:
    worker = Worker()
    async with worker.running():
        worker.cut()
        await worker.clock.advance(2 * TTL_MS // 3)
        assert worker.events == [Unreachable()]
        assert worker.registration.cut_off
        assert not worker.registration.live
        worker.control.calls.clear()
        await worker.clock.advance(10 * TTL_MS)
        assert set(worker.control.calls) == {"GetServerInfo"}
        assert [type(event) for event in worker.events] == [Unreachable, Lost]
        worker.mend()
        await worker.clock.advance(5000)
        assert [type(event) for event in worker.events] == [Unreachable, Lost, Answering, Lost, Reachable]
        assert worker.registration.live


async def test_an_answer_without_a_registration_begins_the_separation_anew() -> None:
    worker = Worker()
    async with worker.running():
        worker.cut()
        await worker.clock.advance(2 * TTL_MS // 3)
        worker.answer("GetServerInfo", lambda _: info())
        await worker.clock.advance(TTL_MS // 2)
        assert worker.events[:3] == [Unreachable(), Answering(), Unreachable()]
        assert worker.registration.separated


class TestTheBound:
    async def test_it_counts_from_the_last_renewal_that_succeeded(self) -> None:
        worker = Worker()
        async with worker.running():
            at_ms = worker.clock.now_ms()
            worker.cut()
            await worker.clock.advance(TTL_MS)
            expected = at_ms + TTL_MS + LEASE_MS + MARGIN_MS
            assert worker.registration.readers_gone_ms(LEASE_MS) == expected

    async def test_a_renewal_whose_reply_is_lost_may_have_been_applied(self) -> None:
        worker = Worker()
        async with worker.running():
            at_ms = worker.clock.now_ms()
            worker.cut(after_applying=True)
            await worker.clock.advance(TTL_MS)
            counted_from = worker.registration.readers_gone_ms(LEASE_MS) - TTL_MS - LEASE_MS - MARGIN_MS
            assert at_ms < counted_from <= at_ms + 2 * TTL_MS // 3

    async def test_it_does_not_move_while_the_separation_lasts(self) -> None:
        worker = Worker()
        async with worker.running():
            worker.cut(after_applying=True)
            await worker.clock.advance(TTL_MS)
            bound = worker.registration.readers_gone_ms(LEASE_MS)
            await worker.clock.advance(20 * TTL_MS)
            assert worker.registration.readers_gone_ms(LEASE_MS) == bound

    async def test_once_it_is_tried_again_the_bound_allows_for_that(self) -> None:
        worker = Worker()
        later = worker.registration.readers_gone_if_renewed_ms(LEASE_MS)
        assert later == worker.clock.now_ms() + TTL_MS // 3 + TTL_MS + LEASE_MS + MARGIN_MS


async def test_a_store_that_comes_back_empty_is_another_life() -> None:
    worker = Worker()
    async with worker.running():
        worker.mend(store_id="store-2")
        await worker.clock.advance(TTL_MS // 3)
        assert worker.events == [
            Lost("the control plane's store is another one: store-2"),
            Reachable(),
        ]


async def test_a_process_that_slept_through_its_ttl_has_lost_it() -> None:
    worker = Worker()
    async with worker.running():
        worker.clock._now_ms += 3 * TTL_MS  # as after SIGSTOP
        await worker.clock.advance(TTL_MS)
        assert [type(event) for event in worker.events] == [Lost, Reachable]


async def test_an_answer_that_shows_we_are_unknown_registers_anew_at_once() -> None:
    worker = Worker()
    async with worker.running():
        worker.registration.forgotten("the server does not know us")
        await worker.clock.advance(1)
        assert worker.events == [Lost("the server does not know us"), Reachable()]
        worker.cut()
        worker.registration.forgotten("again")
        await worker.clock.advance(1)
        assert worker.registration.separated
        worker.mend()
        await worker.clock.advance(TTL_MS // 2)
        assert worker.registration.live


async def test_waiting_for_the_registration() -> None:
    worker = Worker()
    async with worker.running():
        await worker.registration.wait_registered()
        worker.cut()
        await worker.clock.advance(TTL_MS)
        done = anyio.Event()

        async def wait() -> None:
            await worker.registration.wait_registered()
            done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await worker.clock.advance(TTL_MS)
            assert not done.is_set()
            worker.mend()
            await worker.clock.advance(TTL_MS)
            assert done.is_set()


class TestTheFirstTime:
    async def test_a_server_that_starts_late_is_waited_for(self) -> None:
        worker = Worker()
        worker.cut()
        async with anyio.create_task_group() as group:
            group.start_soon(worker.registration.register)
            await worker.clock.advance(1000)
            assert not worker.registration.live
            worker.mend()
            await worker.clock.advance(2000)
        assert worker.registration.live

    async def test_it_gives_up_at_the_rpc_timeout(self) -> None:
        worker = Worker()
        worker.cut()
        raised: list[RpcError] = []

        async def register() -> None:
            try:
                await worker.registration.register()
            except RpcError as error:
                raised.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(register)
            await worker.clock.advance(6000)
        assert raised[0].code() is grpc.StatusCode.UNAVAILABLE

    async def test_a_refusal_is_raised_at_once(self) -> None:
        def refuse(_: Any) -> Any:
            raise failure(grpc.StatusCode.ALREADY_EXISTS, "RegisterWorker")

        worker = Worker(RegisterWorker=refuse)
        with pytest.raises(AlreadyExists):
            await worker.registration.register()
        assert worker.control.calls == ["RegisterWorker"]

    async def test_a_ttl_below_a_second_is_refused(self) -> None:
        with pytest.raises(UsageError, match="registration_ttl_seconds"):
            Registration(
                ScriptedControl(), worker_id="w", role=refit.WORKER_ROLE_TRAINER, model_name="m", ttl_s=0
            )


class TestGoodBye:
    async def test_it_is_said(self) -> None:
        worker = Worker(UnregisterWorker=lambda _: v1.UnregisterWorkerResponse(unregistered=True))
        await worker.registration.leave()
        assert worker.control.calls == ["UnregisterWorker"]

    @pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE])
    async def test_a_server_that_does_not_hear_it_is_no_error(self, code: grpc.StatusCode) -> None:
        def fail(_: Any) -> Any:
            raise failure(code, "UnregisterWorker")

        await Worker(UnregisterWorker=fail).registration.leave()


async def test_a_server_without_our_service_is_fine() -> None:
    def unknown(_: Any) -> Any:
        raise failure(grpc.StatusCode.UNIMPLEMENTED, "GetServerInfo")

    worker = Worker(GetServerInfo=unknown)
    async with worker.running():
        await worker.clock.advance(3 * TTL_MS)
        assert worker.registration.live
        assert worker.registration.server.store_id is None
        worker.cut()
        worker.answer("GetServerInfo", unknown)  # UNIMPLEMENTED is an answer, too
        await worker.clock.advance(TTL_MS)
        assert Answering() in worker.events
