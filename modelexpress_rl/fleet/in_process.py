"""A generator client of this process as a generator of a fleet."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self

import anyio

from modelexpress_rl.background import Background
from modelexpress_rl.clock import MONOTONIC, Clock
from modelexpress_rl.errors import StateError
from modelexpress_rl.fleet.port import Holding

_log = logging.getLogger(__name__)

_HOLD_S = 60.0  # where nobody has said how long


class StagedHandle(Protocol):
    """A version that is staged, as `AsyncModelExpressGeneratorClient` hands it out."""

    @property
    def version_id(self) -> str:
        """The version."""
        ...

    @property
    def released(self) -> bool:
        """Whether its memory has been given up, also because it was applied."""
        ...

    async def release(self) -> None:
        """Give its memory up."""
        ...


class StagingClient(Protocol):
    """What is needed of an `AsyncModelExpressGeneratorClient`."""

    @property
    def serving_version_id(self) -> str | None:
        """What every parameter provably holds."""
        ...

    @property
    def uncertain(self) -> bool:
        """Whether parameters may hold parts of several versions."""
        ...

    async def stage_weight(self, version: Any) -> Any:
        """Transfer and verify; the answer is a `StagedHandle`."""
        ...

    async def apply_weight(self, staged: Any) -> None:
        """Install what is staged."""
        ...


async def _nothing() -> None:
    """For an engine that has nothing to stop: whoever calls it looks at `fleet.members` and `held`."""


class InProcessGenerator:
    """A `FleetGenerator` over an `AsyncModelExpressGeneratorClient`; an async context manager.

    `pause` brings the engine to its safe point, where it stays until `resume`; both may be repeated. Going
    back means that the old version is staged and installed again: it must not be released before the
    update is through. The client stays the caller's, who stages and applies nothing meanwhile.

    A hold that nobody ends is ended here, after `hold_s`; not while the client is uncertain.
    """

    def __init__(
        self,
        client: StagingClient,
        *,
        pause: Callable[[], Awaitable[object]] = _nothing,
        resume: Callable[[], Awaitable[object]] = _nothing,
        clock: Clock = MONOTONIC,
    ) -> None:
        self._client = client
        self._pause = pause
        self._resume = resume
        self._clock = clock
        self._staged: StagedHandle | None = None
        self._held = False
        self._hold_s = _HOLD_S

    async def __aenter__(self) -> Self:
        background = await Background.start("a generator of a fleet")
        self._background = background
        self._keep = _Timer(background, self._clock, self._keep_is_over)
        self._hold = _Timer(background, self._clock, self._hold_is_over)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._background.aclose()

    @property
    def held(self) -> bool:
        """Whether it has stopped serving for an update that waits for its verdict."""
        return self._held

    async def stage(self, version_id: str, *, keep_s: float) -> None:
        """See `FleetGenerator.stage`; raises what `stage_weight` does."""
        self._keep.stop()
        if self._staged is not None and self._staged.version_id != version_id:
            await self._give_up()
        handle: StagedHandle = await self._client.stage_weight(version_id)
        self._staged = None if handle.released else handle
        self._keep.set(keep_s)

    async def install(self, version_id: str, *, hold_s: float) -> None:
        """See `FleetGenerator.install`; raises what `apply_weight` does.

        Raises:
            StateError: the version is not staged, or was kept for too long.
        """
        staged = self._handle()
        if not self._has(version_id) and (staged is None or staged.version_id != version_id):
            raise StateError(f"version {version_id} is not staged: the generator holds {await self.holds()}")
        self._hold_s = hold_s
        await self._hold.quiet()
        try:
            await self._stop()
            if staged is not None and staged.version_id == version_id:
                await self._client.apply_weight(staged)
                self._staged = None
        finally:
            self._hold.set(hold_s)

    async def resume(self, version_id: str) -> None:
        """See `FleetGenerator.resume`."""
        if not self._has(version_id):
            raise StateError(f"version {version_id} can't be served: held is {await self.holds()}")
        await self._serve()

    async def abort(self, version_id: str, *, back_to: str | None) -> None:
        """See `FleetGenerator.abort`; raises what staging `back_to` does.

        Raises:
            StateError: there is no version to go back to.
        """
        staged = self._handle()
        if staged is not None and staged.version_id == version_id:
            await self._give_up()
        if not self._client.uncertain and (version_id == back_to or not self._has(version_id)):
            await self._serve()
            return
        if back_to is None:
            raise StateError(
                f"version {version_id} was installed over what the generator was started with, and there is "
                "no version to go back to"
            )
        await self._hold.quiet()
        try:
            await self._stop()
            await self._client.apply_weight(await self._client.stage_weight(back_to))
        finally:
            self._hold.set(self._hold_s)
        await self._serve()

    async def holds(self) -> Holding:
        """See `FleetGenerator.holds`."""
        staged = self._handle()
        return Holding(
            self._client.serving_version_id,
            certain=not self._client.uncertain,
            staged=None if staged is None else staged.version_id,
            held=self._held,
        )

    def _has(self, version_id: str) -> bool:
        return not self._client.uncertain and self._client.serving_version_id == version_id

    def _handle(self) -> StagedHandle | None:
        if self._staged is not None and self._staged.released:
            self._staged = None
        return self._staged

    async def _stop(self) -> None:
        self._held = True
        await self._pause()

    async def _serve(self) -> None:
        if self._held:
            await self._resume()
            self._held = False
        self._hold.stop()

    async def _give_up(self) -> None:
        self._keep.stop()
        staged, self._staged = self._staged, None
        if staged is not None:
            await staged.release()

    async def _keep_is_over(self) -> None:
        staged = self._handle()
        if staged is not None:
            _log.warning("version %s was staged, and never installed: it is given up", staged.version_id)
            await self._give_up()

    async def _hold_is_over(self) -> None:
        if self._client.uncertain:
            _log.error("no verdict came, and nothing can be served: parameters hold several versions")
            return
        _log.warning("no verdict came: serving %s again", self._client.serving_version_id)
        try:
            await self._serve()
        except BaseException:
            self._hold.set(self._hold_s)
            raise


class _Timer:
    """Does something after a while, unless it is stopped or set anew; `stop` from within does no harm."""

    def __init__(self, background: Background, clock: Clock, act: Callable[[], Awaitable[None]]) -> None:
        self._background = background
        self._clock = clock
        self._act = act
        self._waiting = anyio.CancelScope()
        self._acted = anyio.Event()
        self._acted.set()

    def set(self, delay_s: float) -> None:
        """Do it after `delay_s`, and not when it was to be done before."""
        self.stop()
        self._waiting = anyio.CancelScope()
        self._background.spawn(self._run, self._waiting, delay_s, name="timer")

    def stop(self) -> None:
        """Don't do it."""
        self._waiting.cancel()

    async def quiet(self) -> None:
        """Don't do it; where it is being done just now, wait until it is. Not from within."""
        self.stop()
        await self._acted.wait()
        self.stop()  # what failed may have been put off

    async def _run(self, waiting: anyio.CancelScope, delay_s: float) -> None:
        with waiting:
            await self._clock.sleep(delay_s)
        if not waiting.cancel_called:
            acted = self._acted = anyio.Event()
            try:
                await self._act()
            except Exception:  # noqa: BLE001 (the engine's own; there is nobody to raise it to)
                _log.exception("what was to be done after %g s failed", delay_s)
            finally:
                acted.set()
