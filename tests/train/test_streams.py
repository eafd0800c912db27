"""Copies on a GPU, with doubles of CUDA's streams and events: who waits for whom. No GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from modelexpress_rl.train.copying import copy_all
from modelexpress_rl.train.places import Copies
from modelexpress_rl.train.streams import NO_MARKS, SideStreams, marks_now


class Cuda:
    """A double of `torch.cuda` that writes down what is asked of it, in order."""

    def __init__(self, *, initialized: bool = True) -> None:
        self.log: list[str] = []
        self.initialized = initialized
        self.streams = 0
        self.events = 0
        outer = self

        class Stream:
            def __init__(self, device: int, name: str | None = None) -> None:
                outer.streams += name is None
                self.name = name or f"side{outer.streams}@{device}"

            def wait_event(self, event: Event) -> None:
                outer.log.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                outer.events += 1
                self.name = f"event{outer.events}"
                self.blocking = blocking

            def record(self, stream: Stream) -> None:
                outer.log.append(f"{self.name} on {stream.name}")

            def synchronize(self) -> None:
                assert self.blocking, "a thread would spin"
                outer.log.append(f"host waits for {self.name}")

        self.Stream, self.Event = Stream, Event

    def is_initialized(self) -> bool:
        return self.initialized

    def current_device(self) -> int:
        return 1

    def current_stream(self, device: int) -> Any:
        return self.Stream(device, f"training@{device}")

    def default_stream(self, device: int) -> Any:
        return self.Stream(device, f"default@{device}")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream.name}:")
        yield
        self.log.append("off")


def torch_of(cuda: Cuda) -> Any:
    return SimpleNamespace(cuda=cuda)


def test_without_cuda_there_is_nothing_to_mark() -> None:
    assert marks_now() is NO_MARKS
    assert marks_now(torch_of(Cuda(initialized=False))) is NO_MARKS


def test_copies_follow_the_training_stream_which_waits_for_nothing() -> None:
    cuda = Cuda()
    torch = torch_of(cuda)
    after = marks_now(torch)
    streams = SideStreams(torch)
    jobs = {1: [partial(cuda.log.append, "copy a"), partial(cuda.log.append, "copy b")]}
    copies = Copies((partial(cuda.log.append, "copy on the host"),), jobs, 8)
    assert copy_all(copies, streams, after, lambda: True)
    assert cuda.log == [
        "event1 on training@1",
        "side1@1 waits for event1",
        "on side1@1:",
        "copy a",
        "copy b",
        "event2 on side1@1",
        "off",
        "copy on the host",
        "host waits for event2",
    ]
    assert copy_all(copies, streams, marks_now(torch), lambda: True)
    assert cuda.streams == 1, "one stream per device, for all versions"


def test_a_device_without_a_mark_is_waited_for_by_its_default_stream() -> None:
    cuda = Cuda()
    assert SideStreams(torch_of(cuda)).run({0: []}, NO_MARKS, lambda: True)
    assert cuda.log[:2] == ["event1 on default@0", "side1@0 waits for event1"]


def test_what_was_queued_is_waited_for_where_something_fails() -> None:
    cuda = Cuda()

    def fail() -> None:
        raise MemoryError("no room")

    for copies in (
        Copies((fail,), {0: []}, 8),
        Copies((), {0: [fail]}, 8),
        Copies((), {0: [], 1: [fail]}, 8),
    ):
        with pytest.raises(MemoryError):
            copy_all(copies, SideStreams(torch_of(cuda)), NO_MARKS, lambda: True)
        queued = [line for line in cuda.log if line.startswith("event") and "side" in line]
        waited = [line for line in cuda.log if line.startswith("host waits")]
        assert len(queued) == len(waited)
        assert cuda.log[-1].startswith("host waits for event")
