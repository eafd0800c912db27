"""A TCP proxy that loses what it is told to lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Passes everything on to a port of this host; `lose_replies` more replies break their connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.lose_replies = 0
        self.before_losing: asyncio.Event | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Proxy]:
        proxy = cls(port)
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            proxy.cut()
            await server.wait_closed()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, there_writer}
        back = asyncio.create_task(self._pass(there_reader, writer, there_writer, replies=True))
        await self._pass(reader, there_writer, writer, replies=False)
        with suppress(asyncio.CancelledError):
            await back
        for one in (writer, there_writer):
            one.close()
            with suppress(OSError):
                await one.wait_closed()
        self._writers -= {writer, there_writer}

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        *,
        replies: bool,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if replies and self.lose_replies:
                    self.lose_replies -= 1
                    if self.before_losing is not None:
                        await self.before_losing.wait()
                    break
                writer.write(data)
                await writer.drain()
        writer.close()
        other.close()
