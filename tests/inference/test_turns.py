"""Whose turn it is to read into a part of scratch, and what becomes of a part that isn't free again."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from modelexpress_rl.inference.planning import Chunk
from modelexpress_rl.inference.turns import Turns
from modelexpress_rl.reshard.geometry import Source

pytestmark = pytest.mark.anyio
SOURCE = Source("s", "w", "agent-w")


def staged(first: int, part: int | None) -> Chunk:
    return Chunk(SOURCE, first, first + 1, 1, b"", part)


async def test_a_part_is_written_by_one_after_the_other() -> None:
    a, b, direct = staged(0, 0), staged(1, 0), staged(2, None)
    turns = Turns([a, b, direct])
    assert turns.staged == [a, b]
    assert await turns.turn(a)
    had: list[bool] = []

    async def wait() -> None:
        had.append(await turns.turn(b))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            turns.end(direct, free=False)
            assert not had
            turns.end(a, free=True)
    assert had == [True]


async def test_a_part_that_a_read_may_still_write_to_is_given_to_nobody() -> None:
    """Not to the next one, nor, when that one was passed over, to those after it."""
    chunks = [staged(number, 0) for number in range(3)]
    other = staged(3, 1)
    turns = Turns([*chunks, other])
    turns.end(chunks[0], free=False)
    with anyio.fail_after(5):
        for chunk in chunks[1:]:
            free = await turns.turn(chunk)
            assert not free
            turns.end(chunk, free=free)
        assert await turns.turn(other)
