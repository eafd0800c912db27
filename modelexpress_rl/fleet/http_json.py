"""JSON over HTTP, by the standard library, in a thread: for the few calls of an orchestrator."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

import anyio.to_thread

from modelexpress_rl.errors import DeadlineExceeded, PeerError, StateError, Unavailable

MAX_ANSWER_BYTES = 1 << 20
_SHOWN_CHARS = 300


async def call(
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The parsed answer. A cancelled call is not waited for, and ends by itself.

    Raises:
        Unavailable: the server can't be reached, or broke the connection, or says that it is overloaded.
        DeadlineExceeded: nothing came for `timeout_s`.
        StateError: the server answered with another error; the message has what it said.
        PeerError: the answer is no JSON, or too long.
    """
    return await anyio.to_thread.run_sync(
        _call, method, url, body, timeout_s, dict(headers or {}), abandon_on_cancel=True
    )


def _call(
    method: str, url: str, body: Mapping[str, Any] | None, timeout_s: float, headers: dict[str, str]
) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, method=method, headers={"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer = response.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(_SHOWN_CHARS).decode("utf-8", "replace")
        kind = Unavailable if error.code in (429, 502, 503, 504) else StateError
        raise kind(f"{method} {url}: {error.code} {error.reason}: {said}") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{method} {url}: nothing came for {timeout_s:g} s") from error
    except OSError as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise DeadlineExceeded(f"{method} {url}: no connection within {timeout_s:g} s") from error
        raise Unavailable(f"{method} {url}: {error}") from error
    if len(answer) > MAX_ANSWER_BYTES:
        raise PeerError(f"{method} {url}: the answer has more than {MAX_ANSWER_BYTES} bytes")
    try:
        return json.loads(answer) if answer.strip() else None
    except ValueError as error:
        raise PeerError(f"{method} {url}: the answer is no JSON: {answer[:80]!r}") from error
