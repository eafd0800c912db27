"""The driver of the fleet machine: it feeds events, makes the calls, and keeps the deadlines."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import anyio

from modelexpress_rl import arguments
from modelexpress_rl.background import Background
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import DeadlineExceeded, ModelExpressError, StateError, UsageError
from modelexpress_rl.fleet.calls import Calls, checked, held
from modelexpress_rl.fleet.policy import FleetPolicy
from modelexpress_rl.fleet.port import FleetGenerator, Holding
from modelexpress_rl.fleet.report import FleetReport, words
from modelexpress_rl.fleet.update import FleetUpdate
from statemachines import fleet as machine
from statemachines.fleet_records import (
    Admit,
    Begin,
    Event,
    Expel,
    FleetRecord,
    FleetState,
    Forget,
    GeneratorId,
    Held,
    Part,
    TimePassed,
)
from statemachines.ids import VersionId
from statemachines.kernel import Refused

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
LOG_PREFIX = "MX_FLEET_UPDATE"
_METRICS = {
    FleetState.STAGING: "stage_s",
    FleetState.STAGED: "decide_s",
    FleetState.COMMITTING: "commit_s",
    FleetState.COMMITTED: "settle_s",
    FleetState.ABORTING: "settle_s",
}
_RESTING = (FleetState.IDLE, FleetState.COMMITTED, FleetState.ABORTED)


class Fleet:
    """The generators that serve one model, and the version that they serve. An async context manager.

    `current_version_id` is what the fleet serves; None: what the generators were started with. An
    orchestrator that starts again says what it last committed, and admits its generators again.
    `on_change` is called in the event loop whenever `members` or `current_version_id` change, before anyone
    is told to serve a new version: whoever routes requests follows it. It must not block.
    """

    def __init__(
        self,
        *,
        current_version_id: str | None = None,
        policy: FleetPolicy | None = None,
        on_change: Callable[[Fleet], None] | None = None,
        clock: Clock = MONOTONIC,
    ) -> None:
        if current_version_id is not None:
            arguments.name("current_version_id", current_version_id)
            current_version_id = VersionId(current_version_id)
        self.record = FleetRecord(current_version_id)
        self.policy = policy or FleetPolicy()
        self._on_change = on_change
        self._clock = clock
        self._generators: dict[GeneratorId, FleetGenerator] = {}
        self._joining: set[GeneratorId] = set()
        self._update: FleetUpdate | None = None
        self._entered_ms: list[tuple[FleetState, int]] = []
        self._last: FleetReport | None = None
        self._changed = anyio.Event()
        self._timer: anyio.CancelScope | None = None
        self._background: Background | None = None

    async def __aenter__(self) -> Self:
        self._background = await Background.start("the fleet", on_crash=lambda _: self._tell())
        self._calls = Calls(self._background, self._clock, self._feed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._background is not None
        await self._background.aclose()
        self._tell()

    @property
    def current_version_id(self) -> str | None:
        """The version that the fleet serves."""
        return self.record.current

    @property
    def members(self) -> tuple[str, ...]:
        """The generators of the fleet: those that may be sent requests."""
        return self.record.members

    @property
    def out(self) -> Mapping[str, str]:
        """The generators that are known and not in the fleet, and why."""
        generators = self.record.generators.items()
        return {name: one.why for name, one in generators if one.part is Part.OUT}

    @property
    def holds(self) -> Mapping[str, Held]:
        """What each generator was last known to hold."""
        return {name: one.holds for name, one in self.record.generators.items()}

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the update that ended last, committed or not; handed out once."""
        report, self._last = self._last, None
        if report is None:
            return {}
        counts = {"committed": float(report.committed), "members": len(report.members)}
        return {**report.metrics, **counts, "out": len(report.out)}

    async def update(self, version_id: str, *, policy: FleetPolicy | None = None) -> FleetReport:
        """Update the fleet: stage everywhere, then install everywhere. The version that is served is a no-op.

        Raises:
            FleetAborted: a quorum could not; the fleet serves what it served. Its report says who holds what.
            StateError: an update is under way, or the fleet is smaller than the quorum.
        """
        async with self.updating(version_id, policy=policy) as update:
            await update.staged()
            return await update.commit()

    def updating(self, version_id: str, *, policy: FleetPolicy | None = None) -> FleetUpdate:
        """An update phase by phase; see `FleetUpdate`."""
        return FleetUpdate(self, VersionId(arguments.name("version_id", version_id)), policy or self.policy)

    async def admit(
        self, name: str, generator: FleetGenerator | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Take a generator into the fleet, once it holds the current version; a member is left as it is.

        It is brought to that version first, where need be; an update under way is waited for, and its
        version caught up with. `generator` may be left out for one that is known and out. The time is
        `stage_timeout_s` of the policy where None.

        Raises:
            DeadlineExceeded: not in time.
            StateError: it can't be brought to the version; another generator of that name is a member.
            ModelExpressError: as its `stage` or `install` raised.
        """
        key, one = self._candidate(name, generator)
        if key in self.record.members:
            return
        if key in self._joining:
            raise StateError(f"generator {name} is being admitted already")
        limit_s = self.policy.stage_timeout_s if timeout_s is None else timeout_s
        self._joining.add(key)
        try:
            with anyio.fail_after(arguments.seconds("timeout_s", limit_s)):
                await self._admit(key, one)
        except ModelExpressError:
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"generator {name} was not admitted within {limit_s:g} s; the fleet serves "
                f"{self.record.current or 'what it was started with'}"
            ) from error
        finally:
            self._joining.discard(key)

    async def catch_up(self, *, timeout_s: float | None = None) -> Mapping[str, str]:
        """Admit everyone who is out, side by side; returns who still is, and why."""

        async def one(name: str) -> None:
            try:
                await self.admit(name, timeout_s=timeout_s)
            except Exception as error:  # noqa: BLE001 (whatever it was, the others go on)
                _log.warning("generator %s has not caught up: %s", name, error)

        async with anyio.create_task_group() as group:
            for name in self.out:
                group.start_soon(one, name)
        return self.out

    def expel(self, name: str, why: str) -> None:
        """Put a generator out of the fleet, because it is known to be dead or unfit.

        Raises:
            StateError: an update is under way (which finds out by itself), or it is not known.
        """
        self._feed(Expel(GeneratorId(name), why))

    def forget(self, name: str) -> None:
        """Remove a generator that won't come back.

        Raises:
            StateError: an update is under way, or it is not known.
        """
        self._feed(Forget(GeneratorId(name)))
        del self._generators[GeneratorId(name)]

    # Of updates.

    def _begin(self, update: FleetUpdate, event: Begin) -> None:
        if self._update is not None:
            raise StateError(
                f"version {event.version_id}: the update to {self._update.version_id} is under way"
            )
        self._entered_ms = []
        self._update = update
        try:
            self._feed(event)
        except BaseException:
            self._update = None
            raise

    def _end(self, update: FleetUpdate) -> None:
        self._update = None
        self._last = report = update.report
        level = logging.INFO if report.committed and not report.out else logging.WARNING
        _log.log(level, "%s", report)
        line = {
            "version_id": report.version_id,
            "committed": int(report.committed),
            "members": len(report.members),
            "out": {name: words(report.holds[name]) for name in report.out},
            **{name: round(value, 6) for name, value in report.metrics.items()},
        }
        _log.info("%s %s", LOG_PREFIX, json.dumps(line))

    def _metrics(self) -> dict[str, float]:
        """Seconds by phase, of the phases that were entered; the last one goes on until now."""
        entered = [*self._entered_ms, (self.record.state, self._clock.now_ms())]
        times = {"update_s": (entered[-1][1] - entered[0][1]) / 1000}
        for (state, from_ms), (_, to_ms) in itertools.pairwise(entered):
            if state in _METRICS:
                times[_METRICS[state]] = (to_ms - from_ms) / 1000
        return times

    # Of the machine.

    def _feed(self, event: Event) -> None:
        """Decide, keep, tell, and make the calls.

        Raises:
            StateError: the machine refuses the event; nothing has changed.
        """
        if self._background is None:
            raise StateError("the fleet is not open: use `async with Fleet(...) as fleet`")
        self._background.check()
        now_ms = self._clock.now_ms()
        before = self.record
        try:
            decision = machine.decide(before, event, now_ms)
        except Refused as refused:
            raise StateError(str(refused)) from refused
        self.record = decision.record
        self._note(before, now_ms)
        for effect in decision.effects:
            policy = self.policy if self._update is None else self._update.policy
            self._calls.start(effect, self._generators[effect.name], policy)
        busy = {effect.name for effect in machine.pending(self.record)}
        for name in set(self._generators) - busy:
            self._calls.cancel(name)
        if self.record.deadline_ms != before.deadline_ms:
            self._set_timer()
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for the record, or for the end of the background."""
        self._changed.set()
        self._changed = anyio.Event()

    def _note(self, before: FleetRecord, now_ms: int) -> None:
        after = self.record
        if after.state is not before.state:
            self._entered_ms.append((after.state, now_ms))
            _log.info("fleet: %s -> %s", before.state, after.state)
        for name, one in after.generators.items():
            was = before.generators.get(name)
            if one.part is Part.OUT and (was is None or was.part is not Part.OUT):
                _log.warning("generator %s is out of the fleet: %s", name, one.why)
        changed = (after.current, after.members) != (before.current, before.members)
        if changed and self._on_change is not None:
            try:
                self._on_change(self)
            except Exception:  # noqa: BLE001 (the fleet is as it is, whatever others make of it)
                _log.exception("on_change failed")

    def _set_timer(self) -> None:
        assert self._background is not None
        if self._timer is not None:
            self._timer.cancel()
        if self.record.deadline_ms is not None:
            timer = self._timer = anyio.CancelScope()
            self._background.spawn(self._pass_time, timer, self.record.deadline_ms, name="deadline")

    async def _pass_time(self, scope: anyio.CancelScope, deadline_ms: int) -> None:
        with scope:
            while (left_ms := deadline_ms - self._clock.now_ms()) > 0:
                await self._clock.sleep(left_ms / 1000)
            self._feed(TimePassed())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self._background is not None
            self._background.check()
            with anyio.move_on_after(_LOOK_AGAIN_S):  # nobody tells of a background that was cancelled
                await self._changed.wait()

    # Of newcomers.

    def _candidate(self, name: str, generator: FleetGenerator | None) -> tuple[GeneratorId, FleetGenerator]:
        key = GeneratorId(arguments.name("name", name))
        known = self._generators.get(key)
        one = known if generator is None else generator
        if one is None:
            raise UsageError(f"generator {name} is not known: say what it is")
        if not isinstance(one, FleetGenerator):
            raise UsageError(f"generator {name}: expected a FleetGenerator, got {arguments.shown(one)}")
        if key in self.record.members and one is not known:
            raise StateError(f"generator {name}: another one of that name is in the fleet; expel it first")
        return key, one

    async def _admit(self, name: GeneratorId, generator: FleetGenerator) -> None:
        await self._calls.quiet(name)
        while True:
            await self._until(lambda: self.record.state in _RESTING)
            version_id = self.record.current
            holding = await self._bring(name, generator, version_id)
            if self.record.state in _RESTING and self.record.current == version_id:
                self._generators[name] = generator
                self._feed(Admit(name, held(holding)))
                return

    async def _bring(
        self, name: GeneratorId, generator: FleetGenerator, version_id: VersionId | None
    ) -> Holding:
        """Bring a generator that is not in the fleet to a version, and have it serve."""
        policy, tried = self.policy, self._calls.tried
        holding = checked(await tried(policy, generator.holds))
        if version_id is None or holding == Holding(version_id):
            return _serving(name, holding)
        if holding.staged is not None and holding.staged != version_id:
            _log.info("generator %s gives up %s, which it had staged", name, holding.staged)
        await tried(policy, lambda: generator.stage(version_id, keep_s=policy.keep_s))
        await tried(policy, lambda: generator.install(version_id, hold_s=policy.hold_s))
        await tried(policy, lambda: generator.resume(version_id))
        return _serving(name, checked(await tried(policy, generator.holds)))


def _serving(name: GeneratorId, holding: Holding) -> Holding:
    """What it holds, if it serves.

    Raises:
        StateError: it is stopped; a member gets requests.
    """
    if holding.held:
        raise StateError(
            f"generator {name} is stopped, and holds {holding}: start it, or give the fleet the version that "
            "it is to serve as current_version_id"
        )
    return holding
