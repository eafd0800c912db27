"""What the readers of a trainer want of the layout of its copies, where the configuration says nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from modelexpress_rl.column_blocks import MAX_DECLARED_RULES, ColumnBlocks, pattern_of

_log = logging.getLogger(__name__)

MAX_USELESS_RULES = 4096

Rule = tuple[str, int]


class ReaderColumns:
    """Column blocks for the next version's layout.

    `configured` counts alone where it is given. Else what readers declare adds up: a tensor is stored in
    as many blocks as suit all that its columns can be cut into, up to `MAX_DECLARED_BLOCKS`; a wish beyond
    that is ignored. The blocks only ever grow, a few times in the life of a job, because each change
    makes every reader plan anew. A wish that changes no tensor takes nobody's place.
    """

    def __init__(self, configured: ColumnBlocks | None = None) -> None:
        self._configured = configured
        self._rules: dict[Rule, None] = {}
        self._fresh: dict[Rule, None] = {}
        self._useless: set[Rule] = set()
        self._blocks = configured or ColumnBlocks()

    def hear(self, text: str) -> None:
        """A reader declared this; what makes no sense is ignored."""
        if self._configured is not None or not text or len(self._useless) >= MAX_USELESS_RULES:
            return
        for rule in ColumnBlocks.heard(text).rules:
            is_known = rule in self._rules or rule in self._fresh or rule in self._useless
            if not is_known and len(self._fresh) < MAX_DECLARED_RULES:
                self._fresh[rule] = None

    @property
    def blocks(self) -> ColumnBlocks:
        """The same object until `settle` changes something."""
        return self._blocks

    def settle(self, columns: Callable[[], Mapping[str, int]]) -> None:
        """Take up what was heard, for tensors of so many `columns` by name.

        Apart from `hear`, which may come at any time: a version is staged by the same blocks all through.
        """
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, {}
        extents = columns()
        for pattern, count in fresh:
            fits = pattern_of(pattern)
            together = ColumnBlocks((*self._rules, (pattern, count)), together=True)
            names = [name for name in extents if fits(name)]
            useful = any(together.count(n, extents[n]) != self._blocks.count(n, extents[n]) for n in names)
            if useful and len(self._rules) < MAX_DECLARED_RULES:
                self._rules[pattern, count] = None
                self._blocks = together
                _log.info("the next copy has %d blocks of columns of %s, as a reader wants", count, pattern)
            else:
                self._useless.add((pattern, count))
