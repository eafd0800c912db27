"""The bearer token that goes with every call to the control plane, from a file that may rotate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from modelexpress_rl.errors import UsageError

_log = logging.getLogger(__name__)

REREAD_AFTER_S = 60.0


class Credentials(Protocol):
    """Adds what proves who the caller is."""

    def metadata(self) -> dict[str, str]:
        """Headers for the next call; called once per call and never blocks for long."""
        ...


class NoCredentials:
    """The caller stays anonymous."""

    def metadata(self) -> dict[str, str]:
        """No header."""
        return {}


class TokenFile:
    """A bearer token in a file, read again every 60 s so that a rotated token is picked up.

    A file that becomes unreadable after it could be read once keeps the token that was read last; the
    server decides whether it still counts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        reread_after_s: float = REREAD_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path)
        self._reread_after_s = reread_after_s
        self._clock = clock
        self._token: str | None = None
        self._read_at_s = 0.0

    def metadata(self) -> dict[str, str]:
        """The `authorization` header.

        Raises:
            UsageError: the file has never been readable, is empty, or holds more than a token.
        """
        now_s = self._clock()
        if self._token is None or now_s - self._read_at_s >= self._reread_after_s:
            self._read(now_s)
        return {"authorization": f"Bearer {self._token}"}

    def _read(self, now_s: float) -> None:
        self._read_at_s = now_s
        try:
            self._token = _checked(self._path.read_text(encoding="utf-8"), self._path)
        except (OSError, UnicodeDecodeError, UsageError) as error:
            if self._token is None:
                raise UsageError(f"MX_AUTH_TOKEN_PATH: no token in {self._path}: {error}") from error
            _log.warning("MX_AUTH_TOKEN_PATH: keeping the last token; %s: %s", self._path, error)


def _checked(text: str, path: Path) -> str:
    token = text.strip()
    if not token or not token.isascii() or any(mark.isspace() for mark in token):
        raise UsageError(f"{path} must hold one token of printable ASCII characters")
    return token
