"""The owner task: crashes are reported, close is bounded, nothing outlives it."""

from __future__ import annotations

import logging

import anyio
import anyio.lowlevel
import pytest

from modelexpress_rl.background import Background
from modelexpress_rl.errors import StateError

pytestmark = pytest.mark.anyio


async def test_tasks_run_until_close() -> None:
    background = await Background.start("b")
    ended = anyio.Event()

    async def run(word: str) -> None:
        assert word == "go"
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    background.spawn(run, "go", name="runner")
    await anyio.wait_all_tasks_blocked()
    assert background.running == ("runner",)
    await background.aclose()
    await background.aclose()
    assert ended.is_set()
    with pytest.raises(StateError, match="b is closed"):
        background.spawn(run, "go")


async def test_a_crash_is_logged_told_kept_and_raised(caplog: pytest.LogCaptureFixture) -> None:
    told: list[BaseException] = []
    background = await Background.start("b", on_crash=told.append)
    sibling_ended = anyio.Event()

    async def sibling() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            sibling_ended.set()

    async def crash() -> None:
        raise RuntimeError("a fault")

    background.spawn(sibling)
    with caplog.at_level(logging.ERROR):
        background.spawn(crash, name="the task")
        with anyio.fail_after(5):
            await sibling_ended.wait()
    assert [str(error) for error in told] == ["a fault"]
    assert background.failure is told[0]
    assert "b: background task the task crashed" in caplog.text
    with pytest.raises(StateError, match="a background task crashed") as caught:
        background.check()
    assert caught.value.__cause__ is told[0]
    await background.aclose()


async def test_close_is_bounded_and_names_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    background = await Background.start("b")
    let_go = anyio.Event()

    async def stubborn() -> None:
        with anyio.CancelScope(shield=True):
            await let_go.wait()

    background.spawn(stubborn, name="stubborn")
    await anyio.wait_all_tasks_blocked()
    with caplog.at_level(logging.ERROR):
        await background.aclose(timeout_s=0.05)
    assert "still running 0.05 s after close: ('stubborn',)" in caplog.text
    let_go.set()
    await anyio.wait_all_tasks_blocked()


async def test_close_is_shielded_from_the_callers_cancellation() -> None:
    background = await Background.start("b")
    ended = anyio.Event()

    async def slow_to_end() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            ended.set()

    background.spawn(slow_to_end)
    await anyio.wait_all_tasks_blocked()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await background.aclose()
    assert ended.is_set()


async def test_it_is_opened_in_one_task_and_closed_in_another() -> None:
    made: list[Background] = []

    async def open_it() -> None:
        made.append(await Background.start("b"))

    async with anyio.create_task_group() as group:
        group.start_soon(open_it)
    made[0].spawn(anyio.sleep_forever)
    await made[0].aclose()
    assert made[0].running == ()
