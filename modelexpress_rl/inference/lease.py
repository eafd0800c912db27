"""The lease under which a generator reads: acquired, renewed, confirmed, returned exactly once.

The deadline is ours: measured by our monotonic clock from before the request was sent, less a margin,
so that we stop reading before the control plane can consider the lease lapsed. A renewal that is
refused does not end the lease at once: what was granted holds until its deadline.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import LeaseLost, TryAgainError
from modelexpress_rl.rpc import Backoff, ControlPlane, RpcError, Unimplemented
from statemachines import lease as machine
from statemachines.ids import LeaseId, VersionId, WorkerId
from statemachines.kernel import Refused

_log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.05, limit_s=1.0)
_RETURN_TIMEOUT_S = 5.0
MIN_MARGIN_MS = 50


def margin_ms(ttl_ms: int) -> int:
    """How much earlier than the control plane we consider a lease over: clocks drift, tasks wait."""
    return max(ttl_ms // 10, MIN_MARGIN_MS)


@dataclass(frozen=True, slots=True)
class Publication:
    """What the control plane says of one shard of a live worker."""

    slot_id: str
    worker_id: WorkerId
    manifest_digest: str
    endpoint: str
    tensor_count: int
    total_bytes: int

    @property
    def identity(self) -> tuple[str, str, str]:
        """Slot, worker, manifest: what a plan was made for."""
        return self.slot_id, self.worker_id, self.manifest_digest

    def __str__(self) -> str:
        return f"worker {self.worker_id!r} (slot {self.slot_id!r}, at {self.endpoint})"


@dataclass(frozen=True, slots=True)
class Grant:
    """An answer of the control plane: for how long from when it was asked, and who is live."""

    lease_id: LeaseId
    ttl_ms: int
    publications: tuple[Publication, ...]

    def confirmed(self, granted: Sequence[Publication]) -> frozenset[WorkerId]:
        """The workers of `granted` whose publications all stand unchanged at this answer."""
        standing = {publication.identity for publication in self.publications}
        lost = {publication.worker_id for publication in granted if publication.identity not in standing}
        return frozenset(publication.worker_id for publication in granted) - lost


class LeaseCalls:
    """The RPCs of a lease, by our service, or by that of 0.7 where the server lacks ours."""

    def __init__(self, control: ControlPlane, worker_id: WorkerId, ttl_ms: int) -> None:
        self.worker_id = worker_id
        self.ttl_ms = ttl_ms
        self._control = control
        self._modern = True

    async def acquire(self, version_id: VersionId, timeout_s: float | None = None) -> Grant:
        """Ask for the lease; a live one is renewed.

        Raises:
            RpcError: NotFound, FailedPrecondition where the version or this worker doesn't allow it.
        """
        if self._modern:
            request = v1.AcquireVersionLeaseRequest(
                version_id=version_id, worker_id=self.worker_id, ttl_ms=self.ttl_ms
            )
            try:
                return self._granted(await self._control.acquire_version_lease(request, timeout_s=timeout_s))
            except Unimplemented:
                self._modern = False
        return await self._register(version_id, timeout_s)

    async def renew(self, version_id: VersionId, lease_id: LeaseId, timeout_s: float) -> Grant:
        """Ask for more time. To be called only while the lease is live by our own clock: a server of
        0.7 would revive it.

        Raises:
            RpcError: it is refused, or the control plane can't be reached.
        """
        if not self._modern:
            return await self._register(version_id, timeout_s)
        request = v1.RenewVersionLeaseRequest(
            version_id=version_id, worker_id=self.worker_id, lease_id=lease_id, ttl_ms=self.ttl_ms
        )
        return self._granted(await self._control.renew_version_lease(request, timeout_s=timeout_s))

    async def give_back(self, version_id: VersionId, lease_id: LeaseId, clock: Clock) -> None:
        """Return the lease, trying again until it has lapsed in any case; failures are only logged."""
        until_ms = self._lapsed_ms(clock)
        request = refit.DeleteVersionLeaseRequest(
            version_id=version_id, lease_id=lease_id, worker_id=self.worker_id
        )
        failures = 0
        while True:
            left_s = min((until_ms - clock.now_ms()) / 1000, _RETURN_TIMEOUT_S)
            try:
                await self._control.delete_version_lease(request, timeout_s=max(left_s, 0.05))
                return
            except RpcError as error:
                failures += 1
                delay_s = _BACKOFF.delay_s(failures, _rng)
                if not isinstance(error, TryAgainError) or clock.now_ms() + delay_s * 1000 >= until_ms:
                    _log.info("lease %s is left to lapse: %s", lease_id, error)
                    return
            await clock.sleep(delay_s)

    async def give_back_unheard(self, version_id: VersionId, clock: Clock) -> None:
        """Return a lease that may have been granted although no answer came.

        It is asked for once more, which tells its name; a return without that might end a later one.
        """
        until_ms = self._lapsed_ms(clock)
        failures = 0
        while (left_ms := until_ms - clock.now_ms()) > 0:
            try:
                grant = await self.acquire(version_id, max(min(left_ms / 1000, _RETURN_TIMEOUT_S), 0.05))
            except TryAgainError as error:
                failures += 1
                _log.info("a lease on version %s that may be held: %s", version_id, error)
            except RpcError:
                return  # there is none
            else:
                await self.give_back(version_id, grant.lease_id, clock)
                return
            await clock.sleep(_BACKOFF.delay_s(failures, _rng))

    def _lapsed_ms(self, clock: Clock) -> int:
        """When a lease that was granted before now has lapsed, also by the control plane's clock."""
        return clock.now_ms() + self.ttl_ms + margin_ms(self.ttl_ms)

    async def _register(self, version_id: VersionId, timeout_s: float | None) -> Grant:
        request = refit.RegisterVersionLeaseRequest(
            version_id=version_id, worker_id=self.worker_id, ttl_seconds=max(self.ttl_ms // 1000, 1)
        )
        lease = (await self._control.register_version_lease(request, timeout_s=timeout_s)).lease
        # After the grant: who is listed now can't have counted itself free before we held the lease.
        listing = refit.ListWeightVersionShardsRequest(version_id=version_id)
        shards = (await self._control.list_weight_version_shards(listing, timeout_s=timeout_s)).shards
        return Grant(LeaseId(lease.lease_id), self.ttl_ms, _publications(shards))

    def _granted(self, answer: v1.VersionLeaseResponse) -> Grant:
        granted_ms = answer.lease.expires_at_unix_ms - answer.now_unix_ms
        return Grant(
            LeaseId(answer.lease.lease_id),
            max(min(granted_ms, self.ttl_ms), 0),
            _publications(answer.live_publications),
        )


def _publications(shards: Sequence[refit.WeightVersionShard]) -> tuple[Publication, ...]:
    return tuple(
        Publication(
            slot_id=shard.source_slot_id,
            worker_id=WorkerId(shard.worker_id),
            manifest_digest=shard.manifest_digest,
            endpoint=shard.manifest_endpoint,
            tensor_count=shard.tensor_count,
            total_bytes=shard.total_bytes,
        )
        for shard in shards
    )


class HeldLease:
    """One lease of one version, from its grant to its one end.

    `publications` are those of the grant, `confirmed` the workers live at the last renewal.
    """

    def __init__(
        self,
        calls: LeaseCalls,
        version_id: VersionId,
        grant: Grant,
        sent_ms: int,
        *,
        clock: Clock = MONOTONIC,
        on_renewed: Callable[[HeldLease], None] = lambda lease: None,
    ) -> None:
        self.version_id = version_id
        self.publications = grant.publications
        self.confirmed = grant.confirmed(grant.publications)
        self.on_renewed = on_renewed
        self._calls = calls
        self._clock = clock
        self._ttl_ms = grant.ttl_ms
        self._record = machine.LeaseRecord(grant.lease_id, calls.worker_id, _deadline_ms(sent_ms, grant))
        self._refusal: str | None = None

    @property
    def lease_id(self) -> LeaseId:
        """The wire's name for it."""
        return self._record.lease_id

    @property
    def deadline_ms(self) -> int:
        """Until when we may read, by our clock."""
        return self._record.deadline_ms

    @property
    def gone(self) -> frozenset[WorkerId]:
        """The publishers of the grant that were no longer live at the last renewal."""
        return frozenset(publication.worker_id for publication in self.publications) - self.confirmed

    @property
    def live(self) -> bool:
        """Whether we may read now."""
        return machine.live(self._record, self._clock.now_ms())

    async def keep(self) -> LeaseLost:
        """Renew at a third of the TTL for as long as that succeeds; return when the lease is over."""
        failures = 0
        delay_s = self._ttl_ms / 3000
        while True:
            await self._clock.sleep(min(delay_s, max(self.deadline_ms - self._clock.now_ms(), 0) / 1000))
            if not self.live:
                return self._lapse()
            if await self._renew():
                failures, delay_s = 0, self._ttl_ms / 3000
            else:
                failures += 1
                delay_s = _BACKOFF.delay_s(failures, _rng)

    async def give_back(self) -> None:
        """Return it; a second call, or one after it lapsed, does nothing."""
        decision = machine.decide(self._record, machine.Return(), self._clock.now_ms())
        self._record = decision.record
        if decision.effects and self._record.state is machine.LeaseState.RETURNED:
            await self._calls.give_back(self.version_id, self.lease_id, self._clock)

    async def _renew(self) -> bool:
        sent_ms = self._clock.now_ms()
        left_s = (self.deadline_ms - sent_ms) / 1000
        grant = None
        with anyio.move_on_after(left_s):
            try:
                grant = await self._calls.renew(
                    self.version_id, self.lease_id, max(min(left_s, self._ttl_ms / 3000), 0.05)
                )
            except RpcError as error:
                self._refusal = str(error)
                _log.warning("lease %s on version %s: not renewed: %s", self.lease_id, self.version_id, error)
        if grant is None:
            return False
        renewal = machine.Renew(_deadline_ms(sent_ms, grant))
        try:
            self._record = machine.decide(self._record, renewal, self._clock.now_ms()).record
        except Refused as refused:
            self._refusal = str(refused)
            return False
        self._refusal, self.confirmed = None, grant.confirmed(self.publications)
        self.on_renewed(self)
        return True

    def _lapse(self) -> LeaseLost:
        self._record = machine.decide(self._record, machine.Lapse(), self._clock.now_ms()).record
        return LeaseLost(
            f"lease {self.lease_id} on version {self.version_id} lapsed before the last read had completed"
            + (f"; it was not renewed: {self._refusal}" if self._refusal else "")
        )


def _deadline_ms(sent_ms: int, grant: Grant) -> int:
    return sent_ms + grant.ttl_ms - margin_ms(grant.ttl_ms)


_rng = random.Random()
