"""The lease by our own clock: when it is renewed, when it is over, and that it ends once."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from modelexpress_rl.errors import LeaseLost
from modelexpress_rl.inference.lease import Grant, HeldLease, LeaseCalls, Publication, margin_ms
from modelexpress_rl.rpc import FailedPrecondition, Unavailable
from statemachines.ids import LeaseId, VersionId, WorkerId

pytestmark = pytest.mark.anyio

TTL_MS = 30_000
A = Publication("s0", WorkerId("a"), "da", "h:1", 1, 1)
B = Publication("s1", WorkerId("b"), "db", "h:2", 1, 1)


class VirtualClock:
    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms

    async def sleep(self, delay_s: float) -> None:
        self.ms += max(round(delay_s * 1000), 1)


class Calls(LeaseCalls):
    """Answers renewals from a script; each takes `takes_ms`."""

    def __init__(self, clock: VirtualClock, answer: Callable[[int], Grant]) -> None:
        self.worker_id = WorkerId("g")
        self.ttl_ms = TTL_MS
        self.renewed_at_ms: list[int] = []
        self.returned = 0
        self.takes_ms = 0
        self.clock = clock
        self._answer = answer

    async def renew(self, version_id: VersionId, lease_id: LeaseId, timeout_s: float) -> Grant:
        self.renewed_at_ms.append(self.clock.ms)
        self.clock.ms += self.takes_ms
        return self._answer(len(self.renewed_at_ms))

    async def give_back(self, version_id: VersionId, lease_id: LeaseId, clock: object) -> None:
        self.returned += 1


def grant(*publications: Publication, ttl_ms: int = TTL_MS) -> Grant:
    return Grant(LeaseId("l"), ttl_ms, publications or (A, B))


def refusal() -> FailedPrecondition:
    return FailedPrecondition(
        grpc.StatusCode.FAILED_PRECONDITION, "draining", method="Renew", address="x", outcome_unknown=False
    )


def held(clock: VirtualClock, answer: Callable[[int], Grant]) -> tuple[HeldLease, Calls]:
    calls = Calls(clock, answer)
    return HeldLease(calls, VersionId("v"), grant(), clock.ms, clock=clock), calls


async def test_it_is_renewed_at_a_third_until_renewals_are_refused_and_then_holds_to_its_end() -> None:
    clock = VirtualClock()

    def answer(number: int) -> Grant:
        if number > 2:
            raise refusal()
        return grant()

    lease, calls = held(clock, answer)
    began = clock.ms
    lost = await lease.keep()
    assert isinstance(lost, LeaseLost)
    assert "draining" in str(lost)
    assert calls.renewed_at_ms[:3] == [began + 10_000, began + 20_000, began + 30_000]
    # The second renewal, sent at 20 s, was the last to succeed.
    assert lease.deadline_ms == began + 20_000 + TTL_MS - margin_ms(TTL_MS)
    assert lease.deadline_ms <= clock.ms < lease.deadline_ms + 50
    assert not lease.live
    await lease.give_back()
    assert calls.returned == 0  # it lapsed, and has had its end


async def test_the_deadline_counts_from_before_the_request_was_sent() -> None:
    clock = VirtualClock()
    lease, calls = held(clock, lambda number: grant() if number == 1 else _raise(refusal()))
    calls.takes_ms = 5_000
    sent = clock.ms + 10_000
    await lease.keep()
    assert lease.deadline_ms == sent + TTL_MS - margin_ms(TTL_MS)


async def test_an_answer_that_comes_after_the_deadline_revives_nothing() -> None:
    clock = VirtualClock()
    lease, calls = held(clock, lambda number: grant())
    calls.takes_ms = TTL_MS
    deadline = lease.deadline_ms
    lost = await lease.keep()
    assert isinstance(lost, LeaseLost)
    assert lease.deadline_ms == deadline
    assert len(calls.renewed_at_ms) == 1


async def test_a_grant_shorter_than_asked_is_what_counts() -> None:
    clock = VirtualClock()
    calls = Calls(clock, lambda number: _raise(refusal()))
    lease = HeldLease(calls, VersionId("v"), grant(ttl_ms=3_000), clock.ms, clock=clock)
    assert lease.deadline_ms == clock.ms + 3_000 - 300
    await lease.keep()
    assert calls.renewed_at_ms[0] <= 1_000_000 + 1_000


async def test_a_worker_counts_only_with_the_publication_that_was_granted() -> None:
    clock = VirtualClock()
    other_b = Publication("s1", WorkerId("b"), "another manifest", "h:2", 1, 1)
    new = Publication("s1", WorkerId("c"), "dc", "h:3", 1, 1)
    answers = {1: grant(A, B), 2: grant(A, other_b, new), 3: grant(A)}
    seen = []
    lease, _ = held(clock, lambda number: answers.get(number) or _raise(refusal()))
    lease.on_renewed = lambda lease: seen.append(set(lease.confirmed))
    assert lease.confirmed == {"a", "b"}
    await lease.keep()
    assert seen == [{"a", "b"}, {"a"}, {"a"}]


async def test_a_control_plane_that_is_away_is_asked_again_until_the_end() -> None:
    clock = VirtualClock()

    def answer(number: int) -> Grant:
        if number < 4:
            raise Unavailable(
                grpc.StatusCode.UNAVAILABLE, "away", method="Renew", address="x", outcome_unknown=True
            )
        if number == 4:
            return grant()
        raise refusal()

    lease, calls = held(clock, answer)
    before = lease.deadline_ms
    await lease.keep()
    assert lease.deadline_ms > before
    assert calls.renewed_at_ms[3] < before


async def test_it_is_returned_once() -> None:
    clock = VirtualClock()
    lease, calls = held(clock, lambda number: grant())
    await lease.give_back()
    await lease.give_back()
    assert calls.returned == 1


def _raise(error: Exception) -> Grant:
    raise error
