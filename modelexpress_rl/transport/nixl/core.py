"""What an agent's thread does with NIXL: memory, peers, prepared reads, and the reads under way.

Nothing here may be called from any other thread than the agent's driver.

Facts about NIXL 1.5.1 that shape it, found by running it:

* `postXferReq` may do the whole copy before it returns (cma, between processes of one host).
* Unloading a peer's metadata, or releasing a handle, doesn't stop a read that is under way: the status
  turns to an error at once, and the bytes land later all the same. So neither is done before the read
  has ended; only then is a read settled.
* Destroying the agent does stop them: no bytes land after that. It is destroyed with its last reference, and
  an error's traceback may hold one: so errors leave here without what their frames refer to.
* Destroyed soon after a peer died, while parts of a read from it are still queued (cma), UCX 1.21 aborts the
  process: `ucs_arbiter_group_is_empty` fails. Progress makes those parts fail, too, and empties the queue.
* Metadata of a restarted peer isn't accepted under a name that is loaded; that of a living peer is, but
  the regions that it deregistered stay. So known peers are unloaded first.
* A handle can be posted again once it is done, and never after its peer was unloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
import weakref
from collections import Counter, deque
from functools import partial
from typing import Any

import numpy as np

from modelexpress_rl.errors import PeerError, StateError, TransferError
from modelexpress_rl.transport.nixl import binding as nixl
from modelexpress_rl.transport.nixl import listener
from modelexpress_rl.transport.nixl.records import Peer, Plan, Running
from modelexpress_rl.transport.port import ReadList, Region, Registration
from modelexpress_rl.transport.reads import PostedRead
from modelexpress_rl.transport.regions import RegionTable

_log = logging.getLogger(__name__)

# Polling: spin first, so that a tiny read costs no sleep; then wait an eighth of the read's age, which
# makes no read more than that much longer. Over tcp it is the polling that moves the bytes: above 1 ms
# throughput falls. A read that nobody awaits any more has time.
SPIN_S = 100e-6
AGE_FRACTION = 8
MAX_DELAY_S = 1e-3
MAX_DELAY_ABANDONED_S = 20e-3
SETTLE_TURNS = 100
SETTLE_TURN_S = 1e-3


class Core:
    """One NIXL agent, its UCX backend, and everything that was made with them; `open` comes first."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Any thread may append: here the garbage collector leaves the plans that nobody holds any more.
        self.unheld: deque[Plan] = deque()
        self._binding: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._agent: Any = None
        self._ucx: list[Any] = []
        self._table = RegionTable()
        self._peers: dict[str, Peer] = {}
        self._plans: dict[int, Plan] = {}
        self._running: list[Running] = []
        self._running_from: Counter[str] = Counter()
        self._had_disconnect = False

    def open(self, *, readable: bool, port: int | None) -> int | None:
        """Load NIXL and start the agent; return the metadata listener's port (None asks for no listener).

        Raises:
            UsageError: NIXL isn't installed, UCX can't start, or the port is taken.
        """
        self._binding = nixl.load()
        self._errors = nixl.errors(self._binding)
        make = partial(nixl.make_agent, self._binding, self.name, readable)
        if port is None:
            self._agent = make(None)
        else:
            self._agent, port = listener.open_on_port(make, port)
        self._ucx = [nixl.add_ucx(self._binding, self._agent)]
        return port

    # Memory

    def register(self, regions: tuple[Region, ...]) -> Registration:
        done: list[Any] = []
        for each in nixl.registration_lists(self._binding, self._table.missing(regions)):
            try:
                self._agent.registerMem(each, self._ucx)
            except self._errors as error:
                for earlier in done:
                    self._agent.deregisterMem(earlier, self._ucx)
                raise TransferError(
                    f"NIXL refused to register {len(regions)} regions ({error})", peer=self.name
                ) from error
            done.append(each)
        return self._table.add(regions)

    def deregister(self, registration: Registration) -> None:
        unused = self._table.last_uses(registration)
        for running in self._running:
            if any(running.plan.reads.writes_into(region) for region in unused):
                raise StateError(
                    f"a read from {running.plan.peer.name!r} into this memory isn't settled yet; wait for it "
                    "before the memory is deregistered"
                )
        self._table.remove(registration)
        self._deregister(unused)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    # Peers

    def add_peer(self, metadata: bytes) -> str:
        name = nixl.name_in(metadata)
        if name is None:
            raise PeerError(f"these {len(metadata)} bytes are not NIXL metadata")
        if name == self.name:
            raise PeerError(f"{name!r} is this agent's own name; every agent of a job needs its own")
        known = self._peers.get(name)
        if known and known.valid and known.metadata == metadata:
            return name
        self.forget_peer(name)
        try:
            self._agent.loadRemoteMD(metadata)
        except self._errors as error:
            if self._running_from[name]:
                raise TransferError(
                    f"{name!r} restarted ({error}), and {self._running_from[name]} reads from its former "
                    "life haven't ended yet",
                    peer=name,
                ) from error
            self._unload_if_unused(name)  # it keeps what it had loaded before it came to the fault
            raise PeerError(f"NIXL refused the metadata of {name!r} ({error})") from error
        self._peers[name] = Peer(name, metadata)
        return name

    def forget_peer(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.valid = False
            self._unload_if_unused(name)

    # Reads

    def prepare(self, name: str, reads: ReadList) -> Plan:
        self._drop_unheld()
        peer = self._peers.get(name)
        if peer is None or not peer.valid:
            raise TransferError(f"peer {name!r} isn't loaded; add it with its current metadata", peer=name)
        used = reads.size_bytes > 0
        if not used.all():
            reads = reads.select(used)
        plan = Plan(peer, reads)
        if len(reads.size_bytes):
            self._make_lists(plan)
        return plan

    def drop(self, plan: Plan) -> None:
        """Release what a prepared read holds, now or when its last post has ended."""
        plan.dropped = True
        self._release_if_unused(plan)

    def start(self, plan: Plan, read: PostedRead) -> None:
        """Post a read; its end, however it comes, is told to `read`."""
        if plan.empty:
            read.finish()
            return
        if read.abandoned:
            read.finish("its deadline passed before it was started")
            return
        if not plan.peer.valid:
            read.finish(f"peer {plan.peer.name!r} changed after the read was prepared; prepare it again")
            return
        started = time.monotonic()
        try:
            handle = plan.idle.pop() if plan.idle else self._make_handle(plan)
        except self._errors as error:
            self._note_failure(plan.peer, error)
            read.finish(f"NIXL could not make the request ({error})", error.with_traceback(None))
            return
        running = Running(plan, handle, read, started)
        plan.running += 1
        self._running_from[plan.peer.name] += 1
        if not self._ended(running, partial(self._agent.postXferReq, handle, b"")):
            self._running.append(running)

    def poll(self) -> float | None:
        """Progress the reads under way; return the seconds until they want to be polled again."""
        if not self._running:
            return None
        self._running = [
            each
            for each in self._running
            if not self._ended(each, partial(self._agent.getXferStatus, each.handle))
        ]
        if not self._running:
            return None
        age_s = time.monotonic() - max(each.started for each in self._running)
        if age_s < SPIN_S:
            return 0.0
        awaited = any(not each.read.abandoned for each in self._running)
        return min(age_s / AGE_FRACTION, MAX_DELAY_S if awaited else MAX_DELAY_ABANDONED_S)

    def progress(self) -> None:
        """Progress UCX: what peers asked for is served where no progress thread does (`readable=False`)."""
        self._agent.getNotifs({}, self._ucx)

    def close(self, grace_s: float) -> None:
        """Wait `grace_s` for reads under way, then release everything; no bytes land after this."""
        if self._agent is None:
            return
        deadline = time.monotonic() + grace_s
        while (delay_s := self.poll()) is not None and time.monotonic() < deadline:
            time.sleep(delay_s)
        for plan in list(self._plans.values()):
            self.drop(plan)
        for running in self._running:
            self._release(running.handle)
        for name in list(self._peers):
            self.forget_peer(name)
        self._deregister(self._table.all())
        self._settle_queues()
        # The last reference: destroys the agent and with it UCX's worker, which ends what still ran.
        destroyed, self._agent = weakref.ref(self._agent), None
        if destroyed() is not None:
            gc.collect()
        if destroyed() is not None:
            _log.error("something still refers to the NIXL agent %s: its reads may still land", self.name)
            return
        for running in self._running:
            running.read.finish("the agent was closed while the read was under way")
        self._running = []

    def _settle_queues(self) -> None:
        """Let UCX end what is queued for peers that died; see above."""
        for _ in range(SETTLE_TURNS if self._had_disconnect else 0):
            with contextlib.suppress(*self._errors):
                self.progress()
            time.sleep(SETTLE_TURN_S)

    def disown(self) -> None:
        """In a forked child: keep the agent from ever being destroyed there."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))

    # What the above are made of

    def _drop_unheld(self) -> None:
        while self.unheld:
            self.drop(self.unheld.popleft())

    def _make_lists(self, plan: Plan) -> None:
        reads, name = plan.reads, plan.peer.name
        local_device = (reads.local_device_kind, reads.local_device_index)
        outside = self._table.uncovered(local_device, reads.local_addr, reads.size_bytes)
        if outside is not None:
            raise TransferError(
                f"run {outside} writes {reads.size_bytes[outside]} bytes at {reads.local_addr[outside]:#x}, "
                f"which isn't memory that {self.name!r} has registered",
                peer=name,
            )
        if (reads.remote_addr > np.uint64(2**64 - 1) - reads.size_bytes).any():
            # NIXL's own check of bounds would let it wrap around.
            raise TransferError(
                f"a run reaches past the end of memory that {name!r} has registered", peer=name
            )
        remote_device = (reads.remote_device_kind, reads.remote_device_index)
        local = nixl.transfer_list(self._binding, *local_device, reads.local_addr, reads.size_bytes)
        remote = nixl.transfer_list(self._binding, *remote_device, reads.remote_addr, reads.size_bytes)
        self._plans[id(plan)] = plan
        try:
            plan.local = self._agent.prepXferDlist(self._binding.NIXL_INIT_AGENT, local, self._ucx)
            plan.remote = self._agent.prepXferDlist(name, remote, self._ucx)
            plan.indices = np.arange(len(reads.size_bytes), dtype=np.int32)
            plan.idle.append(self._make_handle(plan))
        except self._errors as error:
            self.drop(plan)
            side = f"remote memory that {name!r} has registered" if plan.local else "local memory"
            raise TransferError(
                f"NIXL can't prepare {len(reads.size_bytes)} runs ({error}): not all of them lie in {side}; "
                f"remote addresses are {reads.remote_addr.min():#x} to {reads.remote_addr.max():#x}",
                peer=name,
            ) from error

    def _make_handle(self, plan: Plan) -> int:
        read = self._binding.NIXL_READ
        return int(
            self._agent.makeXferReq(
                read, plan.local, plan.indices, plan.remote, plan.indices, b"", self._ucx, False
            )
        )

    def _ended(self, running: Running, ask: partial[Any]) -> bool:
        """Ask NIXL how a read stands; where it has ended, say so and give its handle back."""
        plan = running.plan
        try:
            if ask() == self._binding.NIXL_IN_PROG:
                return False
        except self._errors as error:
            self._note_failure(plan.peer, error)
            self._release(running.handle)
            running.read.finish(f"NIXL reports {error}", error.with_traceback(None))
        else:
            plan.idle.append(running.handle)
            running.read.finish()
        plan.running -= 1
        name = plan.peer.name
        self._running_from[name] -= 1
        self._release_if_unused(plan)
        if name not in self._peers:
            self._unload_if_unused(name)
        return True

    def _note_failure(self, peer: Peer, error: BaseException) -> None:
        """After a disconnect nothing prepared for the peer works any more, even if it still lives."""
        if isinstance(error, self._binding.nixlRemoteDisconnectError):
            peer.valid = False
            self._had_disconnect = True

    def _unload_if_unused(self, name: str) -> None:
        if self._running_from[name]:
            return
        del self._running_from[name]
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors as error:
            _log.debug("NIXL could not unload %s: %s", name, error)

    def _release_if_unused(self, plan: Plan) -> None:
        if not plan.dropped and plan.peer.valid:
            return
        while plan.idle:
            self._release(plan.idle.pop())
        if plan.dropped and not plan.running and id(plan) in self._plans:
            del self._plans[id(plan)]
            for prepared in (plan.local, plan.remote):
                if prepared:
                    self._agent.releasedDlistH(prepared)

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            # It is freed with the agent.
            _log.debug("NIXL could not release a transfer of %s: %s", self.name, error)

    def _deregister(self, regions: list[Region]) -> None:
        for each in nixl.registration_lists(self._binding, regions):
            try:
                self._agent.deregisterMem(each, self._ucx)
            except self._errors as error:
                _log.warning("NIXL could not deregister memory of %s: %s", self.name, error)
