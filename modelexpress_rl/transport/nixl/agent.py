"""The NIXL adapter of the transport port: an async face of one agent and its thread."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Self, TypeVar

import anyio

from modelexpress_rl import envs
from modelexpress_rl.errors import DeadlineExceeded, StateError, TransferError, UsageError
from modelexpress_rl.transport.nixl import listener
from modelexpress_rl.transport.nixl.core import Core
from modelexpress_rl.transport.nixl.driver import Driver
from modelexpress_rl.transport.nixl.records import Plan
from modelexpress_rl.transport.port import PreparedRead, ReadList, Region, Registration
from modelexpress_rl.transport.reads import PostedRead, result_of

_log = logging.getLogger(__name__)

T = TypeVar("T")
START_TIMEOUT_S = 60.0
# Over tcp a peer may abort where its reader goes with reads under way: let them end.
CLOSE_GRACE_S = 3.0
CLOSE_TIMEOUT_S = 10.0

EXIT_TIMEOUT_S = 2.0


class NixlPreparedRead:
    """A read list that NIXL has prepared; what it holds is released some time after it is collected."""

    def __init__(self, plan: Plan, core: Core) -> None:
        self.plan = plan
        self.core = core
        self._total_bytes = plan.reads.total_bytes
        # Only an append: the collector may run anywhere, also where a lock is held.
        weakref.finalize(self, core.unheld.append, plan).atexit = False

    @property
    def peer(self) -> str:
        return self.plan.peer.name

    @property
    def total_bytes(self) -> int:
        return self._total_bytes


class NixlAgent:
    """A NIXL agent with the UCX backend; implements `port.Agent`.

    All of NIXL is entered by one thread of the agent, which also polls the reads under way. Several
    agents may live in one process, on any event loops; one agent may be used from several loops.
    An agent doesn't survive `fork`: a child must make its own.

    Reads between processes of one host go through cma (one copy, 5 GiB/s), if the kernel allows it; then
    the peer takes no part in them at all. Over tcp the peer's progress thread sends the bytes. There,
    UCX 1.21 may abort a peer whose reader died, or closed its agent, with reads under way: it takes a
    failed send of a reply for impossible. Nothing here can prevent that; see docs/transport.md.
    """

    def __init__(self, name: str, core: Core, driver: Driver, metadata_endpoint: str) -> None:
        self._name = name
        self._core = core
        self._driver = driver
        self._metadata_endpoint = metadata_endpoint
        self._closing: Future[None] | None = None
        _open_agents.add(self)

    @classmethod
    async def create(
        cls,
        name: str | None = None,
        *,
        readable: bool = True,
        listen: bool | None = None,
        host: str | None = None,
        metadata_port: int | None = None,
        device_index: int = 0,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Start an agent; loading NIXL for the first time takes seconds, in a thread.

        Args:
            name: unique in the job; None for one made of host, process and a random part.
            readable: False for an agent that only reads. It has no progress thread, which makes its own
                reads over tcp 1.5 times as fast; a peer that reads from it would wait for ever.
            listen: run NIXL's metadata listener; None: if `readable`.
            host: what `metadata_endpoint` advertises; None for MX_WORKER_HOST, or this host's address.
            metadata_port: of the listener; 0 for a free one; None for MX_METADATA_PORT plus
                `device_index`, and a free one where that is unset.
            start_timeout_s: seconds until it is given up.

        Raises:
            UsageError: NIXL isn't installed, UCX can't start, or the configured port is taken.
            DeadlineExceeded: it took longer than `start_timeout_s`.
        """
        name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        port = _listener_port(readable if listen is None else listen, metadata_port, device_index)
        core = Core(name)
        driver = Driver(f"nixl {name}", core.poll)
        try:
            with anyio.fail_after(start_timeout_s):
                port = await result_of(driver.submit(partial(core.open, readable=readable, port=port)))
            endpoint = "" if port is None else listener.endpoint(host or envs.worker_host(), port)
        except BaseException as error:
            # Runs when the thread comes to it: an agent that started too late is destroyed again.
            driver.submit(partial(core.close, 0.0))
            driver.stop()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"NIXL agent {name!r} did not start within {start_timeout_s} s"
                ) from error
            raise
        return cls(name, core, driver, endpoint)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def name(self) -> str:
        return self._name

    @property
    def metadata_endpoint(self) -> str:
        return self._metadata_endpoint

    async def register(self, regions: Sequence[Region]) -> Registration:
        made = self._submit(partial(self._core.register, tuple(regions)))
        try:
            return await result_of(made)
        except anyio.get_cancelled_exc_class():
            made.add_done_callback(self._undo_registration)
            raise

    async def deregister(self, registration: Registration) -> None:
        if self._closing is None:
            await result_of(self._submit(partial(self._core.deregister, registration)))

    async def metadata(self) -> bytes:
        return await result_of(self._submit(self._core.metadata))

    async def add_peer(self, metadata: bytes) -> str:
        return await result_of(self._submit(partial(self._core.add_peer, metadata)))

    async def forget_peer(self, peer: str) -> None:
        if self._closing is None:
            await result_of(self._submit(partial(self._core.forget_peer, peer)))

    async def prepare(self, peer: str, reads: ReadList) -> NixlPreparedRead:
        return await result_of(self._submit(partial(self._prepare, peer, reads)))

    async def post(self, prepared: PreparedRead) -> PostedRead:
        self._check_open()
        if not isinstance(prepared, NixlPreparedRead) or prepared.core is not self._core:
            raise UsageError(f"{prepared!r} was not prepared by the agent {self._name!r}")
        if not prepared.plan.peer.valid:
            raise TransferError(
                f"peer {prepared.peer!r} was forgotten, changed or lost the connection after this read was "
                "prepared; add it with its current metadata and prepare again",
                peer=prepared.peer,
            )
        read = PostedRead(prepared.peer, prepared.total_bytes)
        self._submit(partial(self._core.start, prepared.plan, read))
        return read

    async def aclose(self) -> None:
        """Release everything; bounded, and shielded from cancellation. A second call waits for the first."""
        if self._closing is None:
            self._closing = self._begin_close(CLOSE_GRACE_S)
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True) as scope:
            await result_of(self._closing)
        if scope.cancelled_caught:
            _log.warning("NIXL agent %s has not closed within %s s", self._name, CLOSE_TIMEOUT_S)

    def _begin_close(self, grace_s: float) -> Future[None]:
        closing = self._driver.submit(partial(self._core.close, grace_s))
        self._driver.stop()
        return closing

    def _submit(self, command: Callable[[], T]) -> Future[T]:
        self._check_open()
        return self._driver.submit(command)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise StateError(f"NIXL agent {self._name!r} is closed")

    def _prepare(self, peer: str, reads: ReadList) -> NixlPreparedRead:
        # Wrapped in the thread, so that a caller that was cancelled leaves nothing behind.
        return NixlPreparedRead(self._core.prepare(peer, reads), self._core)

    def _undo_registration(self, made: Future[Registration]) -> None:
        if made.exception() is None:
            with contextlib.suppress(StateError):
                self._driver.submit(partial(self._core.deregister, made.result()))


def _listener_port(listen: bool, configured: int | None, device_index: int) -> int | None:
    if not listen:
        return None
    return envs.metadata_port(device_index) if configured is None else configured


_open_agents: weakref.WeakSet[NixlAgent] = weakref.WeakSet()


def _close_at_exit() -> None:
    """Close what the program left open: destroyed while the interpreter goes down, NIXL may crash."""
    for agent in list(_open_agents):
        if agent._closing is None:
            agent._closing = agent._begin_close(grace_s=0.0)
        with contextlib.suppress(FutureTimeoutError):
            agent._closing.result(EXIT_TIMEOUT_S)


def _disown_in_child() -> None:
    """In a forked child: never touch, nor destroy, what shares the parent's sockets."""
    for agent in list(_open_agents):
        agent._core.disown()
    _open_agents.clear()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_disown_in_child)
