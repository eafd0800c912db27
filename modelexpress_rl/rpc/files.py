"""Things made of files that rotate: certificates, keys, lists of tokens.

A file is named by the option or the variable that it comes from, so that an error says what to mend.
Nothing that a file holds is ever put into an error or a log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from modelexpress_rl.errors import UsageError

_log = logging.getLogger(__name__)

T = TypeVar("T")

Stamps: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file, and the option or variable that names it."""

    name: str
    path: Path

    @classmethod
    def of(cls, name: str, path: str | Path | None) -> NamedFile | None:
        """None where there is no path."""
        return None if path is None else cls(name, Path(path).expanduser())

    def read(self) -> bytes:
        """What it holds.

        Raises:
            UsageError: it can't be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"{self}: {error.strerror or error}") from error

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


class Rotating(Generic[T]):
    """What `build` makes of files, made anew when one of them has changed.

    Where the new files can't be used (one of a pair is not written yet, a disk is away) what was made
    before stays, with a warning. May be used from any thread; a look at the files is a `stat` of each,
    at most once per `look_every_s`.

    Raises:
        UsageError: from the constructor: the files can't be used.
    """

    def __init__(
        self,
        files: Sequence[NamedFile],
        build: Callable[[], T],
        *,
        look_every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = tuple(files)
        self._build = build
        self._look_every_s = look_every_s
        self._clock = clock
        self._guard = threading.Lock()
        self._looked_s = clock()
        self._stamps = self._stat()
        self._value = build()

    def current(self) -> T:
        """What the files make now, or the last that could be used."""
        now_s = self._clock()
        with self._guard:
            if now_s - self._looked_s < self._look_every_s:
                return self._value
            self._looked_s = now_s
            stamps = self._stat()
            if stamps != self._stamps:
                self._stamps = stamps
                self._rebuild()
            return self._value

    def _rebuild(self) -> None:
        try:
            self._value = self._build()
        except UsageError as error:
            _log.warning("the files changed and can't be used, those of before are: %s", error)
        else:
            _log.info("read anew: %s", ", ".join(str(each) for each in self._files))

    def _stat(self) -> Stamps:
        return tuple(_stamp(each.path) for each in self._files)


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
