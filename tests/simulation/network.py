"""A faulty network between processes: calls and streams to real servicers, without a wire.

Requests and replies are lost, delayed, duplicated and overtaken by others; links are cut in one or both
directions; peers die with or without a word. What is kept is what gRPC over TCP keeps: a stream is in
order or breaks, a handler is cancelled at its caller's deadline, and nothing of a call is carried out
more than `LATEST_S` after its caller has heard that it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpclib import GRPCError

from modelexpress_rl.rpc import ControlPlane, EndpointServer, WorkerEndpoint, errors
from modelexpress_rl.rpc.address import Address
from modelexpress_rl.rpc.network import Network
from tests.simulation.log import EventLog
from tests.simulation.loop import Process, SimLoop

LATEST_S = 0.8
CONTROL = Address("control", 8001)
_KEEPALIVE_S = 5.0


@dataclass
class Noise:
    """What happens to any message, by chance."""

    drops: float = 0.0
    resets: float = 0.0
    duplicates: float = 0.0
    delay_s: tuple[float, float] = (0.0003, 0.004)


@dataclass(eq=False)
class Peer:
    """What listens at an address: a process, and its handlers by method path."""

    process: Process
    handlers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    silent: bool = False
    """Dead without a word: a host that lost its power resets no connection."""


class SimNetwork:
    """All links; `cut` and `mend` them, make `noise`."""

    def __init__(self, loop: SimLoop, rng: random.Random, log: EventLog) -> None:
        self.loop = loop
        self.rng = rng
        self.log = log
        self.noise = Noise()
        self.replica_names: list[str] = []
        self.replicas: dict[str, Peer] = {}
        self.workers: dict[str, Peer] = {}
        self.without_digests: set[str] = set()
        self.lost_answers: set[tuple[str, str]] = set()
        """The next answer to this method that this process does not hear."""
        self.holds_streams = False
        """What lets calls through and nothing of streams, as some proxies do."""
        self.on_message: Callable[[str, str, str, str], None] = lambda phase, source, target, method: None
        self.on_request: Callable[[str, Any], None] = lambda method, request: None
        self.on_answer: Callable[[str, str, Any, Any], None] = lambda source, method, request, answer: None
        self.open: dict[int, _Call] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._ports = iter(range(20_000, 60_000))
        self._calls = 0

    def network_of(self, process: Process) -> Network:
        """What the clients of a process get."""
        return Network(
            partial(SimControl, self, process),
            partial(SimEndpoint, self, process),
            partial(SimListener, self, process),
        )

    # Faults.

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from `source` to `target` any more; cuts add up."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def mend(self, source: str, target: str) -> None:
        """Take one cut back."""
        left = self._cuts.get((source, target), 0) - 1
        if left > 0:
            self._cuts[source, target] = left
        else:
            self._cuts.pop((source, target), None)

    def mend_all(self) -> None:
        self._cuts.clear()
        self.noise = Noise()
        self.holds_streams = False

    def passes(self, source: str, target: str) -> bool:
        """Whether anything gets from one to the other."""
        return (source, target) not in self._cuts

    def delay_s(self) -> float:
        return self.rng.uniform(*self.noise.delay_s)

    # Listening.

    def port(self) -> int:
        return next(self._ports)

    def forget(self, process: Process, *, silent: bool) -> None:
        """A process died: its connections are reset, or (silent) nothing more is heard of it."""
        for peers in (self.replicas, self.workers):
            for peer in peers.values():
                if peer.process is process:
                    peer.silent = silent
        for call in list(self.open.values()):
            if call.source is process:
                call.caller_died()
            elif call.peer is not None and call.peer.process is process and not silent:
                call.later(self.delay_s(), call.peer_died)

    # Calls.

    async def unary(
        self, source: Process, resolve: Callable[[], Peer | None], method: Any, request: Any, timeout_s: float
    ) -> Any:
        """One call, as `rpc.channel.Client.call` makes it."""
        call = _Unary(self, source, resolve(), method, request, timeout_s)
        return await call.run()

    def number(self) -> int:
        self._calls += 1
        return self._calls


class _Call:
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


class _Unary(_Call):
    def __init__(
        self,
        network: SimNetwork,
        source: Process,
        peer: Peer | None,
        method: Any,
        request: Any,
        timeout_s: float,
    ) -> None:
        super().__init__(network, source, peer, method, request, str(CONTROL))
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


async def _outcome(peer: Peer, method: Any, request: bytes, call: _Call) -> Any:
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


class _Stream(_Call):
    """A server's stream: in order, or broken. While the link is cut messages wait, as TCP has them wait."""

    def __init__(
        self,
        network: SimNetwork,
        source: Process,
        peer: Peer | None,
        method: Any,
        request: Any,
        silence_s: float,
    ) -> None:
        super().__init__(network, source, peer, method, request, str(CONTROL))
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


class SimControl(ControlPlane):
    """The control plane's client of one process: it stays with a replica until that fails."""

    def __init__(
        self, network: SimNetwork, process: Process, address: Any, *, rpc_timeout_s: float = 30.0, **_: Any
    ) -> None:
        super().__init__(CONTROL, rpc_timeout_s=rpc_timeout_s)
        self._network = network
        self._process = process
        self._replica: str | None = None

    async def call(self, method: Any, request: Any, timeout_s: float | None, metadata: Any = None) -> Any:
        timeout_s = self.rpc_timeout_s if timeout_s is None else timeout_s
        try:
            return await self._network.unary(self._process, self._peer, method, request, timeout_s)
        except errors.RpcError as error:
            self._judge(error)
            raise

    @contextlib.asynccontextmanager
    async def stream(
        self, method: Any, request: Any, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[Any], None]:
        call = _Stream(self._network, self._process, self._peer(), method, request, silence_s)
        call.open()
        try:
            yield call
        except errors.RpcError as error:
            self._judge(error)
            raise
        finally:
            call.close()

    async def aclose(self) -> None:
        return

    def _judge(self, error: errors.RpcError) -> None:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            self._replica = None

    def _peer(self) -> Peer | None:
        if self._replica is None:
            self._replica = self._network.rng.choice(self._network.replica_names)
        return self._network.replicas.get(self._replica)


class SimEndpoint(WorkerEndpoint):
    """A trainer's manifests, as another process reaches them."""

    def __init__(
        self,
        network: SimNetwork,
        process: Process,
        address: Address,
        *,
        rpc_timeout_s: float = 30.0,
        **_: Any,
    ) -> None:
        super().__init__(address, rpc_timeout_s=rpc_timeout_s)
        self._network = network
        self._process = process

    async def call(self, method: Any, request: Any, timeout_s: float | None, metadata: Any = None) -> Any:
        timeout_s = self.rpc_timeout_s if timeout_s is None else timeout_s
        return await self._network.unary(
            self._process, lambda: self._network.workers.get(str(self.address)), method, request, timeout_s
        )

    async def aclose(self) -> None:
        return


class SimListener(EndpointServer):
    """What a trainer serves its manifests with."""

    def __init__(
        self,
        network: SimNetwork,
        process: Process,
        services: Collection[Any],
        *,
        host: str | None = None,
        port: int = 0,
        **_: Any,
    ) -> None:
        super().__init__(services, host=host, port=port)
        self._network = network
        self._process = process

    async def start(self) -> None:
        self.port = self._network.port()
        handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        for service in self._services:
            for path, handler in service.__mapping__().items():
                if self._process.name in self._network.without_digests and path.endswith("GetShardDigests"):
                    continue
                handlers[path] = partial(_serve_grpclib, handler.func)
        self._network.workers[f"127.0.0.1:{self.port}"] = Peer(self._process, handlers)

    async def aclose(self, *, grace_s: float = 1.0) -> None:
        self._network.workers.pop(f"127.0.0.1:{self.port}", None)


class _GrpclibStream:
    """What a grpclib handler gets for one call."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.metadata: dict[str, Any] = {}
        self.answer: Any = None

    async def recv_message(self) -> Any:
        return self._request

    async def send_message(self, message: Any) -> None:
        self.answer = message


async def _serve_grpclib(handle: Callable[[Any], Awaitable[None]], request: Any) -> Any:
    stream = _GrpclibStream(request)
    await handle(stream)
    return stream.answer


class _Context:
    """What a grpc.aio handler gets."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise grpc.aio.AbortError(code.value[0], details)

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def peer(self) -> str:
        return "simulation"


def served(services: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """The handlers of grpc.aio servicers, by method path; `services` are by full name."""
    handlers: dict[str, Callable[[Any], Any]] = {}
    for name, servicer in services.items():
        for base in type(servicer).__mro__[1:2]:
            for method in vars(base):
                if not method.startswith("_"):
                    handlers[f"/{name}/{method}"] = partial(_serve_aio, getattr(servicer, method))
    return handlers


def _serve_aio(handle: Callable[[Any, Any], Any], request: Any) -> Any:
    return handle(request, _Context())


def _encoded(answer: Any) -> bytes:
    """As the server's interceptor puts answers into bytes: some know their own."""
    encoded = getattr(answer, "encoded", None)
    data: bytes = answer.SerializeToString() if encoded is None else encoded()
    return data


def _code(error: errors.RpcError) -> str:
    return f"{error.code().name} {error.details()}"
