"""Where a process runs, as far as it says so: labels such as zone=a,rack=r7.

A generator reads a replica on its own host first, then the one that shares the most labels with it. A
trainer tells its labels with each manifest, in a header that clients of 0.7 don't look at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from modelexpress_rl.errors import UsageError

TOPOLOGY_HEADER = "mx-topology"
MAX_LABELS = 16
ACCEPTS = f"at most {MAX_LABELS} labels such as zone=a,rack=r7, of letters, digits, '.', '_' and '-'"
_WORD = re.compile(r"[A-Za-z0-9._-]{1,63}")


@dataclass(frozen=True, slots=True)
class Topology:
    """Labels of a process, sorted by name; none by default.

    Raises:
        UsageError: a label that can't be sent, or too many.
    """

    labels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        words = [word for label in self.labels for word in label]
        is_sendable = all(isinstance(word, str) and _WORD.fullmatch(word) for word in words)
        if len(self.labels) > MAX_LABELS or not is_sendable:
            raise UsageError(f"topology: expected {ACCEPTS}, got {self.labels}")

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Self:
        """From a mapping, as a configuration has it.

        Raises:
            UsageError: it is no mapping of labels.
        """
        if not isinstance(labels, Mapping):
            raise UsageError(f"topology: expected a mapping of labels, got {type(labels).__name__}")
        return cls(tuple(sorted(labels.items())))

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `name=value,name=value`.

        Raises:
            UsageError: it is something else.
        """
        pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
        labels = {name.strip(): value.strip() for name, _, value in pairs}
        if len(labels) != len(pairs):
            raise UsageError(f"topology: a label is given twice in {text!r}")
        return cls.of(labels)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.labels)

    def unlike(self, other: Topology) -> int:
        """How many of these labels `other` doesn't share."""
        return len(set(self.labels) - set(other.labels))
