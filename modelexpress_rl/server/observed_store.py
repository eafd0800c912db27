"""A store whose operations are told to the observer and traced."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from modelexpress_rl import tracing
from modelexpress_rl.server.observer import Observer
from modelexpress_rl.server.stores.port import Store

# What answers without asking anybody is not worth a figure.
_OPERATIONS = (
    "next_sequence",
    "read_version",
    "read_version_and_workers",
    "commit_version",
    "rearm",
    "list_versions",
    "active_versions",
    "due_versions",
    "read_key",
    "claim_key",
    "free_key",
    "purge_keys",
    "read_workers",
    "commit_worker",
    "list_workers",
    "due_workers",
    "next_wake_ms",
)


def observed(store: Store, observer: Observer) -> Store:
    """`store`, with every operation timed; it stays the caller's to close."""
    return cast(Store, _Observed(store, observer))


class _Observed:
    """Everything of the store, by its own name."""

    def __init__(self, store: Store, observer: Observer) -> None:
        self._store = store
        for name in _OPERATIONS:
            setattr(self, name, _timed(name, getattr(store, name), observer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _timed(
    operation: str, work: Callable[..., Awaitable[Any]], observer: Observer
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(work)
    async def timed(*arguments: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        failed = True
        try:
            if tracing.active():
                with tracing.span(f"store {operation}", kind="CLIENT"):
                    answer = await work(*arguments, **named)
            else:
                answer = await work(*arguments, **named)
            failed = False
            return answer
        finally:
            observer.store_answered(operation, time.perf_counter() - began_s, failed=failed)

    return timed
