"""Threads that `load_weights` starts or hands work to: they may read files, but not touch what is captured.

The modes of a capture see the thread that they were entered in. Operations on tensors without memory would
go unseen in others: their results would be missing, and nobody would know.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from modelexpress_rl.inference.engines.torch.capture.operations import kind_of, tensors_in
from modelexpress_rl.inference.engines.torch.capture.recorder import Recorder

_lock = threading.Lock()
_watched: dict[int, Recorder] = {}  # by the thread that captures
_here = threading.local()  # `submitting`: the thread gives work to a pool just now
_start = threading.Thread.start
_submit = ThreadPoolExecutor.submit


@contextlib.contextmanager
def no_work_elsewhere(recorder: Recorder) -> Iterator[None]:
    """Refuse what threads do to captured tensors, where this thread starts them or gives them work."""
    caller = threading.get_ident()
    with _lock:
        if not _watched:
            threading.Thread.start = _start_watched  # type: ignore[method-assign, assignment]
            ThreadPoolExecutor.submit = _submit_watched  # type: ignore[method-assign, assignment]
        _watched[caller] = recorder
    try:
        yield
    finally:
        with _lock:
            del _watched[caller]
            if not _watched:
                threading.Thread.start = _start  # type: ignore[method-assign]
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


class _Elsewhere(TorchDispatchMode):
    """Lets pass what has nothing to do with the capture."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as `modes.DispatchMode` does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        for tensor in tensors_in((args, kwargs or {})):
            if recorder.content(tensor) is not None or recorder.is_live(tensor):
                what = f"{kind_of(func).name} on {recorder.described(tensor)}"
                raise recorder.refuse(f"{what} in another thread than its own, where no capture sees it")
        return func(*args, **(kwargs or {}))


def _watching(work: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Elsewhere(recorder):
            return work(*args, **kwargs)

    return run


def _start_watched(thread: threading.Thread) -> None:
    recorder = _watched.get(threading.get_ident())
    # A pool's thread may outlive the capture: there the work is watched, not the thread.
    if recorder is not None and not getattr(_here, "submitting", False):
        thread.run = _watching(thread.run, recorder)  # type: ignore[method-assign]
    _start(thread)


def _submit_watched(
    pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    recorder = _watched.get(threading.get_ident())
    if recorder is None:
        return _submit(pool, work, *args, **kwargs)
    _here.submitting = True
    try:
        return _submit(pool, _watching(work, recorder), *args, **kwargs)
    finally:
        _here.submitting = False
