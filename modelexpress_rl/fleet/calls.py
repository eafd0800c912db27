"""Calls to generators: one at a time to each, a newer one in place of an older one, errors as answers.

A call that is cancelled gives no answer; one that comes all the same changes nothing, for the machine has
moved on. How long a call may last is the machine's business, which has a deadline for each phase.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from modelexpress_rl.background import Background
from modelexpress_rl.clock import Clock
from modelexpress_rl.errors import StateError, TryAgainError, VersionGone
from modelexpress_rl.fleet.policy import FleetPolicy
from modelexpress_rl.fleet.port import FleetGenerator, Holding
from statemachines.fleet_records import (
    Answer,
    Effect,
    GeneratorId,
    Held,
    Install,
    InstallDone,
    InstallFailed,
    Resume,
    Resumed,
    ResumeFailed,
    Stage,
    StageDone,
    StageFailed,
    Undo,
    UndoFailed,
    Undone,
)
from statemachines.ids import VersionId

_log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_WORTH_ANOTHER = (TryAgainError, OSError)


class Calls:
    """Makes the calls of one fleet; `on_answer` gets what each came to, in the event loop."""

    def __init__(self, background: Background, clock: Clock, on_answer: Callable[[Answer], None]) -> None:
        self._background = background
        self._clock = clock
        self._on_answer = on_answer
        self._last: dict[GeneratorId, _Turn] = {}

    def start(self, effect: Effect, generator: FleetGenerator, policy: FleetPolicy) -> None:
        """Make the call that `effect` asks for, once the one before has ended; that is cancelled."""
        before = self._last.get(effect.name)
        turn = self._last[effect.name] = _Turn()
        if before is not None:
            before.scope.cancel()
        self._background.spawn(
            self._run, effect, generator, policy, before, turn, name=f"{type(effect).__name__} {effect.name}"
        )

    def cancel(self, name: GeneratorId) -> None:
        """Cancel the call to a generator, if there is one."""
        if name in self._last:
            self._last[name].scope.cancel()

    async def quiet(self, name: GeneratorId) -> None:
        """Cancel the call to a generator, and wait until it has ended."""
        self.cancel(name)
        if name in self._last:
            await self._last[name].ended.wait()

    async def _run(
        self,
        effect: Effect,
        generator: FleetGenerator,
        policy: FleetPolicy,
        before: _Turn | None,
        turn: _Turn,
    ) -> None:
        answer: Answer | None = None
        try:
            if before is not None:
                await before.ended.wait()
            with turn.scope:
                answer = await self._answer(effect, generator, policy)
        finally:
            turn.ended.set()
        if answer is not None:
            self._on_answer(answer)

    async def _answer(self, effect: Effect, generator: FleetGenerator, policy: FleetPolicy) -> Answer:
        match effect:
            case Stage():
                return await self._stage(effect, generator, policy)
            case Install():
                return await self._install(effect, generator, policy)
            case Resume():
                return await self._resume(effect, generator, policy)
            case Undo():
                return await self._undo(effect, generator, policy)

    async def _stage(self, effect: Stage, generator: FleetGenerator, policy: FleetPolicy) -> Answer:
        try:
            await self.tried(policy, lambda: generator.stage(effect.version_id, keep_s=policy.keep_s))
        except Exception as error:  # noqa: BLE001 (whatever a generator raises is its answer)
            return StageFailed(
                effect.name, effect.version_id, _words(error), gone=isinstance(error, VersionGone)
            )
        return StageDone(effect.name, effect.version_id)

    async def _install(self, effect: Install, generator: FleetGenerator, policy: FleetPolicy) -> Answer:
        """What is believed is what the generator holds afterwards, not that the call returned."""
        failure = "it says that it has installed it"
        try:
            await self.tried(policy, lambda: generator.install(effect.version_id, hold_s=policy.hold_s))
        except Exception as error:  # noqa: BLE001 (as above)
            failure = _words(error)
        holding = await _probed(generator)
        if holding == Holding(effect.version_id, held=True):
            return InstallDone(effect.name, effect.version_id)
        if holding is None:
            return InstallFailed(effect.name, effect.version_id, f"{failure}, and does not answer")
        return InstallFailed(effect.name, effect.version_id, f"{failure}, and holds {holding}", held(holding))

    async def _resume(self, effect: Resume, generator: FleetGenerator, policy: FleetPolicy) -> Answer:
        try:
            await self.tried(policy, lambda: generator.resume(effect.version_id))
        except Exception as error:  # noqa: BLE001 (as above)
            return ResumeFailed(effect.name, effect.version_id, _words(error))
        return Resumed(effect.name, effect.version_id)

    async def _undo(self, effect: Undo, generator: FleetGenerator, policy: FleetPolicy) -> Answer:
        try:
            await self.tried(policy, lambda: generator.abort(effect.version_id, back_to=effect.back_to))
            holding = checked(await self.tried(policy, generator.holds))
        except Exception as error:  # noqa: BLE001 (as above)
            known = await _probed(generator)
            return UndoFailed(
                effect.name, effect.version_id, _words(error), None if known is None else held(known)
            )
        if holding.held:
            return UndoFailed(
                effect.name, effect.version_id, f"it went back, and holds {holding}", held(holding)
            )
        return Undone(effect.name, effect.version_id, held(holding))

    async def tried(self, policy: FleetPolicy, call: Callable[[], Awaitable[T]]) -> T:
        """What `call` returns, after another attempt or more where its error was worth one."""
        for attempt in range(policy.attempts - 1):
            try:
                return await _called(call)
            except VersionGone:
                raise
            except _WORTH_ANOTHER as error:
                _log.info("another attempt after: %s", _words(error))
                await self._clock.sleep(_FIRST_PAUSE_S * 2**attempt)
        return await _called(call)


class _Turn:
    """One call to a generator."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


def held(holding: Holding) -> Held:
    """What the machine is told of what a generator says."""
    checked(holding)
    version_id = None if holding.version_id is None else VersionId(holding.version_id)
    return Held(version_id, holding.certain)


def checked(holding: Holding) -> Holding:
    """What a generator says that it holds, if it is that.

    Raises:
        StateError: the generator answered something else than a `Holding`.
    """
    if not isinstance(holding, Holding):
        raise StateError(f"holds: expected a Holding, got {type(holding).__name__}")
    for version_id in (holding.version_id, holding.staged):
        if not isinstance(version_id, str | None):
            raise StateError(f"holds: expected a version's id, got {version_id!r}")
    return holding


async def _called(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` returns. A cancellation that is not ours is an error like any other.

    Raises:
        StateError: what it waited for was cancelled.
    """
    try:
        return await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StateError("what the call waited for was cancelled") from error


async def _probed(generator: FleetGenerator) -> Holding | None:
    """What a generator says that it holds; None where it doesn't answer."""
    with anyio.move_on_after(_PROBE_TIMEOUT_S):
        try:
            return checked(await _called(generator.holds))
        except Exception as error:  # noqa: BLE001 (no answer, whatever it was)
            _log.info("a generator could not be asked what it holds: %s", _words(error))
    return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
