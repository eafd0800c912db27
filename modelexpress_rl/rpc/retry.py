"""Trying an idempotent call again, within one total deadline."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from modelexpress_rl.errors import TryAgainError
from modelexpress_rl.rpc.errors import DeadlineExceeded, RpcError, TlsError, rpc_error

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from `first_s` to `limit_s`, each shortened at random by up to half."""

    first_s: float = 0.05
    limit_s: float = 2.0

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """The wait after the given number of failures in a row (from 1)."""
        whole_s = min(self.limit_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return whole_s * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Retried(Generic[T]):
    """A value that was obtained, and what it took.

    `any_unknown` is True where an attempt before the last may have been applied without our knowing.
    """

    value: T
    attempts: int
    any_unknown: bool


DEFAULT_BACKOFF = Backoff()
_rng = random.Random()


def worth_trying_again(error: RpcError) -> bool:
    """Whether the moment was wrong, and not the call, nor a certificate."""
    return isinstance(error, TryAgainError) and not isinstance(error, TlsError)


async def retry(
    call: Callable[[float], Awaitable[T]],
    *,
    total_s: float,
    attempt_s: float | None = None,
    backoff: Backoff = DEFAULT_BACKOFF,
    should_retry: Callable[[RpcError], bool] = worth_trying_again,
    on_failure: Callable[[RpcError], None] | None = None,
    rng: random.Random = _rng,
    now: Callable[[], float] = anyio.current_time,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> Retried[T]:
    """Calls `call(timeout_s)` until it succeeds, fails for good, or `total_s` has passed.

    Each attempt gets what is left of the total, at most `attempt_s`. The client behind the call dials
    anew where its connection broke, so that a restarted server is reached again. Only for calls that
    may be applied twice. At least one attempt is made.

    Raises:
        RpcError: the last attempt's; its `outcome_unknown` is True where *any* attempt's was. Where that
            one was cut short, it says what an earlier one was answered.
    """
    deadline_s = now() + total_s
    any_unknown = False
    reason: RpcError | None = None
    attempts = 0
    while True:
        attempts += 1
        left_s = max(deadline_s - now(), 0.001)
        try:
            value = await call(left_s if attempt_s is None else min(left_s, attempt_s))
        except RpcError as error:
            any_unknown = error.outcome_unknown = any_unknown or error.outcome_unknown
            if on_failure is not None:
                on_failure(error)
            delay_s = backoff.delay_s(attempts, rng)
            if not should_retry(error) or now() + delay_s >= deadline_s:
                if reason is not None and isinstance(error, DeadlineExceeded):
                    raise _with_reason(error, reason) from error
                raise
            reason = reason if isinstance(error, DeadlineExceeded) else error
        else:
            return Retried(value, attempts, any_unknown)
        await sleep(delay_s)


def _with_reason(error: RpcError, reason: RpcError) -> RpcError:
    """A deadline that passed, with what the attempts before it had come to."""
    return rpc_error(
        error.code(),
        f"{error.details()}; before that {reason.code().name}: {reason.details()}",
        method=error.method,
        address=error.address,
        outcome_unknown=error.outcome_unknown,
    )
