"""What the parts of the store share: calls, records of many buckets at once, and what is due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias
from uuid import uuid4

from modelexpress_rl.server.clock import Clock
from modelexpress_rl.server.stores.port import CommitResult, Committed, Rejected, StoreUnavailable
from modelexpress_rl.server.stores.redis import scripts
from modelexpress_rl.server.stores.redis.address import parse
from modelexpress_rl.server.stores.redis.clock import StoreTime
from modelexpress_rl.server.stores.redis.keys import Bucket, Buckets
from modelexpress_rl.server.stores.redis.link import Call, Link, Reply, command
from modelexpress_rl.server.stores.redis.scripts import Script

_LOG = logging.getLogger(__name__)

# Whatever doesn't end by itself is kept for so long after the last server has looked at it.
KEPT_MS = 30 * 24 * 3600 * 1000
# What ends by itself is still there for so long, for a server that erases it.
GRACE_MS = 3_600_000
# One server, the sweeper, sees what is due when it is. It stays the sweeper for so long after it last
# asked for the time, and each server asks about once a second.
SWEEPER_MS = 3_000
# The others see it so much later: by then it is done, or needs them.
OTHERS_LATER_MS = 100
# The bucket of what there is once.
FIRST = 0
PAGE = 512

Row: TypeAlias = tuple[bytes | None, bytes | None, bytes | None]
"""Revision, wake and body of a record; no revision: there is none; no body: it is known."""
KeyOf: TypeAlias = Callable[[Bucket, str], str]


class Space:
    """The buckets of a store, and the way to them.

    Raises:
        UsageError: the address can't be understood.
    """

    def __init__(self, address: str, clock: Clock | None = None) -> None:
        self.address = parse(address)
        self._buckets = Buckets(self.address.prefix, cluster=self.address.cluster)
        self._time = StoreTime(clock)
        self.link = Link(self.address, self._buckets, self._time)
        self._server = uuid4().hex
        self._store_id = ""
        self._sweeps = True

    async def now_ms(self) -> int:
        now_ms, _ = await self._meta(sequence=False)
        return now_ms

    async def next_sequence(self) -> int:
        _, sequence = await self._meta(sequence=True)
        return sequence

    async def _meta(self, *, sequence: bool) -> tuple[int, int]:
        """The time, and a sequence where one is wanted; notes which store this is, and who sweeps it."""
        first = self._buckets.all[FIRST]
        arguments = (uuid4().hex, self._server, SWEEPER_MS, int(sequence), KEPT_MS)
        call = Call(FIRST, scripts.META, [first.meta, first.sweeper], arguments, confirmed=sequence)
        now, store_id, number, sweeps = (await self.link.one(call)).value
        self._sweeps = bool(sweeps)
        if self._store_id not in ("", store_id.decode()):
            _LOG.warning("the store %s was emptied, or is another one now", self.address.shown)
        self._store_id = store_id.decode()
        return self._time.heard(int(now)), int(number or 0)

    def _place(self, name: str) -> tuple[int, Bucket]:
        number = self._buckets.number_of(name)
        return number, self._buckets.all[number]

    async def _run(
        self, bucket: int, script: Script, where: Sequence[str], *arguments: str | bytes | int
    ) -> Any:
        """The answer of a script over keys of one bucket."""
        return (await self.link.one(Call(bucket, script, where, arguments))).value

    async def _commit(
        self, bucket: int, what: str, where: Sequence[str], *arguments: str | bytes | int
    ) -> tuple[CommitResult, str]:
        """Run COMMIT once, however often it is sent; answers also the key that an erased version holds."""
        token = uuid4().hex[:12]
        reply = await self.link.one(Call(bucket, scripts.COMMIT, where, (token, *arguments), confirmed=True))
        return _result(reply, what), reply.value[2].decode() if len(reply.value) > 2 else ""

    async def _every(
        self, key_of: Callable[[Bucket], str], name: str, *words: str | bytes | int
    ) -> list[Any]:
        """The answers of every bucket to a command on one of its keys."""
        calls = [
            command(number, name, key_of(bucket), *words) for number, bucket in enumerate(self._buckets.all)
        ]
        return [reply.value for reply in await self.link.all(calls)]

    async def _each(
        self, names: Sequence[str], key_of: KeyOf, name: str, *words: str | bytes | int
    ) -> list[Any]:
        """The answers to a command on the key of each of the names, in its bucket."""
        answers: list[Any] = []
        for page in _pages(names):
            places = [(one, *self._place(one)) for one in page]
            calls = [command(number, name, key_of(bucket, one), *words) for one, number, bucket in places]
            answers += [reply.value for reply in await self.link.all(calls)]
        return answers

    async def _rows(self, names: Collection[str], key_of: KeyOf) -> tuple[int, dict[str, Row]]:
        """The records of these names; the clock was what is answered before any of them was read."""
        by_bucket: dict[int, list[str]] = {}
        for name in names:
            by_bucket.setdefault(self._buckets.number_of(name), []).append(name)
        pages = [(number, page) for number, some in by_bucket.items() for page in _pages(some)]
        calls = [
            Call(number, scripts.READ, [key_of(self._buckets.all[number], name) for name in page])
            for number, page in pages
        ]
        replies = await self.link.all(calls)
        rows: dict[str, Row] = {}
        for (_, page), reply in zip(pages, replies, strict=True):
            rows |= zip(page, rows_of(reply.value), strict=True)
        return min(self._time.heard(int(reply.value[0])) for reply in replies), rows

    async def _due(self, index: Callable[[Bucket], str], key_of: KeyOf, now_ms: int, limit: int) -> list[str]:
        """The names whose wake has come, the longest overdue first, of records that exist."""
        until = now_ms - self._later_ms
        pages = await self._every(index, "ZRANGEBYSCORE", "-inf", until, "LIMIT", 0, limit, "WITHSCORES")
        overdue = sorted(chain.from_iterable(_scored(page) for page in pages))[:limit]
        names = [name for _, name in overdue]
        there = await self._each(names, key_of, "HEXISTS", "revision")
        for name, exists in zip(names, there, strict=True):
            if not exists:  # Redis let go of it
                number, bucket = self._place(name)
                where = [key_of(bucket, name), bucket.versions, bucket.active, index(bucket)]
                await self._run(number, scripts.SWEEP, where, "", name)
        return [name for name, exists in zip(names, there, strict=True) if exists]

    async def _wakes(self, index: Callable[[Bucket], str]) -> Iterable[int]:
        pages = await self._every(index, "ZRANGE", 0, 0, "WITHSCORES")
        return [score + self._later_ms for page in pages for score, _ in _scored(page)]

    @property
    def _later_ms(self) -> int:
        return 0 if self._sweeps else OTHERS_LATER_MS

    def _lifetime_ms(self, ends_at_ms: int | None) -> int:
        """How long a key stays that ends by itself, or doesn't."""
        now_ms = self._time.now_ms()
        if ends_at_ms is None or not now_ms:
            return KEPT_MS
        return max(ends_at_ms - now_ms, 0) + GRACE_MS


def rows_of(answer: Sequence[Any]) -> Iterator[Row]:
    """The records in an answer of READ."""
    for at in range(1, len(answer), 3):
        yield answer[at], answer[at + 1], answer[at + 2]


def text(number: int | None) -> str | int:
    """A number as the scripts take it."""
    return "" if number is None else number


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """For a step that something else makes up for: a store that is away is only noted."""
    try:
        yield
    except StoreUnavailable as error:
        _LOG.info("%s: %s", what, error)


def _result(reply: Reply, what: str) -> CommitResult:
    outcome = reply.value[0]
    if outcome == b"OK":
        return Committed(int(reply.value[1]))
    if outcome == b"LATE":
        return Rejected.LATE
    if outcome == b"FORGOTTEN" and reply.repeated:
        raise StoreUnavailable(
            f"the reply to a commit of {what} was lost, and too many others followed to know whether it "
            "was made; read again"
        )
    return Rejected.CONFLICT


def _scored(page: Sequence[bytes]) -> Iterator[tuple[int, str]]:
    for at in range(0, len(page), 2):
        yield int(float(page[at + 1])), page[at].decode()


def _pages(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), PAGE):
        yield names[start : start + PAGE]
