"""A server with TLS and many who connect to it at once, in one process, while its certificate rotates.

Run as a process of its own by the tests: where gRPC is given a certificate at each connection, it crashes.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import tempfile
from pathlib import Path

import grpc.aio

from modelexpress_rl.server.security import ServerSecurity
from tests.security.authority import Authority

CALLERS, CONNECTIONS, ROTATIONS = 30, 40, 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty SETTINGS


async def hammer(folder: Path) -> None:
    """Connect, shake hands, and hang up, all at once."""
    authority = Authority(folder)
    cert, key = authority.issue("server")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    trusting.set_alpn_protocols(["h2"])
    server = grpc.aio.server()
    port = ServerSecurity.of(cert=cert, key=key).add_port(server, "127.0.0.1:0")
    await server.start()

    async def connect() -> None:
        for _ in range(CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(PREFACE)
            await reader.readexactly(9)
            writer.close()

    async def rotate() -> None:
        for _ in range(ROTATIONS):
            await asyncio.sleep(0.3)
            authority.issue("server")

    async with asyncio.timeout(60):
        await asyncio.gather(rotate(), *(connect() for _ in range(CALLERS)))
    await server.stop(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(hammer(Path(folder)))
    sys.stdout.write("survived\n")
