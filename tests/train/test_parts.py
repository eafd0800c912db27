"""Fences, timing records, memory extents and the plain engine, each by itself."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from modelexpress_rl.errors import DeadlineExceeded, FenceBroken, StateError, UsageError
from modelexpress_rl.timing import STAGES, RefitTimings
from modelexpress_rl.train.adapter import SourceBox
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext
from modelexpress_rl.train.fences import BlockingFence, Fence, wait_for
from modelexpress_rl.train.memory import copies_to_host, extents_of, run_all

pytestmark = pytest.mark.anyio


class TestFences:
    async def test_it_completes_once_for_everybody(self) -> None:
        fence = Fence("f")
        woken: list[int] = []

        async def wait(number: int) -> None:
            await fence
            woken.append(number)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
            assert not fence.ended
            fence.complete()
        fence.break_("too late")
        assert sorted(woken) == [0, 1, 2]
        assert fence.done

    async def test_a_broken_one_says_why_every_time(self) -> None:
        fence = Fence("f")
        fence.break_("the reason")
        for _ in range(2):
            with pytest.raises(FenceBroken, match="f: the reason"):
                await fence.wait()
        assert fence.ended
        assert not fence.done

    async def test_a_cancelled_waiter_leaves_it_to_the_others(self) -> None:
        fence = Fence("f")
        with anyio.move_on_after(0.01):
            await fence.wait()
        fence.complete()
        await fence.wait()

    async def test_waiting_works_from_another_thread_and_another_loop(self) -> None:
        fence = Fence("f")
        seen: list[str] = []

        def in_a_thread() -> None:
            BlockingFence(fence).wait(5)
            seen.append("thread")

        def in_a_loop() -> None:
            asyncio.run(fence.wait())
            seen.append("loop")

        threads = [threading.Thread(target=run) for run in (in_a_thread, in_a_loop)]
        for thread in threads:
            thread.start()
        fence.complete()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
        assert sorted(seen) == ["loop", "thread"]

    async def test_a_blocking_client_may_be_waited_for_where_a_loop_runs(self) -> None:
        fence = Fence("f")
        threading.Timer(0.01, fence.complete).start()  # as the client's own loop does, in its thread
        BlockingFence(fence).wait(5)
        with pytest.raises(DeadlineExceeded, match="g: not complete"):
            BlockingFence(Fence("g")).wait(0.01)

    async def test_a_blocking_wait_is_bounded(self) -> None:
        fence = Fence("f")
        with pytest.raises(DeadlineExceeded, match=r"f: not complete after 0.01 s"):
            await anyio.to_thread.run_sync(fence.wait_blocking, 0.01)

    async def test_any_fence_is_waited_for_in_its_own_way(self) -> None:
        class Blocking:
            def wait(self) -> None:
                return

        class Never:
            async def wait(self) -> None:
                await anyio.sleep_forever()

        await wait_for(Blocking(), 5, "x")
        with pytest.raises(DeadlineExceeded, match="x: not complete"):
            await wait_for(Never(), 0.01, "x")


class TestTiming:
    def test_a_record_adds_up_and_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        now = iter(float(tick) for tick in range(100))
        timings = RefitTimings("generator", clock_s=lambda: next(now))
        with caplog.at_level(logging.INFO), timings.refit("v1") as record:
            with record.stage("wire_transfer"):
                pass
            with record.stage("wire_transfer"):
                pass
            record.count(bytes=10, from_peer=True)
        expected = {"generator_refit_e2e_s": 5.0, "wire_transfer_s": 2.0, "bytes": 10, "from_peer": 1}
        assert timings.pop_metrics() == expected
        assert timings.pop_metrics() == {}
        line = json.loads(caplog.messages[0].removeprefix("MX_REFIT_TIMING "))
        assert line == {"side": "generator", "version_id": "v1", "failed": 0, **expected}

    def test_a_failed_one_is_kept(self) -> None:
        timings = RefitTimings("trainer")
        with pytest.raises(ValueError, match="no"), timings.refit("v1"):
            raise ValueError("no")
        assert set(timings.pop_metrics()) == {"trainer_refit_e2e_s"}

    @pytest.mark.parametrize("value", ["0", "false"])
    def test_the_line_can_be_turned_off(
        self, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("MX_REFIT_TIMING", value)
        timings = RefitTimings("trainer")
        with caplog.at_level(logging.INFO), timings.refit("v1"):
            pass
        assert caplog.messages == []
        assert timings.pop_metrics()

    def test_only_known_stages_and_numbers(self) -> None:
        record = RefitTimings("trainer").begin("v1")
        with pytest.raises(UsageError, match="stage: expected one of control_discovery"):
            record.add("thinking", 1.0)
        with pytest.raises(UsageError, match="counter name: expected a number, got str"):
            record.count(name="x")  # type: ignore[arg-type]
        assert len(STAGES) == 10


def boxes_of(tensors: dict[str, Any] | list[PlainBox]) -> tuple[SourceBox, ...]:
    return PlainTrainerContext(tensors).create_adapter().boxes()


class TestMemory:
    def test_overlaps_and_neighbours_in_one_storage_are_one_extent(self) -> None:
        torch = pytest.importorskip("torch")
        whole = torch.arange(12, dtype=torch.float32)
        extents = extents_of(
            boxes_of({"front": whole[:4], "back": whole[4:8], "tied": whole[2:6], "apart": whole[10:]})
        )
        assert [(e.addr - whole.data_ptr(), e.size_bytes) for e in extents] == [(0, 32), (40, 8)]

    def test_a_copy_has_the_bytes(self) -> None:
        arrays = [np.arange(100, dtype=np.int32), np.arange(7, dtype=np.uint8)]
        extents = extents_of(boxes_of({str(i): a for i, a in enumerate(arrays)}))
        targets = [np.zeros(extent.size_bytes, np.uint8) for extent in extents]
        assert run_all(copies_to_host(extents, targets), threads=2)
        by_size = {target.nbytes: target.tobytes() for target in targets}
        assert by_size == {array.nbytes: array.tobytes() for array in arrays}

    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_copy_that_is_wanted_no_more_ends_early_and_says_so(self, threads: int) -> None:
        done: list[int] = []
        jobs = [partial(done.append, number) for number in range(100)]
        assert not run_all(jobs, threads, wanted=lambda: len(done) < 10)
        assert 10 <= len(done) < 10 + threads
        assert not run_all([], threads, wanted=lambda: False)


class TestPlain:
    @pytest.mark.parametrize(
        ("tensors", "problem"),
        [
            ({}, "expected at least one tensor"),
            ({"a": [1, 2]}, "tensor 'a': expected a torch tensor or a numpy array, got list"),
            (["a"], r"tensors\[0\]: expected a PlainBox, got str"),
        ],
    )
    def test_refusals(self, tensors: Any, problem: str) -> None:
        with pytest.raises(UsageError, match=problem):
            PlainTrainerContext().create_adapter().bind_tensors(tensors)

    def test_nothing_bound(self) -> None:
        with pytest.raises(StateError, match="no tensors are bound"):
            _ = PlainTrainerContext().create_adapter().source_slot_id

    def test_the_slot_depends_on_the_layout_only(self) -> None:
        def slot(array: np.ndarray[Any, Any], offset: int) -> str:
            context = PlainTrainerContext([PlainBox("w", array, full_shape=(8,), offset=(offset,))])
            return context.create_adapter().source_slot_id

        same = slot(np.zeros(4), 0), slot(np.ones(4), 0)
        assert same[0] == same[1]
        assert len({same[0], slot(np.zeros(4), 4), slot(np.zeros(4, np.float32), 0)}) == 3
