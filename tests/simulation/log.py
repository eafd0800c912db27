"""The event log of one run: what happened, in order, in lines that are made only when they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from tests.simulation.loop import SimLoop

_DULL = {
    "model_name",
    "manifest_digest",
    "manifest_endpoint",
    "tensor_count",
    "total_bytes",
    "layout_signature",
    "sha256",
}


class EventLog:
    """Lines with the virtual time and whom they are about; arguments must not change afterwards."""

    def __init__(self, loop: SimLoop) -> None:
        self.closed = False
        self._loop = loop
        self._entries: list[tuple[float, str, str, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, who: str, text: str, *args: Any) -> None:
        """Note an event; `text` is a `%` format."""
        if self.closed:
            return
        self._entries.append((self._loop.time(), who, text, args))

    def entries(self, since: int = 0) -> Iterator[tuple[float, str, str]]:
        """When, about whom, what."""
        for at_s, who, text, args in self._entries[since:]:
            yield at_s, who, text % tuple(map(_shown, args)) if args else text

    def lines(self) -> list[str]:
        """All of it, to be read."""
        return [f"{at_s:9.4f}  {who:<6} {text}" for at_s, who, text in self.entries()]

    def digest(self) -> str:
        """The same for the same run."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()


def _shown(value: Any) -> Any:
    return brief(value) if isinstance(value, Message) else value


def brief(message: Message) -> str:
    """A message in a few words."""
    parts = []
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in _DULL or name.endswith("_unix_ms") or isinstance(value, bytes):
            continue
        if isinstance(value, Message):
            parts.append(f"{name}({brief(value)})")
        elif isinstance(value, Sequence) and not isinstance(value, str):  # protobuf 5 can't say "repeated"
            shown = [brief(one) if isinstance(one, Message) else str(one) for one in list(value)[:4]]
            parts.append(f"{name}=[{', '.join(shown)}]")
        elif descriptor.enum_type is not None:
            full = descriptor.enum_type.values_by_number[value].name
            parts.append(f"{name}={full.rsplit('STATE_', 1)[-1]}")
        else:
            parts.append(f"{name}={value if isinstance(value, (int, bool)) else str(value)[:24]}")
    return " ".join(parts)
