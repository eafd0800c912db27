"""Copying a version into a generation: threads on the host, streams on GPUs, and an early end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from modelexpress_rl.train.memory import Job, run_all
from modelexpress_rl.train.places import Copies
from modelexpress_rl.train.streams import Marks, SideStreams

CPUS = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
THREADS = max(1, min(8, CPUS))
"""How many copy at once. The trainer waits for them, so its cores are theirs; eight fill a memory bus."""

SMALL_BYTES = 256 << 10
"""Jobs that are smaller than this on average are done by one thread: several would only contend for the
interpreter's lock."""


def copy_all(copies: Copies, streams: SideStreams, after: Marks, wanted: Callable[[], bool]) -> bool:
    """Do all copies and return whether all were done; the rest is left where they are wanted no more.

    Run it in a thread. Returns, or raises, only once nothing writes any more.
    """
    on_host = partial(run_all, copies.host, _threads(copies.host, copies.size_bytes), wanted)
    if not copies.on_streams:
        return on_host()
    return streams.run(copies.on_streams, after, on_host)


def _threads(jobs: Sequence[Job], size_bytes: int) -> int:
    return THREADS if jobs and size_bytes // len(jobs) >= SMALL_BYTES else 1
