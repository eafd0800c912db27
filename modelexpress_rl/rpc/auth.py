"""Bearer tokens from files that may rotate: the one to send, and those to accept."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc.files import NamedFile, Rotating

_log = logging.getLogger(__name__)

REREAD_AFTER_S = 60.0
REFUSED_REREAD_AFTER_S = 1.0
LOOK_EVERY_S = 1.0
AUTHORIZATION = "authorization"
TOKEN_VARIABLE = "MX_AUTH_TOKEN_PATH"
WORKER_TOKEN_VARIABLE = "MX_WORKER_AUTH_TOKEN_PATH"
_SCHEME = "bearer "
_MAX_TOKENS = 1000

# At DEBUG hpack writes every header that it packs or unpacks into the log, the token included.
logging.getLogger("hpack").setLevel(logging.INFO)


class Credentials(Protocol):
    """Adds what proves who the caller is."""

    def metadata(self) -> dict[str, str]:
        """Headers for the next call; called once per call and never blocks for long."""
        ...

    def refused(self) -> bool:
        """What was sent was not accepted: look whether there is something else to send by now."""
        ...


class NoCredentials:
    """The caller stays anonymous."""

    def metadata(self) -> dict[str, str]:
        """No header."""
        return {}

    def refused(self) -> bool:
        """There is never anything else to send."""
        return False


class TokenFile:
    """A bearer token in a file, read again every 60 s, and when it was refused.

    With `several` it may be a file of `AcceptedTokens`, whose first token is sent. A file that becomes
    unreadable after it could be read once keeps the token that was read last; the server decides
    whether it still counts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str = TOKEN_VARIABLE,
        several: bool = False,
        reread_after_s: float = REREAD_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path)
        self._name = name
        self._parse = _tokens if several else _one_token
        self._reread_after_s = reread_after_s
        self._clock = clock
        self._token: str | None = None
        self._read_at_s = 0.0

    def metadata(self) -> dict[str, str]:
        """The `authorization` header.

        Raises:
            UsageError: the file has never been readable, is empty, or holds no token.
        """
        now_s = self._clock()
        if self._token is None or now_s - self._read_at_s >= self._reread_after_s:
            self._read(now_s)
        return {AUTHORIZATION: f"Bearer {self._token}"}

    def refused(self) -> bool:
        """Read the file again, at most once a second; whether it holds another token now."""
        now_s, before = self._clock(), self._token
        if before is None or now_s - self._read_at_s < REFUSED_REREAD_AFTER_S:
            return False
        self._read(now_s)
        return self._token != before

    def _read(self, now_s: float) -> None:
        self._read_at_s = now_s
        try:
            self._token = self._parse(self._path.read_bytes(), str(self._path))[0]
        except (OSError, UsageError) as error:
            if self._token is None:
                raise UsageError(f"{self._name}: no token in {self._path}: {error}") from error
            _log.warning("%s: keeping the last token; %s: %s", self._name, self._path, error)


def worker_token(path: str | Path) -> TokenFile:
    """What a reader sends to workers: the first token of the file that they all accept."""
    return TokenFile(path, name=WORKER_TOKEN_VARIABLE, several=True)


class AcceptedTokens:
    """The tokens of a file, one a line, any of which lets a caller in; looked at again every second.

    To rotate: add the new token, let the clients change theirs, take the old one out. A file that can't
    be used any more (unreadable, or without a token) leaves the last ones valid, with a warning.

    Raises:
        UsageError: from the constructor: the file can't be read, or a line of it is no token.
    """

    def __init__(self, file: NamedFile, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._hashes = Rotating([file], self._read, look_every_s=LOOK_EVERY_S, clock=clock)

    def accept(self, authorization: str | None) -> str | None:
        """Why a caller with this header is refused; None where it is let in.

        It takes the same time whichever token is right, and however much of one is.
        """
        if authorization is None:
            return "a bearer token is required: none came"
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return "a bearer token is required: the authorization header holds something else"
        sent = _hash(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(sent, accepted) for accepted in self._hashes.current()]
        return None if any(matches) else "the bearer token is not one that is accepted"

    def _read(self) -> tuple[bytes, ...]:
        return tuple(_hash(token) for token in _tokens(self._file.read(), str(self._file)))


def _one_token(data: bytes, where: str) -> list[str]:
    token = data.decode("utf-8", "replace").strip()
    if not _is_token(token):
        raise UsageError(f"{where} must hold one token of printable ASCII characters")
    return [token]


def _tokens(data: bytes, where: str) -> list[str]:
    """One a line; blank lines and those that begin with `#` don't count."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(tokens) <= _MAX_TOKENS:
        raise UsageError(f"{where} must hold from 1 to {_MAX_TOKENS} tokens, one a line, not {len(tokens)}")
    if not all(_is_token(token) for token in tokens):
        raise UsageError(f"{where} must hold tokens of printable ASCII characters without blanks, one a line")
    return tokens


def _is_token(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
