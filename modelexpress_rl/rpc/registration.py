"""A worker's registration: made, renewed, and what may be relied on while the control plane is away.

Time is this process's monotonic clock. Two moments matter, and they differ:

* *we* may rely on a registration from the moment at which the renewal that succeeded was **sent**;
* *others* may rely on it (a reader may be told that we are live) until a TTL after the last moment at
  which a renewal may have been **applied**: the reply's arrival, or the failure of an attempt whose
  outcome is unknown. `readers_gone_ms` counts from there.

So that this second moment can't move for ever while replies are lost, renewals stop once `Unreachable`
is told. From then on the control plane is only asked a question that changes nothing; when it answers,
`Answering` is told first (the bounds given until then no longer hold), and only then is the
registration tried again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import anyio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import TryAgainError, UsageError
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.rpc.errors import RpcError, Unimplemented
from modelexpress_rl.rpc.retry import Backoff, worth_trying_again
from statemachines.publication import readers_gone_by_ms

_log = logging.getLogger(__name__)

MARGIN_MS = 1000
_BACKOFF = Backoff(first_s=0.1, limit_s=2.0)
_LEAVE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Renewals have failed for a third of the TTL; none is tried until the control plane answers."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The life that was registered is over: its TTL ran out, or the store is another one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Answering:
    """The control plane answers again and is asked to register us next: earlier bounds are void."""


@dataclass(frozen=True, slots=True)
class Reachable:
    """Registered again, after `Unreachable` or `Lost`."""


RegistrationEvent: TypeAlias = Unreachable | Lost | Answering | Reachable


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the control plane says of itself; all None where it lacks our service."""

    store_id: str | None = None
    max_lease_ttl_ms: int | None = None
    default_drain_deadline_ms: int | None = None


class Registration:
    """Keeps one worker registered. `on_change` is called in the event loop and must not block.

    `register` once, then `run` in the background. A separation begins with `Unreachable` or `Lost` (or
    both) and ends with `Reachable`; `Answering` may come before that, and then `Unreachable` again.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        worker_id: str,
        role: refit.WorkerRole.ValueType,
        model_name: str,
        ttl_s: int,
        on_change: Callable[[RegistrationEvent], None] = lambda event: None,
        clock: Clock = MONOTONIC,
        rng: random.Random | None = None,
        margin_ms: int = MARGIN_MS,
    ) -> None:
        if ttl_s < 1:
            raise UsageError(
                f"registration_ttl_seconds: expected a whole number of at least 1, got {ttl_s!r}"
            )
        self.worker_id = worker_id
        self.model_name = model_name
        self.ttl_ms = ttl_s * 1000
        self.on_change = on_change
        self._control = control
        self._role = role
        self._clock = clock
        self._rng = rng or random.Random()
        self._margin_ms = margin_ms
        self._facts = ServerFacts()
        self._granted_ms: int | None = None
        self._may_be_applied_ms: int | None = None
        self._separated = False
        self._away_told = False
        self._lost_told = False
        self._back = anyio.Event()
        self._wake = anyio.Event()

    @property
    def server(self) -> ServerFacts:
        """What the control plane last said of itself."""
        return self._facts

    @property
    def live(self) -> bool:
        """Whether we are certainly registered, by our own clock."""
        if self._separated or self._granted_ms is None:
            return False
        return self._clock.now_ms() < self._granted_ms + self.ttl_ms

    @property
    def separated(self) -> bool:
        """Whether `Unreachable` or `Lost` was told and `Reachable` not yet."""
        return self._separated

    @property
    def cut_off(self) -> bool:
        """Whether nobody is being asked at present: from `Unreachable` or `Lost` to the next answer."""
        return self._away_told or self._lost_told

    def readers_gone_ms(self, lease_ttl_ms: int) -> int:
        """When, by `clock`, no reader can be left that was told that we are live.

        That is a registration TTL, a lease TTL and a margin after the last moment at which a renewal
        may have been applied. It holds until `Answering` or a later renewal.
        """
        last_ms = self._clock.now_ms() if self._may_be_applied_ms is None else self._may_be_applied_ms
        return readers_gone_by_ms(last_ms, self.ttl_ms, lease_ttl_ms, self._margin_ms)

    def readers_gone_if_renewed_ms(self, lease_ttl_ms: int) -> int:
        """The same, should the attempts that follow `Answering` be applied without our hearing of it."""
        last_ms = self._clock.now_ms() + self.ttl_ms // 3
        return readers_gone_by_ms(last_ms, self.ttl_ms, lease_ttl_ms, self._margin_ms)

    async def register(self, *, total_s: float | None = None) -> None:
        """Register for the first time, trying again until `total_s` (the RPC timeout) has passed.

        Raises:
            RpcError: the last attempt's; a refusal at once.
        """
        total_s = self._control.rpc_timeout_s if total_s is None else total_s
        end_ms = self._clock.now_ms() + int(total_s * 1000)
        failures = 0
        while True:
            left_s = max((end_ms - self._clock.now_ms()) / 1000, 0.001)
            try:
                await self._renew_once(left_s)
                return
            except RpcError as error:
                failures += 1
                delay_s = _BACKOFF.delay_s(failures, self._rng)
                if not worth_trying_again(error) or self._clock.now_ms() + delay_s * 1000 >= end_ms:
                    raise
            await self._clock.sleep(delay_s)

    async def run(self) -> None:
        """Renew at a third of the TTL, for ever; survives a control plane that goes away."""
        while True:
            third_ms = self.ttl_ms / 3
            await self._sleep_unless_woken(third_ms * self._rng.uniform(0.9, 1.0) / 1000)
            while not await self._renew_within(third_ms):
                self._tell_away()
                await self._await_answer()
                self._away_told = self._lost_told = False
                self.on_change(Answering())

    async def wait_registered(self) -> None:
        """Wait until we are registered; returns at once where no separation was told."""
        while self._separated:
            await self._back.wait()

    def forgotten(self, reason: str) -> None:
        """An answer showed that the control plane doesn't know us: `run` registers anew at once."""
        self._tell_lost(reason)
        self._wake.set()

    async def leave(self) -> None:
        """Say good-bye, so that what we published counts no more at once; failures are only logged."""
        request = v1.UnregisterWorkerRequest(worker_id=self.worker_id)
        with anyio.CancelScope(shield=True):
            try:
                await self._control.unregister_worker(request, timeout_s=_LEAVE_TIMEOUT_S)
            except Unimplemented:
                pass  # an older server: the registration lapses by itself
            except RpcError as error:
                _log.info("worker %s: no good-bye: %s", self.worker_id, error)

    async def _sleep_unless_woken(self, delay_s: float) -> None:
        async def sleep() -> None:
            await self._clock.sleep(delay_s)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(sleep)
            await self._wake.wait()
            group.cancel_scope.cancel()
        self._wake = anyio.Event()

    async def _renew_within(self, span_ms: float) -> bool:
        """Try to renew for `span_ms`; whether it succeeded."""
        end_ms = self._clock.now_ms() + span_ms
        failures = 0
        while True:
            left_ms = end_ms - self._clock.now_ms()
            try:
                await self._renew_once(max(min(left_ms / 1000, self._control.rpc_timeout_s), 0.05))
                return True
            except RpcError as error:
                failures += 1
                _log.warning("worker %s: registration not renewed: %s", self.worker_id, error)
            delay_s = _BACKOFF.delay_s(failures, self._rng)
            if self._clock.now_ms() + delay_s * 1000 >= end_ms:
                return False
            await self._clock.sleep(delay_s)

    async def _renew_once(self, timeout_s: float) -> None:
        worker = refit.WorkerRegistration(
            worker_id=self.worker_id, role=self._role, model_name=self.model_name
        )
        request = refit.RegisterWorkerRequest(worker=worker, ttl_seconds=self.ttl_ms // 1000)
        sent_ms = self._clock.now_ms()
        try:
            await self._control.register_worker(request, timeout_s=timeout_s)
        except RpcError as error:
            if error.outcome_unknown:
                self._may_be_applied_ms = self._clock.now_ms()
            raise
        except BaseException:  # cancelled under way
            self._may_be_applied_ms = self._clock.now_ms()
            raise
        previous_ms, self._granted_ms = self._granted_ms, sent_ms
        self._may_be_applied_ms = self._clock.now_ms()
        facts = await self._ask_facts(timeout_s)
        if facts is not None:
            known, self._facts = self._facts, facts
            if known.store_id is not None and facts.store_id != known.store_id:
                self._tell_lost(f"the control plane's store is another one: {facts.store_id}")
        if previous_ms is not None and sent_ms >= previous_ms + self.ttl_ms:
            self._tell_lost("it had lapsed before it could be renewed")
        self._tell_back()

    async def _ask_facts(self, timeout_s: float) -> ServerFacts | None:
        try:
            info = await self._control.get_server_info(v1.GetServerInfoRequest(), timeout_s=timeout_s)
        except Unimplemented:
            return ServerFacts()
        except RpcError:
            return None  # the registration itself stands
        return ServerFacts(
            store_id=info.store_id or None,
            max_lease_ttl_ms=info.max_lease_ttl_seconds * 1000 or None,
            default_drain_deadline_ms=info.default_drain_deadline_ms or None,
        )

    async def _await_answer(self) -> None:
        """Ask what changes nothing, until anything is answered; tell `Lost` when the TTL runs out."""
        failures = 0
        while True:
            if self._granted_ms is not None and self._clock.now_ms() >= self._granted_ms + self.ttl_ms:
                self._tell_lost("it lapsed while the control plane did not answer")
            timeout_s = min(self._control.rpc_timeout_s, max(self.ttl_ms / 3000, 0.05))
            try:
                await self._control.get_server_info(v1.GetServerInfoRequest(), timeout_s=timeout_s)
                return
            except Unimplemented:
                return
            except RpcError as error:
                if not isinstance(error, TryAgainError):
                    return  # whatever it is, it was answered
                failures += 1
            await self._clock.sleep(_BACKOFF.delay_s(failures, self._rng))

    def _tell_away(self) -> None:
        if not self._away_told:
            self._away_told = True
            self._separate()
            self.on_change(Unreachable())

    def _tell_lost(self, reason: str) -> None:
        if not self._lost_told:
            self._lost_told = True
            self._separate()
            _log.warning("worker %s: registration lost: %s", self.worker_id, reason)
            self.on_change(Lost(reason))

    def _separate(self) -> None:
        self._separated = True
        if self._back.is_set():
            self._back = anyio.Event()

    def _tell_back(self) -> None:
        self._away_told = self._lost_told = False
        if self._separated:
            self._separated = False
            self._back.set()
            self.on_change(Reachable())
