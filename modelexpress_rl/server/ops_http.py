"""A port for operators: `/metrics`, `/healthz` (does the process work) and `/readyz` (and its store).

A few lines of HTTP/1.1 on the server's own loop: no thread, no framework; every answer closes its
connection, and a caller that dawdles is cut off.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from modelexpress_rl.errors import UsageError

_LOG = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
MAX_LINE_BYTES = 8192
MAX_HEADERS = 100
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"} | {
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], Awaitable[Answer]]]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 lets the kernel choose.

    Raises:
        UsageError: the port can't be bound.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = "the port is taken" if error.errno == errno.EADDRINUSE else str(error)
        raise UsageError(f"--metrics-port: can't listen on {host}:{port}: {why}") from error


@asynccontextmanager
async def serving_http(listener: socket.socket, routes: Routes) -> AsyncIterator[int]:
    """Answer GET of `routes` while the context lasts; yields the port. The socket is closed at the end."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await _answer(reader, routes)
            if answer is not None:
                writer.write(_head(answer) + answer.body)
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await writer.drain()
        except (OSError, TimeoutError):
            pass  # the caller went away
        finally:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await writer.wait_closed()

    server = await asyncio.start_server(connected, sock=listener, limit=MAX_LINE_BYTES)
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


async def _answer(reader: asyncio.StreamReader, routes: Routes) -> Answer | None:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request = await reader.readline()
            for _ in range(MAX_HEADERS):
                if (await reader.readline()).strip() == b"":
                    break
    except ValueError:  # a line without end
        return Answer(400, b"a line is too long\n")
    words = request.decode("latin-1").split()
    if not words:
        return None
    if len(words) != 3:
        return Answer(400, b"not HTTP\n")
    method, target, _ = words
    route = routes.get(target.partition("?")[0])
    if route is None:
        return Answer(404, f"try {' '.join(routes)}\n".encode())
    if method != "GET":
        return Answer(405, b"GET only\n")
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await route()
    except Exception:  # noqa: BLE001 - whoever scrapes is told, and the server goes on
        _LOG.exception("GET %s failed", target[:100])
        return Answer(500, b"failed; the server's log says why\n")


def _head(answer: Answer) -> bytes:
    return (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
    ).encode()
