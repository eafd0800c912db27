"""The driver of one publication: it feeds the machine, and performs what the machine decides.

Decisions are pure (`statemachines.publication`); here is only I/O. Each long effect is a task that is
started at most once, and cancelled when its state is left. An announcement that is under way is never
cut off: it ends within the RPC timeout, and what drains waits for it, so that none can land after the
buffer was given back.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel

from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import StateError, Unavailable
from modelexpress_rl.rpc import Backoff, RpcError
from modelexpress_rl.train.adapter import StagedWeightVersionShardData, let_go, want_back
from modelexpress_rl.train.announcing import (
    Answer,
    Filed,
    NoVersion,
    Rejected,
    Unheard,
    Unregistered,
    announce,
)
from modelexpress_rl.train.draining import Drain
from modelexpress_rl.train.fences import Fence, complete_after
from modelexpress_rl.train.manifest_service import ServedShard
from modelexpress_rl.train.publication_ports import PublicationPorts
from modelexpress_rl.train.version_watch import Sight, Stage, watch
from statemachines import publication as machine
from statemachines import publication_records as records
from statemachines.ids import SlotId, VersionId
from statemachines.kernel import Refused
from statemachines.publication_records import PublicationState as State

_log = logging.getLogger(__name__)
_BACKOFF = Backoff(first_s=0.05, limit_s=2.0)
_MAX_UNREGISTERED = 3
_UNWANTED = "it was released while it was being captured"
_ENDED = (State.REUSABLE, State.FAILED)


class Publication:
    """One version in one slot: its record, its fences, its buffers and its background effects."""

    skipped = False

    def __init__(
        self,
        ports: PublicationPorts,
        version_id: str,
        slot_id: str,
        *,
        on_end: Callable[[Publication], None] = lambda publication: None,
    ) -> None:
        self.version_id = version_id
        self.slot_id = slot_id
        self.record = records.begin(VersionId(version_id), SlotId(slot_id))
        self.publish_ready = Fence(f"publish_ready of {self}")
        self.published = Fence(f"published of {self}")
        self.source_reuse_ready = Fence(f"source_reuse_ready of {self}")
        self.lends_weights = False
        self.data: StagedWeightVersionShardData | None = None
        self.refusal: RpcError | None = None
        self._ports = ports
        self._on_end = on_end
        self._tasks: dict[str, anyio.CancelScope] = {}
        self._changed = anyio.Event()
        self._attempts = 0
        self._attempt_ended = anyio.Event()
        self._ever_announced = False
        self._unregistered = 0
        self._created_ms: int | None = None
        self._lost_bound_ms: int | None = None
        self._closing = False
        self._unwanted = False
        self._given_up = False
        self._rng = random.Random()

    def __str__(self) -> str:
        return f"version {self.version_id} in slot {self.slot_id}"

    @property
    def state(self) -> State:
        """Where the publication stands."""
        return self.record.state

    @property
    def ended(self) -> bool:
        """Whether it is REUSABLE or FAILED."""
        return self.state in _ENDED

    @property
    def weights_free(self) -> Fence:
        """See `StagedShard`."""
        return self.source_reuse_ready if self.lends_weights else self.publish_ready

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """A part of the capture: a release or a close cancels it, a failure breaks the fences."""
        if self._unwanted:
            self._capture_failed(_UNWANTED)
            raise StateError(f"{self}: {_UNWANTED}")
        scope = self._tasks["capture"] = anyio.CancelScope()
        try:
            with scope:
                yield
        except BaseException as error:
            self._capture_failed(f"the capture failed: {error!r}")
            raise
        finally:
            self._tasks.pop("capture", None)
        if scope.cancelled_caught:
            self._capture_failed(_UNWANTED)
            raise StateError(f"{self}: {_UNWANTED}")

    def captured(self, data: StagedWeightVersionShardData) -> None:
        """The bytes are in place; called at the end of `capturing`.

        Raises:
            StateError: it was released or closed meanwhile.
        """
        if "capture" not in self._tasks:
            self._capture_failed(_UNWANTED)
            raise StateError(f"{self}: {_UNWANTED}")
        self.data = data
        self.handle(records.Captured())

    async def publish(self) -> None:
        """Announce it once it is captured, and return when that is confirmed; again is harmless.

        Raises:
            FenceBroken: the capture failed.
            RpcError: it was refused; the buffers are free again.
            Unavailable: no answer within the RPC timeout; it counts as announced, and the announcement
                goes on in the background. Or the control plane has been away for so long that it was
                never announced: the buffers are free again.
            StateError: it was released before it was published.
        """
        if self._is_confirmed():
            return
        if self.state is State.CAPTURING:
            await self.publish_ready.wait()
        if self.state in (State.STAGED, State.PUBLISHED):
            self.handle(records.Publish())
            self._tell_if_cut_off()
        with anyio.move_on_after(self._ports.rpc_timeout_s):
            while not self._settled():
                await self._changed.wait()
        if self._is_confirmed():
            return
        if self.refusal is not None:
            raise self.refusal
        if self.state in (State.PUBLISHED, State.ORPHANED) or self._is_announcing():
            if self._is_announcing():
                self.handle(records.AnnounceUnknown())
            raise Unavailable(
                f"{self}: the control plane at {self._ports.control.address} did not confirm the "
                f"announcement within {self._ports.rpc_timeout_s:g} s; it counts as announced and goes on "
                "in the background"
            )
        if self._given_up:
            raise Unavailable(
                f"{self}: the control plane at {self._ports.control.address} has been away for so long that "
                "no reader is left, and nothing was announced: its buffers are free, stage it again"
            )
        raise StateError(f"{self} is {self.state.value}: it can't be published any more")

    def release(self) -> None:
        """The owner wants the buffers back; again is harmless."""
        if self.state is State.CAPTURING:
            self._unwanted = True
            self._cancel("capture")
        else:
            self.handle(records.Release())

    def close(self) -> None:
        """The process is going away: release without grace."""
        self._closing = self._unwanted = True
        self._cancel("capture")
        if self.state is State.DRAINING:
            self._cancel("drain")  # begin again, without the grace
            self._start("drain", self._drain)
        self.handle(records.Close())

    async def wait_ended(self) -> None:
        """Until it is REUSABLE or FAILED."""
        while not self.ended:
            await self._changed.wait()

    def registered_again(self) -> None:
        """The registration is back: see whether the version is still the record that it was."""
        if self.state is State.ORPHANED:
            self._start("return", self._return)

    def crashed(self, reason: str) -> None:
        """Nothing drives this publication any more: no fence may stay open."""
        self._break(reason)
        self._ports.service.stop(self.version_id, self.slot_id)

    def handle(self, event: records.Event) -> None:
        """Feed an event, perform what is decided, and stop what its state no longer wants.

        Raises:
            StateError: the event is illegal in this state, which stays as it is.
        """
        before = self.state
        try:
            decision = machine.decide(self.record, event, self._ports.clock.now_ms())
        except Refused as refused:
            raise StateError(refused.message) from refused
        self.record = decision.record
        for effect in decision.effects:
            self._perform(effect)
        self._reconcile()
        self._changed.set()
        self._changed = anyio.Event()
        if self.state is not before:
            self._entered(self.state)

    def _entered(self, state: State) -> None:
        _log.debug("%s: %s", self, state.value)
        if state is State.DRAINING and self.data is not None:
            want_back(self.data)
        if state in (State.PUBLISHED, State.DRAINING):
            self._tell_if_cut_off()
        elif state in _ENDED:
            self.published.break_(f"it is {state.value}, and was never confirmed")
            self._let_go()
            self._on_end(self)

    def _perform(self, effect: records.Effect) -> None:
        match effect:
            case records.SignalPublishReady():
                self.publish_ready.complete()
            case records.ServeManifest():
                assert self.data is not None
                served = ServedShard(self.data.manifest, self.data.digests)
                self._ports.service.serve(self.version_id, self.slot_id, served)
            case records.AnnounceShard():
                self._start("announce", self._announce)
            case records.WatchDrain():
                self._start("drain", self._drain)
            case records.ArmBound(at_ms):
                self._cancel("bound")  # each orphaning has its own timer: a stale one never fires
                self._start("bound", lambda say: self._ring(say, at_ms))
            case records.StopServing():
                self._ports.service.stop(self.version_id, self.slot_id)
            case records.SignalReuse():
                self._signal_reuse()
            case records.BreakFences(reason):
                self._break(reason)

    def _reconcile(self) -> None:
        phase = self.record.phase
        wanted: set[str] = set()
        if isinstance(phase, records.Staged) and phase.announcing:
            wanted |= {"announce"}
        elif isinstance(phase, records.Published):
            wanted |= {"watch"} if phase.confirmed else {"watch", "announce"}
        elif isinstance(phase, records.Draining):
            wanted |= {"drain"}
        elif isinstance(phase, records.Orphaned):
            wanted |= {"bound"}
            wanted |= {"return"} & self._tasks.keys()
            if self._lost_bound_ms is not None and not phase.released:
                wanted |= {"recreation"}
        for kind in self._tasks.keys() - wanted - {"capture"}:
            self._cancel(kind)
        if "watch" in wanted:
            self._start("watch", self._watch)
        if "recreation" in wanted:
            self._start("recreation", self._await_recreation)

    # Long effects. Each gets `say`, which is deaf once the task has been cancelled.

    async def _announce(self, say: Say) -> None:
        failures = 0
        while True:
            await self._ports.registration.wait_registered()
            await anyio.lowlevel.checkpoint()  # nothing is announced once the task is cancelled
            answer = await self._attempt()
            match answer:
                case Filed(created_ms):
                    self._confirm(say, created_ms)
                    return
                case NoVersion(error) if self._ever_announced:
                    self._version_lost(say)
                    return
                case NoVersion(error) | Rejected(error):
                    self._refused(say, error)
                    return
                case Unregistered(error):
                    self._unregistered += 1
                    if self._unregistered > _MAX_UNREGISTERED:
                        self._refused(say, error)
                        return
                    reason = f"an announcement was refused: {error.details()}"
                    self._ports.registration.forgotten(reason)
                case Unheard(error, may_be_filed):
                    if may_be_filed:
                        self._ever_announced = True
                        self._lost_bound_ms = None
                        say(records.AnnounceUnknown())
                    failures += 1
                    _log.info("%s: announcement not confirmed: %s", self, error)
                    await self._ports.clock.sleep(_BACKOFF.delay_s(failures, self._rng))

    async def _attempt(self) -> Answer:
        assert self.data is not None
        shard = refit.WeightVersionShard(
            version_id=self.version_id,
            source_slot_id=self.slot_id,
            worker_id=self._ports.registration.worker_id,
            tensor_count=self.data.manifest.tensor_count,
            total_bytes=self.data.manifest.total_bytes,
            manifest_digest=self.data.manifest.digest,
            manifest_endpoint=self._ports.service.endpoint,
        )
        self._attempts += 1
        try:
            with anyio.CancelScope(shield=True):
                answer = await announce(self._ports.control, shard, self._ports.rpc_timeout_s)
        finally:
            self._attempts -= 1
            self._attempt_ended.set()
            self._attempt_ended = anyio.Event()
        self._ever_announced |= isinstance(answer, Filed)
        return answer

    def _confirm(self, say: Say, created_ms: int) -> None:
        known_ms, self._created_ms = self._created_ms, created_ms
        if known_ms not in (None, created_ms):
            # Another record under the same id: the readers of the first are not in it.
            self._version_lost(say)
            self._lost_bound_ms = None
            self.handle(records.Reachable())
            return
        self._lost_bound_ms = None
        self._unregistered = 0
        self.published.complete()
        say(records.Announced())

    def _refused(self, say: Say, error: RpcError) -> None:
        self.refusal = error
        _log.warning("%s: the announcement was refused: %s", self, error)
        self.published.break_(f"the control plane refused it: {error}")
        say(records.AnnounceRefused())

    async def _watch(self, say: Say) -> None:
        async with contextlib.aclosing(self._sights()) as sights:
            async for sight in sights:
                if sight.stage is Stage.GONE or self._created_ms not in (None, sight.created_ms):
                    # An announcement that is under way finds that out for itself.
                    if not self._attempts:
                        self._version_lost(say)
                        return
                    continue
                self._created_ms = self._created_ms or sight.created_ms
                if sight.stage is not Stage.OFFERED:
                    say(records.VersionReleased())
                    return
                if self.slot_id in sight.missing_slots and self._ports.registration.live:
                    say(records.AnnounceUnknown())  # filed once, and no more: file it again

    async def _drain(self, say: Say) -> None:
        while self._attempts:
            await self._attempt_ended.wait()
        drain = Drain(
            self._ports.control,
            self._ports.clock,
            version_id=self.version_id,
            slot_id=self.slot_id,
            worker_id=self._ports.registration.worker_id,
            created_ms=self._created_ms,
            lease_bound_ms=self._ports.lease_bound_ms,
            margin_ms=self._ports.margin_ms,
        )
        ended = await drain.run(0.0 if self._closing else self._ports.release_grace_s)
        if isinstance(ended, records.VersionLost):
            self._version_lost(say)
        else:
            say(ended)

    async def _await_recreation(self, say: Say) -> None:
        async with contextlib.aclosing(self._sights()) as sights:
            async for sight in sights:
                if sight.stage is Stage.OFFERED:
                    self._created_ms = sight.created_ms
                    await self._ports.registration.wait_registered()
                    say(records.Reachable())
                    return

    async def _return(self, say: Say) -> None:
        async with contextlib.aclosing(self._sights()) as sights:
            async for sight in sights:
                if sight.stage is Stage.GONE:
                    self._version_lost(say)
                    return
                if self._created_ms not in (None, sight.created_ms):
                    self._version_lost(say)
                    self._lost_bound_ms = None
                self._created_ms = sight.created_ms
                say(records.Reachable())
                return

    def _sights(self) -> AsyncGenerator[Sight, None]:
        return watch(self._ports.control, self.version_id, self._ports.clock)

    async def _ring(self, say: Say, at_ms: int) -> None:
        while (left_ms := at_ms - self._ports.clock.now_ms()) > 0:
            await self._ports.clock.sleep(left_ms / 1000)
        registration, phase = self._ports.registration, self.record.phase
        gone_ms = registration.readers_gone_ms(self._ports.lease_bound_ms)
        if not registration.cut_off and gone_ms > at_ms and not getattr(phase, "forgotten", False):
            # We are registered again, and have not seen the version yet: readers may be sent here still.
            say(records.ServerUnreachable(gone_ms))
            return
        self._given_up = not self._ever_announced
        say(records.BoundPassed())

    def _tell_if_cut_off(self) -> None:
        registration = self._ports.registration
        if registration.cut_off:
            self.handle(records.ServerUnreachable(registration.readers_gone_ms(self._ports.lease_bound_ms)))

    def _version_lost(self, say: Say) -> None:
        if self._lost_bound_ms is None:
            now_ms = self._ports.clock.now_ms()
            self._lost_bound_ms = now_ms + self._ports.lease_bound_ms + self._ports.margin_ms
        say(records.VersionLost(self._lost_bound_ms))

    def _signal_reuse(self) -> None:
        engine_fence = None if self.data is None else self.data.source_reuse_ready
        if engine_fence is None:
            self.source_reuse_ready.complete()
            return
        what = f"the engine's own source_reuse_ready of {self}"
        timeout_s = self._ports.engine_fence_timeout_s
        self._ports.background.spawn(complete_after, self.source_reuse_ready, engine_fence, timeout_s, what)

    def _let_go(self) -> None:
        data, self.data = self.data, None
        if data is not None:
            self.source_reuse_ready.on_end(lambda: let_go(data))

    def _break(self, reason: str) -> None:
        self.publish_ready.break_(reason)
        self.published.break_(reason)
        self.source_reuse_ready.break_(reason)

    def _capture_failed(self, reason: str) -> None:
        if self.state is State.CAPTURING:
            self.handle(records.CaptureFailed(reason))

    def _is_confirmed(self) -> bool:
        return self.published.done

    def _is_announcing(self) -> bool:
        return isinstance(self.record.phase, records.Staged) and self.record.phase.announcing

    def _settled(self) -> bool:
        return self._is_confirmed() or self.refusal is not None or self.state in (*_ENDED, State.DRAINING)

    def _start(self, kind: str, run: Callable[[Say], Awaitable[None]]) -> None:
        if kind in self._tasks:
            return
        scope = self._tasks[kind] = anyio.CancelScope()

        def say(event: records.Event) -> None:
            if not scope.cancel_called:
                self.handle(event)

        async def task() -> None:
            with scope:
                await run(say)
            if self._tasks.get(kind) is scope:
                del self._tasks[kind]

        self._ports.background.spawn(task, name=f"{kind} of {self}")

    def _cancel(self, kind: str) -> None:
        scope = self._tasks.pop(kind, None)
        if scope is not None:
            scope.cancel()


Say = Callable[[records.Event], Any]
