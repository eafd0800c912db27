"""An event loop on virtual time, in which several processes live that can be paused and killed.

Nothing is awaited that is real: where nobody is ready, time jumps to the next timer. Each callback
belongs to the process in whose context it was scheduled. A killed process runs nothing any more, not
even its `finally` blocks; a paused one does later what it would have done, first what came from outside,
then its timers, as a real loop does after SIGCONT.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import heapq
import inspect
import random
import sys
from asyncio import Handle
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextvars import Context, ContextVar, copy_context
from typing import Any

import anyio.lowlevel
from anyio._backends import _asyncio as backend

from modelexpress_rl import quiet_threads

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
MOST_AT_ONE_TIME = 200_000
THREAD_S = (0.0001, 0.02)


class Deadlock(Exception):
    """Nobody is ready and no timer is set, or nobody lets time pass."""


class Process:
    """One simulated process: its tasks, and what it may not run at present."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self._loop = loop
        self._held: list[tuple[bool, Handle]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._context = copy_context()
        self._context.run(PROCESS.set, self)
        loop.processes.append(self)

    def __str__(self) -> str:
        return self.name

    @property
    def runs(self) -> bool:
        """Whether its callbacks are run."""
        return self.alive and not self.paused

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task of this process."""
        return self._loop.create_task(work, name=name, context=self._context.copy())

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Remember a task that was started in this process."""
        self._tasks.append(task)
        if len(self._tasks) > 256:
            self._tasks = [one for one in self._tasks if not one.done()]

    def hold(self, handle: Handle) -> None:
        """Keep a callback that may not run now."""
        self._held.append((isinstance(handle, asyncio.TimerHandle), handle))

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs any more."""
        self.alive = False

    def pause(self) -> None:
        """As SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """As SIGCONT: what arrived comes first, then the timers that are due."""
        self.paused = False
        self._release()

    def bury(self) -> None:
        """Let a dead process's tasks come to their end, so that nothing is left to the collector."""
        self.alive, self.paused = True, False
        self._release()
        self.cancel()

    def cancel(self) -> None:
        """Cancel every task that has begun and not ended."""
        for task in self._tasks:
            if not task.done() and inspect.getcoroutinestate(task.get_coro()) != inspect.CORO_CREATED:  # type: ignore[arg-type]
                task.cancel()

    @property
    def ended(self) -> bool:
        """Whether no task of it is left."""
        return all(task.done() for task in self._tasks)

    @property
    def left(self) -> list[str]:
        """The tasks that have not ended, by name."""
        return [task.get_name() for task in self._tasks if not task.done()]

    def _release(self) -> None:
        held, self._held = self._held, []
        for timers in (False, True):
            for is_timer, handle in held:
                if is_timer is timers and not handle.cancelled():
                    self._loop.make_ready(handle)


class SimLoop(asyncio.BaseEventLoop):
    """See the module. `after_event` is called once the callbacks of one round have run."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.processes: list[Process] = []
        self.rounds = 0
        self.callbacks = 0
        self.after_event: Callable[[], None] = lambda: None
        self.failures: list[str] = []
        self._rng = rng
        self._now_s = 0.0
        self._at_this_time = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self.set_task_factory(_make_task)
        self.set_exception_handler(_note_failure)

    def time(self) -> float:
        return self._now_s

    def thread_delay_s(self) -> float:
        """How long a thread takes for what it was given."""
        return self._rng.uniform(*THREAD_S)

    def make_ready(self, handle: Handle) -> None:
        """Run a held callback soon."""
        self._ready.append(handle)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def in_world(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call later, in no process."""
        return self.call_later(delay_s, callback, *args, context=Context())

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        raise AssertionError("a thread in a simulation")

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not ready:
            if not timers:
                raise Deadlock("nobody is ready and no timer is set")
            if timers[0][0] > self._now_s:
                self._now_s = timers[0][0]
                self._at_this_time = 0
        while timers and timers[0][0] <= self._now_s:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        self.rounds += 1
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None and not process.runs:
                process.hold(handle)
                continue
            self.callbacks += 1
            self._at_this_time += 1
            handle._run()
        if self._at_this_time > MOST_AT_ONE_TIME:
            raise Deadlock(f"{MOST_AT_ONE_TIME} callbacks, and the time is still {self._now_s:.3f} s")
        self.after_event()

    def _write_to_self(self) -> None:
        """What wakes a loop that waits; this one never does."""

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays where it is, and is passed over when its time comes."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, **more)
    context = more.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.adopt(task)
    return task


def _note_failure(loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
    assert isinstance(loop, SimLoop)
    loop.failures.append(f"{about.get('message')}: {about.get('exception')!r}")


class _Ordered(dict[Any, None]):
    """A set whose order is that in which things came."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


class _SeededRandom(random.Random):
    """What `random.Random()` is in a simulation: without a seed it takes one from `random`."""

    def __init__(self, seed: Any = None) -> None:
        super().__init__(random.getrandbits(64) if seed is None else seed)


async def _in_virtual_thread(
    func: Callable[..., Any], args: tuple[Any, ...], abandon_on_cancel: bool = False, limiter: Any = None
) -> Any:
    """A thread takes some time and can't be cancelled; what it does happens at the end of that time."""
    await anyio.lowlevel.checkpoint()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    async with limiter or contextlib.nullcontext():
        with anyio.CancelScope(shield=not abandon_on_cancel):
            await asyncio.sleep(loop.thread_delay_s())
            return func(*args)


class _VirtualPool:
    """A pool of threads, each of which takes some time."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        loop, future = asyncio.get_running_loop(), Future[Any]()
        assert isinstance(loop, SimLoop)
        loop.call_later(loop.thread_delay_s(), self._do, work, future)
        return future

    def _do(self, work: Callable[[], Any], future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 (whoever waits gets it)
                future.set_exception(error)


@contextlib.contextmanager
def determinism(seed: int) -> Iterator[None]:
    """What would differ from run to run follows from `seed`: chance, threads, the order of sets.

    These are all the places at which the simulation takes the hand of the libraries below.
    """
    random_class, random_state = random.Random, random.getstate()
    threads = quiet_threads._threads
    make_scope, in_thread = backend.CancelScope.__init__, backend.AsyncIOBackend.run_sync_in_worker_thread

    def make_ordered_scope(self: Any, *args: Any, **named: Any) -> None:
        make_scope(self, *args, **named)
        self._child_scopes, self._tasks = _Ordered(), _Ordered()

    collecting = gc.isenabled()
    _reseed_modules(seed)
    random.seed(seed)
    random.Random = _SeededRandom  # type: ignore[misc]
    backend.CancelScope.__init__ = make_ordered_scope
    backend.AsyncIOBackend.run_sync_in_worker_thread = staticmethod(_in_virtual_thread)
    quiet_threads._threads = _VirtualPool  # type: ignore[assignment]
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        quiet_threads._threads = threads
        backend.AsyncIOBackend.run_sync_in_worker_thread = in_thread
        backend.CancelScope.__init__ = make_scope
        random.Random = random_class  # type: ignore[misc]
        random.setstate(random_state)


def _reseed_modules(seed: int) -> None:
    """The generators that modules of ours keep in their globals."""
    for name, generator in _generators():
        generator.seed(f"{seed} {name}")


@functools.cache
def _generators() -> tuple[tuple[str, random.Random], ...]:
    return tuple(
        (f"{name}.{attribute}", value)
        for name in sorted(sys.modules)
        if name.startswith("modelexpress_rl")
        for attribute, value in sorted(vars(sys.modules[name]).items())
        if isinstance(value, random.Random)
    )
