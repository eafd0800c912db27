"""Digests are of the bytes at the capture, each is made once, and finer ones only when asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.reshard import hashing
from modelexpress_rl.reshard.digests import decode_digests, digest_table
from modelexpress_rl.reshard.geometry import Bytes, Shard, ShardTable
from modelexpress_rl.reshard.grid import LEVELS, SLABS, TILES, Selection, digest_grid
from modelexpress_rl.reshard.hashing import decode_answer, is_answer
from modelexpress_rl.train.digest_job import DigestJob, DigestSource

pytestmark = pytest.mark.anyio
SHA = "ab" * 32


class Lent:
    """Four tensors, and how often each was looked at."""

    def __init__(self) -> None:
        noise = np.random.default_rng(5)
        self.tensors = [noise.integers(0, 256, (512, 1024), np.uint8) for _ in range(4)]
        self.table = ShardTable.build(
            Shard(f"t{i}", "torch.uint8", t.shape, (0, 0), t.shape, 4096) for i, t in enumerate(self.tensors)
        )
        self.grid = digest_grid(self.table)
        self.looks: Counter[int] = Counter()

    def memory(self, row: int) -> Bytes:
        self.looks[row] += 1
        return self.tensors[row].reshape(-1)

    def job(self, threads: int = 1) -> DigestJob:
        return DigestJob(DigestSource(self.table, self.memory, fixed=False), SHA, threads=threads)


def select(level: int, *rows: int) -> Selection:
    wanted = np.zeros((LEVELS, 4), np.bool_)
    wanted[level, list(rows)] = True
    return Selection(0, wanted)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Lent:
    monkeypatch.setattr(hashing, "UNIT_BYTES", 1 << 20)  # two tensors each
    return Lent()


@pytest.fixture
async def start() -> AsyncIterator[Callable[[DigestJob], None]]:
    started: list[DigestJob] = []
    async with anyio.create_task_group() as group:

        def begin(job: DigestJob) -> None:
            started.append(job)
            group.start_soon(job.start)

        with anyio.fail_after(20):
            yield begin
            for job in started:
                job.cancel()


@pytest.mark.parametrize("threads", [1, 3])
async def test_what_is_asked_for_is_answered(
    lent: Lent, start: Callable[[DigestJob], None], threads: int
) -> None:
    job = lent.job(threads)
    start(job)
    assert job.rows == 4
    for ask in (select(SLABS, 0, 3), select(TILES, 1), select(TILES, 0, 1, 2, 3), select(SLABS)):
        found = decode_answer(await job.answer(ask), ask, lent.grid, SHA)
        assert len(found) == ask.counts(lent.grid).sum()
    whole = decode_digests(await job.table(), lent.table, SHA)
    expected = digest_table(lent.table, lent.memory)
    assert whole.digests.tobytes() == expected.digests.tobytes()
    tiles = select(TILES, 2)
    bands = int(whole.parts[2, 0])
    own = expected.digests[expected.start[2] + bands : expected.start[3]]
    assert decode_answer(await job.answer(tiles), tiles, lent.grid, SHA).tobytes() == own.tobytes()


async def test_a_second_reader_costs_nothing(lent: Lent, start: Callable[[DigestJob], None]) -> None:
    job = lent.job(threads=2)
    start(job)
    answers: list[bytes] = []

    async def read(ask: Selection) -> None:
        answers.append(await job.answer(ask))

    async with anyio.create_task_group() as readers:
        for _ in range(4):
            readers.start_soon(read, select(TILES, 1, 3))
    looks = Counter(lent.looks)
    assert len(set(answers)) == 1
    assert (looks[1], looks[3]) == (2, 2)  # slabs, tiles
    assert await job.answer(select(TILES, 3, 1)) == answers[0]
    await job.answer(select(SLABS, 0, 1, 2, 3))
    assert lent.looks == Counter({0: 1, 1: 2, 2: 1, 3: 2})


async def test_slabs_are_those_of_the_capture(lent: Lent, start: Callable[[DigestJob], None]) -> None:
    job = lent.job()
    start(job)
    ask = select(SLABS, 0, 1, 2, 3)
    at_capture = await job.answer(ask)
    lent.tensors[2][100, 100] ^= 1
    assert await job.answer(ask) == at_capture
    await job.answer(select(TILES, 1))
    with pytest.raises(StateError, match=r"tensor 't2', .* changed after they were captured"):
        await job.answer(select(TILES, 2))
    with pytest.raises(StateError, match="tensor 't2'"):
        await job.answer(select(TILES, 2, 3))
    await job.answer(select(TILES, 0))


async def test_what_can_not_be_hashed_is_told_to_those_who_ask(
    lent: Lent, start: Callable[[DigestJob], None]
) -> None:
    lent.tensors[3] = lent.tensors[3][1:]
    job = lent.job()
    start(job)
    await job.answer(select(SLABS, 0, 1))
    with pytest.raises(UsageError, match="tensor 't3': expected 524288 flat bytes"):
        await job.answer(select(SLABS, 3))


async def test_after_the_end_of_the_publication_everybody_is_told(
    lent: Lent, start: Callable[[DigestJob], None]
) -> None:
    ended = lent.job()
    ended.cancel()
    await ended.start()
    running = lent.job()
    start(running)
    failures: list[str] = []

    async def ask(how: Callable[[], object]) -> None:
        try:
            await how()  # type: ignore[misc]
        except StateError as error:
            failures.append(str(error))

    async with anyio.create_task_group() as readers:
        readers.start_soon(ask, lambda: running.answer(select(TILES, 0)))
        readers.start_soon(ask, running.table)
        await anyio.lowlevel.checkpoint()
        running.cancel()
    for job in (ended, running):
        await ask(lambda job=job: job.answer(select(SLABS, 0)))
        await ask(job.table)
    assert failures == ["the publication has ended"] * 6


async def test_what_somebody_waits_for_is_hashed_first(
    lent: Lent, start: Callable[[DigestJob], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "UNIT_BYTES", 1)  # a tensor each
    job = lent.job()
    seen: list[int] = []
    look = lent.memory

    def memory(row: int) -> Bytes:
        seen.append(row)
        return look(row)

    monkeypatch.setattr(job._source, "memory", memory)
    async with anyio.create_task_group() as group:
        group.start_soon(job.answer, select(SLABS, 3))
        await anyio.lowlevel.checkpoint()
        start(job)
    assert 3 in seen[:2]  # the first may have been under way


async def test_who_asks_for_nothing_is_answered_at_once(lent: Lent) -> None:
    """So that a reader knows whether this process lives, however long it hashes."""
    job = lent.job()  # not even begun
    nothing = Selection(0, np.zeros((LEVELS, 0), np.bool_))
    with anyio.fail_after(1):
        assert is_answer(await job.answer(nothing))
