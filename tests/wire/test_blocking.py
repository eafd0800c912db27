"""The event loop behind a blocking client: it ends, it is not shared with a fork, it can't deadlock."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from modelexpress_rl import blocking
from modelexpress_rl.blocking import Portal
from modelexpress_rl.errors import StateError

ROOT = Path(__file__).resolve().parents[2]


async def _double(number: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * number


async def _fail() -> None:
    raise KeyError("as it is")


def test_results_and_errors_come_through() -> None:
    with Portal("test") as portal:
        assert portal.call(_double, 21) == 42
        with pytest.raises(KeyError, match="as it is"):
            portal.call(_fail)
    assert portal.closed
    with pytest.raises(StateError, match="test is closed"):
        portal.call(_double, 1)
    portal.close()


def test_what_was_entered_is_left_in_reverse_by_the_same_task() -> None:
    events: list[str] = []

    @contextlib.asynccontextmanager
    async def opened(name: str) -> AsyncIterator[str]:
        async with anyio.create_task_group() as tasks:  # needs to be left by the task that entered it
            tasks.start_soon(anyio.sleep_forever)
            events.append(f"open {name}")
            yield name
            tasks.cancel_scope.cancel()
        events.append(f"close {name}")

    with Portal("test") as portal:
        assert portal.enter(opened("a")) == "a"
        assert portal.enter(opened("b")) == "b"
    assert events == ["open a", "open b", "close b", "close a"]


def test_an_error_while_closing_is_raised_after_the_loop_ended() -> None:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        yield
        raise OSError("the last goodbye failed")

    portal = Portal("test")
    portal.enter(opened())
    with pytest.raises(OSError, match="goodbye"):
        portal.close()
    assert not portal._thread.is_alive()


def test_closing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        yield
        await anyio.sleep_forever()

    monkeypatch.setattr(blocking, "CLOSE_TIMEOUT_S", 0.1)
    portal = Portal("test")
    portal.enter(opened())
    portal.close()
    assert portal.closed


def test_a_blocking_call_in_its_own_loop_is_refused() -> None:
    async def again(portal: Portal) -> None:
        portal.call(_double, 1)

    with Portal("test") as portal, pytest.raises(StateError, match="own event loop"):
        portal.call(again, portal)


def test_many_threads_may_call() -> None:
    results: list[int] = []
    with Portal("test") as portal:
        threads = [
            threading.Thread(target=lambda n=n: results.append(portal.call(_double, n))) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert sorted(results) == [0, 2, 4, 6, 8, 10, 12, 14]


def test_iterating_ends_and_closes() -> None:
    closed = threading.Event()

    async def count() -> AsyncIterator[int]:
        try:
            for number in range(3):
                yield number
        finally:
            closed.set()

    with Portal("test") as portal:
        assert list(portal.iterate(count())) == [0, 1, 2]
        closed.clear()
        with portal.iterate(count()) as numbers:
            assert next(numbers) == 0
        assert closed.is_set()


FORGOTTEN = """
import anyio
import anyio.lowlevel
from modelexpress_rl.blocking import Portal
portal = Portal("forgotten")
portal.call(anyio.sleep, 0)
"""

FORKED = """
import os, anyio
from modelexpress_rl.blocking import Portal
from modelexpress_rl.errors import StateError
portal = Portal("forked")
portal.call(anyio.sleep, 0)
child = os.fork()
if child == 0:
    try:
        portal.call(anyio.sleep, 0)
    except StateError as error:
        portal.close()
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(2)
_, status = os.waitpid(child, 0)
portal.close()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""

INTERRUPTED = """
import os, signal, threading, anyio
from modelexpress_rl.blocking import Portal
portal = Portal("interrupted")
ended = threading.Event()
async def wait():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()
    finally:
        ended.set()
try:
    portal.call(wait)
except KeyboardInterrupt:
    raise SystemExit(7 if ended.wait(10) else 1)
"""


@pytest.mark.parametrize(("program", "wanted"), [(FORGOTTEN, 0), (FORKED, 7), (INTERRUPTED, 7)])
def test_programs_end(program: str, wanted: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        timeout=30,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == wanted, done.stderr
