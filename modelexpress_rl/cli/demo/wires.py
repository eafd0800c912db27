"""How the demo's orchestrator and its processes talk: JSON lines over one Unix socket.

Only commands and reports pass here; weights go over the transport, versions over the control plane.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

SOCKET_VARIABLE = "MX_DEMO_SOCKET"
_LINE_BYTES = 1 << 20


class Line:
    """One end of a connection; `send` and iterate."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._reader = BufferedByteReceiveStream(stream)
        self._lock = anyio.Lock()

    async def send(self, **message: Any) -> None:
        """Send one message; concurrent senders take turns."""
        async with self._lock:
            await self._stream.send(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """Receive one message.

        Raises:
            anyio.EndOfStream: the other end is gone.
        """
        try:
            line = await self._reader.receive_until(b"\n", _LINE_BYTES)
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError) as gone:
            raise anyio.EndOfStream from gone
        message: dict[str, Any] = json.loads(line)
        return message

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            try:
                yield await self.receive()
            except anyio.EndOfStream:
                return

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()


async def connect() -> Line:
    """Connect a process of the demo to its orchestrator."""
    return Line(await anyio.connect_unix(os.environ[SOCKET_VARIABLE]))
