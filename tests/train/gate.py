"""A gate before the copies of a capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from modelexpress_rl.train.copying import copy_all
from modelexpress_rl.train.streams import SideStreams
from tests.train.support import eventually


class Gate:
    """Stands before the copies: lets them through, holds them, or has them fail half-way."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.failures = 0

    def hold(self) -> None:
        self.open.clear()
        self.begun.clear()

    async def held(self) -> None:
        """Until a copy has come to the gate."""
        await eventually(self.begun.is_set)

    def copy(self, copies: Any, streams: SideStreams, after: Any, wanted: Callable[[], bool]) -> bool:
        self.begun.set()
        assert self.open.wait(10)
        if self.failures:
            self.failures -= 1
            copies.host[0]()
            raise MemoryError("the second half did not fit")
        return copy_all(copies, streams, after, wanted)
