"""Tensors as memory: flat bytes, looked at in words; and work spread over threads in bounded order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from modelexpress_rl.errors import UsageError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
In = TypeVar("In")
Out = TypeVar("Out")


def flat_bytes(array: npt.NDArray[Any], name: str) -> Bytes:
    """The memory of an array as bytes, not copied.

    Raises:
        UsageError: the array is not contiguous; names the tensor.
    """
    if not array.flags.c_contiguous:
        raise UsageError(f"tensor {name!r} must be contiguous, but has strides {array.strides}")
    return array.reshape(-1).view(np.uint8)


def as_words(data: Bytes, word_bytes: int) -> Words:
    """Bytes as unsigned words of that size; copied only where they are not aligned."""
    words: Words = data.view(_WORDS[word_bytes])
    return words if words.flags.aligned else words.copy()


def same_size(base: Bytes, other: Bytes, name: str, what: str) -> None:
    """That two memories of a tensor are equally long.

    Raises:
        UsageError: they are not; names the tensor.
    """
    if base.nbytes != other.nbytes:
        raise UsageError(f"tensor {name!r}: the base has {base.nbytes} bytes, {what} {other.nbytes}")


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[In], Out], items: Iterable[In], ahead: int
) -> Iterator[Out]:
    """The results of `work` in the order of the items, of which at most `ahead` are begun and not taken."""
    remaining = iter(items)
    begun: deque[Future[Out]] = deque(pool.submit(work, item) for item in islice(remaining, ahead))
    try:
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(work, item) for item in islice(remaining, 1))
            yield result
    finally:
        for future in begun:
            future.cancel()
