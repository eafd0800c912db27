"""Taking a published shard back: how long it may still be read, as the control plane says.

Two ways. The version is released by its owner: then the shard is withdrawn once no lease is live. Or
nobody releases it: then the shard alone is retracted, and whoever could have been told of it is waited
for. Servers that lack our service know only the first.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncGenerator

import anyio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.clock import Clock
from modelexpress_rl.rpc import Backoff, ControlPlane, FailedPrecondition, NotFound, RpcError, Unimplemented
from modelexpress_rl.train.version_watch import Sight, Stage, poll, watch
from statemachines.publication_records import Drained, VersionLost

_log = logging.getLogger(__name__)
_BACKOFF = Backoff(first_s=0.05, limit_s=2.0)


class Drain:
    """Ends with `Drained`, or with `VersionLost` where the control plane has forgotten the version."""

    def __init__(
        self,
        control: ControlPlane,
        clock: Clock,
        *,
        version_id: str,
        slot_id: str,
        worker_id: str,
        created_ms: int | None,
        lease_bound_ms: int,
        margin_ms: int,
    ) -> None:
        self._control = control
        self._clock = clock
        self._version_id = version_id
        self._slot_id = slot_id
        self._worker_id = worker_id
        self._created_ms = created_ms
        self._lease_bound_ms = lease_bound_ms
        self._margin_ms = margin_ms
        self._rng = random.Random()

    async def run(self, grace_s: float) -> Drained | VersionLost:
        """Drain; a version that isn't released within `grace_s` has its shard retracted."""
        sight = await poll(self._control, self._version_id, created_ms=self._created_ms)
        if sight is None or sight.stage is Stage.OFFERED:
            sight = await self._released_within(grace_s)
        if sight is None:
            return await self._retracted()
        return self._lost() if sight.stage is Stage.GONE else await self._withdrawn()

    def _watch(self) -> AsyncGenerator[Sight, None]:
        return watch(self._control, self._version_id, self._clock, created_ms=self._created_ms)

    async def _released_within(self, grace_s: float) -> Sight | None:
        seen: Sight | None = None

        async def grace_ends() -> None:
            await self._clock.sleep(grace_s)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(grace_ends)
            seen = await self._released()
            group.cancel_scope.cancel()
        return seen

    async def _released(self) -> Sight:
        async with contextlib.aclosing(self._watch()) as sights:
            async for sight in sights:
                if sight.stage is not Stage.OFFERED:
                    return sight
        raise AssertionError("a watch does not end")

    async def _withdrawn(self) -> Drained | VersionLost:
        """Of a version that is being released: withdraw as soon as nobody reads."""
        async with contextlib.aclosing(self._watch()) as sights:
            async for sight in sights:
                if sight.stage is Stage.GONE:
                    return self._lost()
                if sight.stage is Stage.RETIRED:
                    return Drained()
                if sight.live_leases in (0, None) and (ended := await self._withdraw(sight)) is not None:
                    return ended
        raise AssertionError("a watch does not end")

    async def _withdraw(self, sight: Sight) -> Drained | VersionLost | None:
        request = refit.DeleteWeightVersionShardRequest(
            version_id=self._version_id, source_slot_id=self._slot_id, worker_id=self._worker_id
        )
        try:
            await self._control.delete_weight_version_shard(request)
        except NotFound:
            return await self._unfiled(sight)
        except RpcError as error:
            _log.debug("version %s: shard not withdrawn yet: %s", self._version_id, error)
            return None
        return Drained()

    async def _unfiled(self, sight: Sight) -> Drained | VersionLost | None:
        """The shard is not filed, which alone doesn't say that nobody reads it."""
        now = await poll(self._control, self._version_id, created_ms=self._created_ms)
        if now is None:
            return None
        if now.stage is Stage.GONE:
            return self._lost()
        if sight.unread:
            return Drained()
        # An older server: a reader that was told of the shard has a lease for this long at most.
        await self._sleep_until(self._clock.now_ms() + self._lease_bound_ms + self._margin_ms)
        return Drained()

    async def _retracted(self) -> Drained | VersionLost:
        request = v1.RetractShardRequest(
            version_id=self._version_id, source_slot_id=self._slot_id, worker_id=self._worker_id
        )
        failures = 0
        while True:
            try:
                answer = await self._control.retract_shard(request)
                break
            except NotFound:
                return self._lost()
            except Unimplemented:
                return await self._released_by_us()
            except FailedPrecondition:
                return await self._withdrawn()  # it is being released after all
            except RpcError as error:
                failures += 1
                _log.debug("version %s: shard not retracted yet: %s", self._version_id, error)
            await self._clock.sleep(_BACKOFF.delay_s(failures, self._rng))
        if answer.readers_gone_by_unix_ms == 0:
            return Drained()
        left_ms = max(0, answer.readers_gone_by_unix_ms - answer.now_unix_ms)
        return await self._unread_by(self._clock.now_ms() + left_ms + self._margin_ms)

    async def _unread_by(self, gone_ms: int) -> Drained | VersionLost:
        """Of a retracted shard: until its readers have gone, or nobody holds any lease."""
        ended: list[Drained | VersionLost] = []

        async def time_passes() -> None:
            await self._sleep_until(gone_ms)
            ended.append(Drained())
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(time_passes)
            async with contextlib.aclosing(self._watch()) as sights:
                async for sight in sights:
                    # A version that was forgotten says nothing of its readers: the time bound does.
                    if sight.stage is Stage.RETIRED or (sight.stage is not Stage.GONE and sight.unread):
                        ended.append(Drained())
                        group.cancel_scope.cancel()
                        break
        return ended[0]

    async def _released_by_us(self) -> Drained | VersionLost:
        """Without our service a publisher can only release the whole version."""
        failures = 0
        while True:
            try:
                await self._control.delete_weight_version(
                    refit.DeleteWeightVersionRequest(uid=self._version_id)
                )
                return await self._withdrawn()
            except NotFound:
                return self._lost()
            except RpcError as error:
                failures += 1
                _log.debug("version %s: not released yet: %s", self._version_id, error)
            await self._clock.sleep(_BACKOFF.delay_s(failures, self._rng))

    async def _sleep_until(self, at_ms: int) -> None:
        while (left_ms := at_ms - self._clock.now_ms()) > 0:
            await self._clock.sleep(left_ms / 1000)

    def _lost(self) -> VersionLost:
        return VersionLost(self._clock.now_ms() + self._lease_bound_ms + self._margin_ms)
