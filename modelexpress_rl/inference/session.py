"""What a generator rank has with the control plane: its registration, leases, and what it serves."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.background import Background
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import DeadlineExceeded, StateError, TryAgainError
from modelexpress_rl.inference.lease import HeldLease, LeaseCalls
from modelexpress_rl.inference.readiness import wait_until_ready
from modelexpress_rl.rpc import (
    Backoff,
    ControlPlane,
    FailedPrecondition,
    NotFound,
    RpcError,
    Unimplemented,
)
from modelexpress_rl.rpc.registration import Reachable, Registration, RegistrationEvent
from statemachines.ids import ModelName, VersionId, WorkerId

_log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.05, limit_s=2.0)
_REFUSALS_WHILE_READY = 3
_GOODBYE_S = 2.0


class GeneratorSession:
    """One rank's registration and everything that is asked under it."""

    def __init__(
        self,
        control: ControlPlane,
        background: Background,
        *,
        worker_id: WorkerId,
        model_name: ModelName,
        registration_ttl_s: int,
        lease_ttl_s: int,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._control = control
        self._background = background
        self._clock = clock
        self._calls = LeaseCalls(control, worker_id, lease_ttl_s * 1000)
        self._registration = Registration(
            control,
            worker_id=worker_id,
            role=refit.WORKER_ROLE_GENERATOR,
            model_name=model_name,
            ttl_s=registration_ttl_s,
            on_change=self._on_registration,
            clock=clock,
        )
        self._reporter = ServingReporter(control, worker_id, clock)
        self._returning: Counter[VersionId] = Counter()
        self._returned = anyio.Event()

    async def open(self) -> None:
        """Register, and keep registered in the background.

        Raises:
            RpcError: the control plane refuses, or can't be reached within the RPC timeout.
        """
        await self._registration.register()
        self._background.spawn(self._registration.run, name="registration")
        self._background.spawn(self._reporter.run, name="serving report")

    async def acquire(self, version_id: VersionId, deadline: float) -> HeldLease:
        """Wait until the version is READY, and take the lease on it.

        An earlier lease on it that is on its way back has arrived before: the control plane has one lease
        for a worker and a version, and the return would end this one. A lease that may have been granted
        although no answer came goes back, however this ends without it.

        Raises:
            VersionGone, DeadlineExceeded: see `wait_until_ready`.
            RpcError: the lease is refused although the version is READY.
        """
        unheard: list[BaseException] = []
        try:
            return await self._acquire(version_id, deadline, unheard)
        except BaseException:
            if unheard:
                self._forget_lease(version_id)
            raise

    async def _acquire(
        self, version_id: VersionId, deadline: float, unheard: list[BaseException]
    ) -> HeldLease:
        refusals = failures = 0
        while True:
            await self._until_returned(version_id, deadline)
            try:
                return await self._acquire_once(version_id, deadline, unheard)
            except (NotFound, FailedPrecondition) as error:
                await wait_until_ready(self._control, version_id, deadline)
                refusals += 1
                if refusals > _REFUSALS_WHILE_READY:
                    raise
                _log.info("version %s is READY, the lease was refused: %s", version_id, error)
                if refusals > 1:
                    # A control plane that came back empty knows the version (created anew), not us.
                    await self._registration.register()
            except RpcError as error:
                if error.outcome_unknown:
                    unheard.append(error)
                failures += 1
                delay_s = _BACKOFF.delay_s(failures, _rng)
                if not isinstance(error, TryAgainError) or anyio.current_time() + delay_s >= deadline:
                    raise
                await self._clock.sleep(delay_s)

    def give_back(self, lease: HeldLease) -> None:
        """Return a lease in the background; at once, and only once."""
        self._spawn_return(lease.version_id, lease.give_back)

    def report_serving(self, version_id: VersionId | None, *, uncertain: bool) -> None:
        """Tell the control plane in the background; the newest report wins."""
        self._reporter.set(version_id, uncertain)

    async def aclose(self) -> None:
        """Let leases on their way go back, and say good-bye; bounded."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE_S):
            while self._returning:
                await self._returned.wait()
            await self._registration.leave()

    async def _until_returned(self, version_id: VersionId, deadline: float) -> None:
        with anyio.move_on_at(deadline):
            while version_id in self._returning:
                await self._returned.wait()

    async def _acquire_once(
        self, version_id: VersionId, deadline: float, unheard: list[BaseException]
    ) -> HeldLease:
        left_s = deadline - anyio.current_time()
        if left_s <= 0:
            raise DeadlineExceeded(f"version {version_id}: no lease in time")
        sent_ms = self._clock.now_ms()
        try:
            grant = await self._calls.acquire(version_id, min(left_s, self._control.rpc_timeout_s))
        except anyio.get_cancelled_exc_class() as cancelled:
            unheard.append(cancelled)
            raise
        return HeldLease(self._calls, version_id, grant, sent_ms, clock=self._clock)

    def _forget_lease(self, version_id: VersionId) -> None:
        """Return a lease that may have been granted although no answer came."""

        async def give_back() -> None:
            await self._calls.give_back_unheard(version_id, self._clock)

        self._spawn_return(version_id, give_back)

    def _spawn_return(self, version_id: VersionId, give_back: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await give_back()
            finally:
                self._ended(version_id)

        self._returning[version_id] += 1
        try:
            self._background.spawn(run, name="lease return")
        except StateError as error:
            self._ended(version_id)
            _log.warning("a lease is left to lapse: %s", error)

    def _ended(self, version_id: VersionId) -> None:
        self._returning[version_id] -= 1
        if not self._returning[version_id]:
            del self._returning[version_id]
        self._returned.set()
        self._returned = anyio.Event()

    def _on_registration(self, event: RegistrationEvent) -> None:
        if isinstance(event, Reachable):
            self._reporter.again()


class ServingReporter:
    """Tells the control plane what is served, whenever it changes and after each separation."""

    def __init__(self, control: ControlPlane, worker_id: WorkerId, clock: Clock) -> None:
        self._control = control
        self._worker_id = worker_id
        self._clock = clock
        self._wanted: tuple[VersionId | None, bool] | None = None
        self._due = anyio.Event()

    def set(self, version_id: VersionId | None, uncertain: bool) -> None:
        """Report this next."""
        self._wanted = (version_id, uncertain)
        self._due.set()

    def again(self) -> None:
        """Report the same once more: the control plane may have forgotten it."""
        if self._wanted is not None:
            self._due.set()

    async def run(self) -> None:
        """Report, for ever, or until the server turns out not to take reports."""
        failures = 0
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            assert self._wanted is not None
            try:
                await self._control.report_serving(self._request(*self._wanted))
                failures = 0
            except Unimplemented:
                return
            except RpcError as error:
                failures += 1
                _log.info("not reported what is served: %s", error)
                if isinstance(error, TryAgainError):
                    await self._clock.sleep(_BACKOFF.delay_s(failures, _rng))
                    self._due.set()

    def _request(self, version_id: VersionId | None, uncertain: bool) -> v1.ReportServingRequest:
        request = v1.ReportServingRequest(worker_id=self._worker_id, uncertain=uncertain)
        if version_id is not None:
            request.version_id = version_id
        return request


_rng = random.Random()
