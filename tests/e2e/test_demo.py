"""The demo is the main job on real parts: it must prove its bytes, whatever happens to the control plane."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.processes import MX_RL, Running, running, serve

pytest.importorskip("torch")
pytest.importorskip("nixl")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

SMALL = ("--hidden", "64", "--layers", "2", "--vocab", "256")


def _demo(*options: str) -> contextlib.AbstractContextManager[Running]:
    return running([*MX_RL, "demo", *SMALL, *options])


def _megatron() -> None:
    pytest.importorskip("megatron.core")


def test_toy_trainer_in_place() -> None:
    with _demo("--trainer", "toy", "--steps", "2") as demo:
        assert demo.wait(120) == 0, demo.text
    assert "Proven: after each of 2 steps, all 5 generator ranks" in demo.text.replace("\n", " ")


def test_copies_to_the_host_while_training_goes_on() -> None:
    _megatron()
    with _demo("--mode", "copy_to_host", "--steps", "3") as demo:
        assert demo.wait(120) == 0, demo.text


def test_a_control_plane_on_sqlite_is_killed_and_restarted_in_the_middle(tmp_path: Path) -> None:
    _megatron()
    store = f"sqlite:{tmp_path / 'versions.db'}"
    with serve(store) as (first, address):
        port = int(address.rsplit(":", 1)[1])
        with _demo("--server", address, "--steps", "4") as demo:
            demo.wait_for_line("step 1:", 90)
            os.killpg(first.process.pid, signal.SIGKILL)
            first.process.wait(10)
            with serve(store, port):
                assert demo.wait(150) == 0, demo.text
    assert "Proven: after each of 4 steps" in demo.text


@pytest.mark.parametrize("when", ["step 1:", "step 2:"])
def test_a_control_plane_in_memory_comes_back_empty(when: str) -> None:
    with _demo("--trainer", "toy", "--steps", "4") as demo:
        demo.wait_for_line(when, 90)
        server = int(re.search(r"control plane at .*, process (\d+)", demo.text)[1])  # type: ignore[index]
        os.kill(server, signal.SIGKILL)
        assert demo.wait(150) == 0, demo.text
    assert "starting it again" in demo.text


def test_what_is_missing_is_named() -> None:
    with _demo("--hidden", "33") as demo:
        assert demo.wait(30) == 2
    assert "--hidden must be at least 32 and a multiple of 32, not 33" in demo.text


def test_a_store_that_cannot_be_opened_ends_the_demo() -> None:
    with _demo("--trainer", "toy", "--store", "sqlite:/nonexistent/versions.db") as demo:
        assert demo.wait(60) == 1
    assert "/nonexistent/versions.db" in demo.text


@pytest.mark.parametrize("how", ["the demo is killed", "a trainer rank is stopped and the demo interrupted"])
def test_nothing_outlives_the_demo(how: str) -> None:
    _megatron()
    with _demo("--steps", "100") as demo:
        demo.wait_for_line("step 1:", 90)
        started = _descendants(demo.process.pid)
        assert len(started) >= 6, started  # the control plane, two generators, torchrun, two ranks
        if how == "the demo is killed":
            demo.process.kill()
        else:
            [rank, *_] = [
                pid
                for pid, words in started.items()
                if "-u" in words and "modelexpress_rl.cli.demo.trainer" in words
            ]
            os.kill(rank, signal.SIGSTOP)
            demo.process.send_signal(signal.SIGINT)
        demo.wait(60)
        deadline = time.monotonic() + 10
        while left := {pid for pid in started if _words(pid) == started[pid]}:
            assert time.monotonic() < deadline, [started[pid] for pid in left]
            time.sleep(0.05)


def _descendants(pid: int) -> dict[int, list[str]]:
    """The processes that come from this one, and their command lines."""
    found: dict[int, list[str]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child: _words(child)} | _descendants(child)
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
