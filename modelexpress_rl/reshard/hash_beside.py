"""Copying out of memory block by block, and hashing each block when it has just been copied: in the cache.

Bytes that are copied and then hashed cross the memory bus twice; where cores are few that is what bounds
a read into scratch. The copy comes first: it brings in the block while it writes another, which takes
less time than hashing the block out of memory and copying it out of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

BLOCK_BYTES = 256 << 10  # it and its copy fit an L2 cache

Beside = tuple[int, Any, Any]
"""A copy to make: (where what it reads ends, in bytes from the arena's start; target; source)."""


def in_blocks(target: Any, source: Any, begin: int, stride: int) -> list[Beside]:
    """A copy as several, each of about `BLOCK_BYTES`, in the order of what they read.

    Both are arrays of equal shape; the source lies at `begin` in its arena, its first axis has `stride`.
    """
    if not source.ndim or source.nbytes <= BLOCK_BYTES:
        return [(begin + source.nbytes, target, source)]
    step = max(1, BLOCK_BYTES // max(1, source.nbytes // len(source)))
    return [
        (begin + min(at + step, len(source)) * stride, target[at : at + step], source[at : at + step])
        for at in range(0, len(source), step)
    ]


def hash_beside(slices: Sequence[memoryview], ends: Sequence[int], beside: Sequence[Beside]) -> bytes:
    """The digests of slices of an arena that end at `ends`, joined; the copies `beside` them are made.

    Slices and copies are in the order of their places in the arena; in another order they are as right,
    and slower.
    """
    found: list[bytes] = []
    done = 0
    for data, end in zip(slices, ends, strict=True):
        size, state = len(data), xxhash.xxh3_128()
        for at in range(0, size, BLOCK_BYTES):
            here = end - size + min(at + BLOCK_BYTES, size)
            while done < len(beside) and beside[done][0] <= here:
                np.copyto(beside[done][1], beside[done][2])
                done += 1
            state.update(data[at : at + BLOCK_BYTES])
        found.append(state.digest())
    do_all(beside[done:])
    return b"".join(found)


def do_all(beside: Sequence[Beside]) -> None:
    """Make these copies."""
    for _, target, source in beside:
        np.copyto(target, source)
