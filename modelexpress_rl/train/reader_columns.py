"""What the readers of a trainer want of the layout of its copies, where the configuration says nothing."""

from __future__ import annotations

import logging
from math import lcm

from modelexpress_rl.column_blocks import MAX_DECLARED_BLOCKS, MAX_DECLARED_RULES, ColumnBlocks

_log = logging.getLogger(__name__)


class ReaderColumns:
    """Column blocks for the next version's layout.

    `configured` counts alone where it is given. Else what readers declare adds up: a tensor is stored in
    as many blocks as the least common multiple of what they want, which suits all of them. It only ever
    grows, a few times in the life of a job, because each change makes every reader plan anew.
    """

    def __init__(self, configured: ColumnBlocks | None = None) -> None:
        self._configured = configured
        self._declared: dict[str, int] = {}
        self._blocks = configured or ColumnBlocks()

    @property
    def blocks(self) -> ColumnBlocks:
        """The same object until something changes."""
        return self._blocks

    def hear(self, text: str) -> None:
        """A reader declared this; what makes no sense is ignored."""
        if self._configured is not None or not text or text == str(self._blocks):
            return
        changed = False
        for pattern, count in ColumnBlocks.heard(text).rules:
            before = self._declared.get(pattern, 1)
            together = lcm(before, count)
            known = pattern in self._declared or len(self._declared) < MAX_DECLARED_RULES
            if together != before and together <= MAX_DECLARED_BLOCKS and known:
                self._declared[pattern] = together
                changed = True
        if changed:
            self._blocks = ColumnBlocks(tuple(sorted(self._declared.items())))
            _log.info("the next version is copied into the column blocks that readers want: %s", self._blocks)
