"""In how many blocks of columns a copying trainer stores a tensor, so that readers' slices are contiguous.

A trainer is told by its configuration, or where that says nothing, by its readers: with each request for
digests they send what would suit them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from math import lcm
from typing import Self

from modelexpress_rl.errors import UsageError

ROW_PARALLEL = (
    "*.o_proj.weight",
    "*.out_proj.weight",
    "*.down_proj.weight",
    "*.w2.weight",
    "*.fc2.weight",
    "*.dense_4h_to_h.weight",
)
"""What a number alone is about: the weights of which tensor-parallel readers take columns."""

MAX_BLOCKS = 1024
MIN_ROWS = 16  # fewer runs than this are no burden
LONG_RUN_BYTES = 64 << 10  # nor are runs as long as this

COLUMN_BLOCKS_HEADER = "mx-column-blocks"
MAX_DECLARED_RULES = 64
MAX_DECLARED_BLOCKS = 64
MAX_DECLARED_TEXT = 16 << 10
_SENDABLE = re.compile(r"[A-Za-z0-9._*-]{1,128}")
ACCEPTS = "a number of blocks, or name patterns with one each, such as *.o_proj.weight=4,*.down_proj.weight=8"


@dataclass(frozen=True, slots=True)
class ColumnBlocks:
    """Name patterns (as of a shell, `*` and `?`) and blocks; the first that fits a name counts.

    `together`: all that fit count, as far as the columns can be cut so.

    Raises:
        UsageError: a pattern is blank, or a number is none of 1 to `MAX_BLOCKS`.
    """

    rules: tuple[tuple[str, int], ...] = ()
    together: bool = False

    def __post_init__(self) -> None:
        for pattern, count in self.rules:
            good = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_BLOCKS
            if not good or not isinstance(pattern, str) or not pattern.strip():
                raise UsageError(
                    f"column_blocks: expected {ACCEPTS}, 1 to {MAX_BLOCKS}, got {pattern!r}: {count!r}"
                )

    @classmethod
    def of(cls, value: int | Mapping[str, int]) -> Self:
        """From a configuration: one number for the `ROW_PARALLEL` weights, or a mapping of patterns.

        Raises:
            UsageError: it is something else.
        """
        if isinstance(value, Mapping):
            return cls(tuple(value.items()))
        return cls(tuple((pattern, value) for pattern in ROW_PARALLEL))

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `4`, or from `pattern=4,pattern=8`.

        Raises:
            UsageError: it is something else.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        try:
            if len(parts) == 1 and "=" not in parts[0]:
                return cls.of(int(parts[0]))
            pairs = [part.rpartition("=") for part in parts]
            return cls(tuple((pattern.strip(), int(count)) for pattern, _, count in pairs))
        except ValueError:
            raise UsageError(f"column_blocks: expected {ACCEPTS}, got {text!r}") from None

    @classmethod
    def declared(cls, rules: Iterable[tuple[str, int]]) -> Self:
        """What of these rules a reader may declare: not many, of few blocks, of names that can be sent."""
        sendable = [
            (pattern, count)
            for pattern, count in rules
            if _SENDABLE.fullmatch(pattern) and 1 < count <= MAX_DECLARED_BLOCKS
        ]
        return cls(tuple(sendable[:MAX_DECLARED_RULES]))

    @classmethod
    def heard(cls, text: str) -> Self:
        """What a reader declared, as far as it makes sense."""
        if len(text) > MAX_DECLARED_TEXT:
            return cls()
        try:
            return cls.declared(cls.parse(text).rules if "=" in text else ())
        except UsageError:
            return cls()

    def __str__(self) -> str:
        return ",".join(f"{pattern}={count}" for pattern, count in self.rules)

    def count(self, name: str, columns: int) -> int:
        """The blocks of a tensor of so many columns; 1 where no pattern fits."""
        fitting = (count for pattern, count in self.rules if pattern_of(pattern)(name))
        if not self.together:
            return next(fitting, 1)
        found = 1
        for count in fitting:
            both = lcm(found, count)
            if both <= MAX_DECLARED_BLOCKS and columns % both == 0:
                found = both
        return found


@lru_cache(maxsize=4 * MAX_DECLARED_RULES)
def pattern_of(pattern: str) -> Callable[[str], object]:
    """Whether a name fits a pattern."""
    return re.compile(translate(pattern)).match
