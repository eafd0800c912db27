"""Copies of a GPU: on a stream of their own, after what the trainer had queued, beside what comes next.

The trainer's stream is never waited for by the host, and never waits: it is marked with an event, which
the side stream waits for. What the host waits for, in a thread, is the end of the copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Marks:
    """Where the trainer's streams stood: an event by device index. What came before is in the weights."""

    events: Mapping[int, Any] = field(default_factory=dict[int, Any])


NO_MARKS = Marks()


def marks_now(torch: Any = None) -> Marks:
    """Mark the calling thread's current stream; nothing where this process doesn't use CUDA.

    To be called in the trainer's own thread: another one has another current stream.
    """
    torch = torch or sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NO_MARKS
    device = torch.cuda.current_device()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Marks({device: event})


class SideStreams:
    """One stream per device, on which copies run."""

    def __init__(self, torch: Any = None) -> None:
        self._torch = torch
        self._streams: dict[int, Any] = {}

    def run(self, jobs: Mapping[int, Sequence[Job]], after: Marks, beside: Callable[[], bool]) -> bool:
        """Do all jobs, by device, and `beside` on the host meanwhile; return what that returned. In a thread.

        The jobs begin once what the marks stand for has ended; on a device without a mark, what its default
        stream holds now. Returns, or raises, only once every copy that was queued has ended: until then they
        may write.
        """
        queued: list[Any] = []
        try:
            for device_index, of_device in jobs.items():
                self._queue(device_index, of_device, after, queued)
            return beside()
        finally:
            for ended in queued:
                ended.synchronize()

    def _queue(self, device_index: int, jobs: Sequence[Job], after: Marks, queued: list[Any]) -> None:
        cuda = (self._torch or sys.modules["torch"]).cuda
        stream = self._streams.get(device_index)
        if stream is None:
            stream = self._streams[device_index] = cuda.Stream(device=device_index)
        mark = after.events.get(device_index)
        if mark is None:
            mark = cuda.Event()
            mark.record(cuda.default_stream(device_index))
        stream.wait_event(mark)
        ended = cuda.Event(blocking=True)  # a thread that waits for it sleeps
        queued.append(ended)
        with cuda.stream(stream):
            try:
                for job in jobs:
                    job()
            finally:
                ended.record(stream)
