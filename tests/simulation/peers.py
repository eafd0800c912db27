"""The clients and the endpoint that simulated processes get, and how real servicers are called."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from functools import partial
from typing import Any

import grpc
import grpc.aio

from modelexpress_rl.rpc import ControlPlane, EndpointServer, WorkerEndpoint, errors
from modelexpress_rl.rpc.address import Address
from modelexpress_rl.rpc.network import Network
from tests.simulation.calls import StreamCall
from tests.simulation.loop import Process
from tests.simulation.network import CONTROL, Peer, SimNetwork


def network_of(network: SimNetwork, process: Process) -> Network:
    """What the clients of a process get."""
    return Network(
        partial(SimControl, network, process),
        partial(SimEndpoint, network, process),
        partial(SimListener, network, process),
    )


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
            return await self._network.unary(
                self._process, self._peer(), method, request, timeout_s, str(self.address)
            )
        except errors.RpcError as error:
            self._judge(error)
            raise

    @contextlib.asynccontextmanager
    async def stream(
        self, method: Any, request: Any, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[Any], None]:
        call = StreamCall(
            self._network, self._process, self._peer(), method, request, silence_s, str(self.address)
        )
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
        address = str(self.address)
        peer = self._network.workers.get(address)
        return await self._network.unary(self._process, peer, method, request, timeout_s, address)

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

    def time_remaining(self) -> float | None:
        return None

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
