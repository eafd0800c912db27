"""What an orchestrator asks of a generator, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Holding:
    """What a generator holds.

    `version_id` is in every parameter (None: what it was started with), if `certain`; otherwise parameters
    may hold another one. `staged` lies beside it. `held`: it doesn't serve, and waits for a verdict.
    """

    version_id: str | None
    certain: bool = True
    staged: str | None = None
    held: bool = False

    def __str__(self) -> str:
        holds = self.version_id or "what it was started with"
        parts = [holds if self.certain else "parts of several versions"]
        parts += [f"{self.staged} beside it"] if self.staged else []
        parts += ["and does not serve"] if self.held else []
        return ", ".join(parts)


@runtime_checkable
class FleetGenerator(Protocol):
    """One generator as a fleet needs it.

    Every call may be repeated, may be cancelled, and has a deadline, which is the caller's: when it is
    over the call is cancelled and another one follows. No two calls to one generator run at once, except
    that one which doesn't heed its cancellation may still be at work elsewhere. Errors that are worth
    another attempt are `TryAgainError` or `OSError`; `VersionGone` says that the version won't come back.
    """

    async def stage(self, version_id: str, *, keep_s: float) -> None:
        """Transfer and verify `version_id`; what is served isn't touched.

        It is kept for `keep_s` seconds, then given up, so that an orchestrator that died costs no memory
        for ever. What else is staged is given up. It is nothing to do where `version_id` is staged or held.
        """
        ...

    async def install(self, version_id: str, *, hold_s: float) -> None:
        """Stop serving, install what is staged, and don't serve until `resume` or `abort`.

        At most `hold_s` seconds: then it serves what it provably holds, for the orchestrator has died. With
        `version_id` held already, it only stops serving.

        Raises:
            ModelExpressError: `version_id` is neither staged nor held, or writing it failed; `holds` says
                what that came to.
        """
        ...

    async def resume(self, version_id: str) -> None:
        """The fleet serves `version_id`: serve.

        Raises:
            ModelExpressError: that is not what it provably holds.
        """
        ...

    async def abort(self, version_id: str, *, back_to: str | None) -> None:
        """Have nothing of `version_id` any more: give up what is staged of it, and serve `back_to`.

        Where it, or a part of it, was installed, `back_to` is installed again; None is what the generator
        was started with. A later `install` of `version_id` is refused until it is staged again.

        Raises:
            ModelExpressError: `back_to` can't be had any more; nothing is served then that isn't held.
        """
        ...

    async def holds(self) -> Holding:
        """What it holds, now."""
        ...
