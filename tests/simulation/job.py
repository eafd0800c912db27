"""What a training framework knows by itself and never loses: which versions there are to be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Wanted:
    """One version that the job is to publish. `created` and `released` are what the orchestrator did."""

    uid: str
    created: bool = False
    releasing: bool = False
    released: bool = False


@dataclass
class Job:
    """The board that the orchestrator writes and all ranks read."""

    versions: list[Wanted] = field(default_factory=list)
    over: bool = False
    last: str | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def plan(self) -> Wanted:
        """The next version."""
        self.versions.append(Wanted(f"v{len(self.versions) + 1}"))
        self.tell()
        return self.versions[-1]

    def tell(self) -> None:
        """Something changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, within_s: float = 1.0) -> None:
        """Return at the next change, or after a while."""
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    @property
    def offered(self) -> list[Wanted]:
        """The versions to publish and to read."""
        return [version for version in self.versions if version.created and not version.releasing]

    def find(self, uid: str) -> Wanted:
        """The version of this id."""
        return next(version for version in self.versions if version.uid == uid)
