"""Calls over the simulated network: one request and its reply, or a stream of answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpclib import GRPCError

from modelexpress_rl.rpc import errors
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.network import Peer, SimNetwork

LATEST_S = 0.8
"""No request is carried out more than this after its caller has heard that it failed."""
_KEEPALIVE_S = 5.0


class Call:
    """What calls of both kinds share."""

    def __init__(
        self, network: SimNetwork, source: Process, peer: Peer | None, method: Any, request: Any, address: str
    ) -> None:
        self.network = network
        self.loop = network.loop
        self.source = source
        self.peer = peer
        self.method = method
        self.request = request.SerializeToString()
        self.address = address
        self.number = network.number()
        self.target = "nobody" if peer is None else peer.process.name
        self.handlers: list[asyncio.Task[Any]] = []
        self.over_at_s = float("inf")
        """After this nothing of the call is carried out any more."""

    def error(self, code: grpc.StatusCode, details: str, *, unknown: bool) -> errors.RpcError:
        return errors.rpc_error(
            code, details, method=self.method.name, address=self.address, outcome_unknown=unknown
        )

    def later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        self.loop.in_world(delay_s, callback, *args)

    def there(self) -> bool:
        return self.network.passes(self.source.name, self.target)

    def back(self) -> bool:
        return self.network.passes(self.target, self.source.name)

    def refused(self) -> errors.RpcError | None:
        """What a caller hears at once of a peer that doesn't listen."""
        peer = self.peer
        if peer is None or (not peer.process.alive and not peer.silent):
            return self.error(grpc.StatusCode.UNAVAILABLE, "connection refused", unknown=False)
        return None

    def peer_died(self) -> None:
        """The peer's host says that its process is gone."""

    def caller_died(self) -> None:
        """Nobody waits for answers any more."""
        self.network.open.pop(self.number, None)

    def end_handlers(self) -> None:
        for task in self.handlers:
            if not task.done():
                task.cancel()


class UnaryCall(Call):
    def __init__(
        self,
        network: SimNetwork,
        source: Process,
        peer: Peer | None,
        method: Any,
        request: Any,
        timeout_s: float,
        address: str,
    ) -> None:
        super().__init__(network, source, peer, method, request, address)
        self.timeout_s = timeout_s
        self.over_at_s = self.loop.time() + timeout_s
        self.answer: asyncio.Future[Any] = self.loop.create_future()
        self.sent_request = request

    async def run(self) -> Any:
        network, rng = self.network, self.network.rng
        network.on_message("send", self.source.name, self.target, self.method.name)
        network.log.add(
            self.source.name,
            "#%d %s -> %s: %s",
            self.number,
            self.method.name,
            self.target,
            self.sent_request,
        )
        await asyncio.sleep(network.delay_s())
        if self.there() and (refusal := self.refused()) is not None:
            network.log.add(self.source.name, "#%d refused", self.number)
            raise refusal
        expiry = self.loop.call_later(self.timeout_s, self._expire)
        if self.there() and rng.random() >= network.noise.drops:
            self.later(network.delay_s(), self._arrive, True)
        elif self.there() and rng.random() < 0.5:
            self.later(network.delay_s(), self._fail, "connection reset before the request was read")
        if rng.random() < network.noise.duplicates:
            self.later(network.delay_s() + rng.uniform(0, LATEST_S), self._arrive, False)
        network.open[self.number] = self
        try:
            answer = await self.answer
        except asyncio.CancelledError:
            network.log.add(self.source.name, "#%d given up", self.number)
            raise
        except errors.RpcError as error:
            network.log.add(self.source.name, "#%d failed: %s", self.number, _code(error))
            raise
        finally:
            expiry.cancel()
            network.open.pop(self.number, None)
            self.over_at_s = min(self.over_at_s, self.loop.time() + LATEST_S)
            end_s = self.over_at_s - self.loop.time() if not self.there() else network.delay_s()
            self.later(min(max(end_s, 0), LATEST_S), self.end_handlers)
        network.log.add(self.source.name, "#%d ok: %s", self.number, answer)
        network.on_answer(self.source.name, self.method.name, self.sent_request, answer)
        network.on_message("answer", self.source.name, self.target, self.method.name)
        return answer

    def _expire(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(
                self.error(
                    grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {self.timeout_s:g} s", unknown=True
                )
            )

    def _fail(self, details: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(self.error(grpc.StatusCode.UNAVAILABLE, details, unknown=True))

    def peer_died(self) -> None:
        if self.back():
            self._fail("connection reset")

    def _arrive(self, is_first: bool) -> None:
        if not self.there() or self.loop.time() >= self.over_at_s:
            return
        peer = self.peer
        assert peer is not None
        if not peer.process.alive:
            if not peer.silent:
                self._reply(
                    is_first, self.error(grpc.StatusCode.UNAVAILABLE, "connection reset", unknown=True)
                )
            return
        if not is_first:
            self.network.log.add(self.target, "#%d arrives again", self.number)
        name = f"{self.method.name} of {self.source.name}"
        self.handlers.append(peer.process.spawn(self._handle(peer, is_first), name))

    async def _handle(self, peer: Peer, is_first: bool) -> None:
        if self.loop.time() >= self.over_at_s:
            return  # read after a pause, together with the news that its caller has gone
        deadline = self.loop.call_later(self.over_at_s - self.loop.time(), asyncio.current_task().cancel)  # type: ignore[union-attr]
        try:
            outcome = await _outcome(peer, self.method, self.request, self)
        finally:
            deadline.cancel()
        self._reply(is_first, outcome)

    def _reply(self, is_first: bool, outcome: Any) -> None:
        if isinstance(outcome, errors.RpcError) and outcome.code() is grpc.StatusCode.INTERNAL:
            self.network.on_message("fault", self.source.name, self.target, f"{self.method.name}: {outcome}")
        if not is_first:
            return
        network, rng = self.network, self.network.rng
        if (self.method.name, self.source.name) in network.lost_answers:
            network.lost_answers.remove((self.method.name, self.source.name))
            return
        if rng.random() < network.noise.drops:
            network.log.add(self.target, "#%d reply lost", self.number)
            if rng.random() < 0.5:
                self.later(network.delay_s(), self._fail, "connection reset before the reply")
            return
        self.later(network.delay_s(), self._deliver, outcome)

    def _deliver(self, outcome: Any) -> None:
        if not self.back() or self.answer.done():
            return
        if isinstance(outcome, errors.RpcError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(self.method.answer_type.FromString(outcome))


async def _outcome(peer: Peer, method: Any, request: bytes, call: Call) -> Any:
    """The serialized answer, or the error that the caller hears."""
    handler = peer.handlers.get(method.path)
    if handler is None:
        return call.error(grpc.StatusCode.UNIMPLEMENTED, f"unknown method {method.path}", unknown=False)
    parsed = method.request_type.FromString(request)
    call.network.on_request(method.name, parsed)
    try:
        answer = await handler(parsed)
        return answer.SerializeToString()
    except grpc.aio.AbortError as error:
        number, details = error.args
        return errors.answered(number, details, method=method.name, address=call.address)
    except GRPCError as error:
        return errors.answered(error.status.value, error.message, method=method.name, address=call.address)


class StreamCall(Call):
    """A server's stream: in order, or broken. While the link is cut messages wait, as TCP has them wait."""

    def __init__(
        self,
        network: SimNetwork,
        source: Process,
        peer: Peer | None,
        method: Any,
        request: Any,
        silence_s: float,
        address: str,
    ) -> None:
        super().__init__(network, source, peer, method, request, address)
        self.silence_s = silence_s
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting: list[Any] = []
        self._last_at_s = 0.0
        self._closed = False
        network.log.add(source.name, "#%d %s -> %s: %s", self.number, method.name, self.target, request)

    def open(self) -> None:
        self.network.open[self.number] = self
        delay_s = self.network.delay_s()
        if self.there():
            refusal = self.refused()
            if refusal is not None:
                self.later(delay_s, self._arrived.put_nowait, refusal)
            else:
                self.later(delay_s, self._arrive)

    def close(self) -> None:
        self._closed = True
        self.network.open.pop(self.number, None)
        self.later(self.network.delay_s() if self.there() else _KEEPALIVE_S, self.end_handlers)

    def caller_died(self) -> None:
        self.close()

    def peer_died(self) -> None:
        self._say(self.error(grpc.StatusCode.UNAVAILABLE, "connection reset", unknown=True))

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            async with asyncio.timeout(self.silence_s):
                item = await self._arrived.get()
        except TimeoutError:
            details = f"no answer within {self.silence_s:g} s"
            raise self.error(grpc.StatusCode.DEADLINE_EXCEEDED, details, unknown=True) from None
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, errors.RpcError):
            self.network.log.add(self.source.name, "#%d ended: %s", self.number, _code(item))
            raise item
        answer = self.method.answer_type.FromString(item)
        self.network.log.add(self.source.name, "#%d hears: %s", self.number, answer)
        self.network.on_answer(self.source.name, self.method.name, None, answer)
        return answer

    def _arrive(self) -> None:
        peer = self.peer
        assert peer is not None
        if self._closed or not self.there():
            return
        if not peer.process.alive:
            self._say(self.error(grpc.StatusCode.UNAVAILABLE, "connection reset", unknown=True))
            return
        name = f"{self.method.name} of {self.source.name}"
        self.handlers.append(peer.process.spawn(self._handle(peer), name))

    async def _handle(self, peer: Peer) -> None:
        handler = peer.handlers.get(self.method.path)
        if handler is None:
            self._say(self.error(grpc.StatusCode.UNIMPLEMENTED, "unknown method", unknown=False))
            return
        try:
            answers = handler(self.method.request_type.FromString(self.request))
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if self._closed:
                        return
                    self._say(_encoded(answer))
        except Exception as error:
            if not isinstance(error, grpc.aio.AbortError):
                self.network.on_message(
                    "fault", self.source.name, self.target, f"{self.method.name}: {error!r}"
                )
                raise
            number, details = error.args
            self._say(errors.answered(number, details, method=self.method.name, address=self.address))
        else:
            self._say(None)

    def _say(self, item: Any) -> None:
        network = self.network
        if network.rng.random() < network.noise.resets:
            item = self.error(grpc.StatusCode.UNAVAILABLE, "connection reset", unknown=True)
        at_s = max(self.loop.time() + network.delay_s(), self._last_at_s)
        self._last_at_s = at_s
        self.later(at_s - self.loop.time(), self._deliver, item)

    def _deliver(self, item: Any) -> None:
        if self._closed:
            return
        self._waiting.append(item)
        if len(self._waiting) == 1:
            self._flow()

    def _flow(self) -> None:
        if self._closed:
            return
        if not self.back() or self.network.holds_streams:
            self.later(0.2, self._flow)
            return
        for item in self._waiting:
            self._arrived.put_nowait(item)
        self._waiting.clear()


def _encoded(answer: Any) -> bytes:
    """As the server's interceptor puts answers into bytes: some know their own."""
    encoded = getattr(answer, "encoded", None)
    data: bytes = answer.SerializeToString() if encoded is None else encoded()
    return data


def _code(error: errors.RpcError) -> str:
    return f"{error.code().name} {error.details()}"
