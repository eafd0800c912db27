"""A generator of a fleet in another process: a line of JSON and a connection for each call."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from modelexpress_rl import errors
from modelexpress_rl.errors import ModelExpressError, Unavailable
from modelexpress_rl.fleet import FleetGenerator, Holding

MAX_LINE = 1 << 16


class RemoteGenerator:
    """A `FleetGenerator` that asks another process."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def stage(self, version_id: str, *, keep_s: float) -> None:
        await self.ask("stage", version_id=version_id, keep_s=keep_s)

    async def install(self, version_id: str, *, hold_s: float) -> None:
        await self.ask("install", version_id=version_id, hold_s=hold_s)

    async def resume(self, version_id: str) -> None:
        await self.ask("resume", version_id=version_id)

    async def abort(self, version_id: str, *, back_to: str | None) -> None:
        await self.ask("abort", version_id=version_id, back_to=back_to)

    async def holds(self) -> Holding:
        return Holding(**await self.ask("holds"))

    async def ask(self, call: str, **arguments: Any) -> Any:
        """Call it there; its errors are raised here, by their class."""
        try:
            async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
                await stream.send(json.dumps({"call": call, **arguments}).encode() + b"\n")
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_LINE)
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.IncompleteRead) as error:
            raise Unavailable(f"the generator at port {self.port} is gone") from error
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["error"], ModelExpressError)
            raise kind(answer["message"])
        return answer["value"]


async def serve_calls(generator: FleetGenerator, more: dict[str, Any]) -> None:
    """Serve the calls of `generator`, and those of `more`; prints the port."""

    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_LINE)
            asked = json.loads(line)
            call = asked.pop("call")
            try:
                value = await more.get(call, getattr(generator, call, None))(**asked)
                answer: dict[str, Any] = {"value": asdict(value) if isinstance(value, Holding) else value}
            except ModelExpressError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            await stream.send(json.dumps(answer).encode() + b"\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        print(f"port {listener.extra(anyio.abc.SocketAttribute.local_port)}", flush=True)
        await listener.serve(handle)
