"""The changes of a Redis store, as they are published with each commit.

Each message names the revision before and after it, so that one that was lost is noticed by the next. A
poll of the newest revisions, once a second and for all watchers together, notices those that nothing
follows: a flush, a primary that went back to what its replica had, a subscription that went deaf. Whatever
is noticed, and every reconnection, is one `Resync`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from redis.asyncio.connection import Connection
from redis.exceptions import RedisError, ResponseError

from modelexpress_rl.server.stores.changes import ChangeFeed
from modelexpress_rl.server.stores.port import Change, Resync, StoreUnavailable
from modelexpress_rl.server.stores.redis import keys, trouble
from modelexpress_rl.server.stores.redis.keys import Buckets
from modelexpress_rl.server.stores.redis.link import Link, command
from modelexpress_rl.server.stores.redis.node import CONNECT_S
from modelexpress_rl.server.stores.redis.trouble import Trouble
from statemachines.ids import ModelName, VersionId

_LOG = logging.getLogger(__name__)

# Whoever subscribes waits for so long until that has happened; where it hasn't, a Resync says when.
SUBSCRIBE_S = 3.0
POLL_S = 1.0
SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


@asynccontextmanager
async def subscribed(link: Link, buckets: Buckets) -> AsyncIterator[AsyncIterator[Change | Resync]]:
    """See `Store.changes`."""
    feed = ChangeFeed()
    failure: Exception | None = None
    async with feed.subscribe() as changes, anyio.create_task_group() as tasks:
        subscription = Subscription(link, buckets, feed)
        tasks.start_soon(subscription.run)
        await subscription.wait_until_heard()
        try:
            yield changes
        except Exception as error:  # noqa: BLE001 - raised again, outside of the group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Subscription:
    """One connection that listens, made anew as often as it breaks."""

    def __init__(self, link: Link, buckets: Buckets, feed: ChangeFeed) -> None:
        self._link = link
        self._buckets = buckets
        self._feed = feed
        self._revisions = [0] * len(buckets.all)
        self._hears = anyio.Event()
        self._missed = False
        self._looked = False

    async def wait_until_heard(self) -> None:
        """Return once changes arrive, or after a while; then there is a Resync to come."""
        with anyio.move_on_after(SUBSCRIBE_S):
            await self._hears.wait()
            return
        self._missed = True

    async def run(self) -> None:
        """Listen for ever."""
        attempt = 0
        while True:
            try:
                async with self._connected() as connection:
                    attempt = 0
                    await self._listen(connection)
            except StoreUnavailable as error:
                _LOG.warning("changes: %s; trying again", error)
            attempt += 1
            self._missed = True
            await anyio.sleep(random.random() * min(SHORTEST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S))

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        """A connection that listens, with what it could have missed made up for."""
        where = await self._link.topology.locate(random.randrange(len(self._buckets.all)))
        if isinstance(where, Trouble):
            raise StoreUnavailable(f"the store {self._link.address.shown} {where.words}")
        connection = self._link.node(where).connection()
        try:
            with anyio.fail_after(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
                await self._warn_of_eviction(connection)
                await connection.send_command("SUBSCRIBE", self._buckets.channel)
                await connection.read_response()
            self._revisions = await self._newest()
            if self._missed:
                self._missed = False
                self._feed.publish(Resync())
            self._hears.set()
            yield connection
        except (RedisError, OSError, TimeoutError) as error:
            self._link.topology.doubt()
            words = trouble.unreachable(error).words
            raise StoreUnavailable(f"the store {self._link.address.shown} {words}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await connection.disconnect(nowait=True)

    async def _listen(self, connection: Connection) -> None:
        """Hand on what arrives until something was missed that nothing will tell."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:

            async def poll() -> None:
                await self._poll_until_missed()
                tasks.cancel_scope.cancel()

            tasks.start_soon(poll)
            try:
                while True:
                    self._receive(await connection.read_response())
            except (RedisError, OSError) as error:  # raised outside of the group, which would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _warn_of_eviction(self, connection: Connection) -> None:
        """Say once where Redis would rather forget than refuse; whatever it forgets, versions end by."""
        if self._looked:
            return
        self._looked = True
        await connection.send_command("INFO", "memory")
        with suppress(ResponseError):  # it isn't allowed: then nobody knows
            lines = bytes(await connection.read_response()).decode().splitlines()
            info = dict(line.split(":", 1) for line in lines if ":" in line)
            policy = info.get("maxmemory_policy", "noeviction")
            if info.get("maxmemory", "0") != "0" and policy != "noeviction":
                _LOG.warning(
                    "the store %s may evict versions and workers (maxmemory-policy %s): set noeviction",
                    self._link.address.shown,
                    policy,
                )

    def _receive(self, message: object) -> None:
        if not isinstance(message, list) or message[0] != b"message":
            return
        number, before, after, member = message[2].split(b" ", 3)
        model_name, _, uid = keys.version_of(member)
        bucket, known = int(number), self._revisions[int(number)]
        if int(after) > known:
            self._revisions[bucket] = int(after)
            if int(before) != known:
                self._feed.publish(Resync())
        self._feed.publish(Change(VersionId(uid), ModelName(model_name)))

    async def _poll_until_missed(self) -> None:
        """Return once there was a commit that no message told of, or the store is not what it was."""
        seen = list(self._revisions)
        while True:
            await anyio.sleep(POLL_S)
            known = list(self._revisions)
            if any(one < before for one, before in zip(known, seen, strict=True)):
                return
            try:
                seen = await self._newest()
            except StoreUnavailable as error:
                _LOG.info("changes: %s", error)
                seen = known
                continue
            if any(one < before for one, before in zip(seen, known, strict=True)):
                return

    async def _newest(self) -> list[int]:
        calls = [command(number, "GET", bucket.revision) for number, bucket in enumerate(self._buckets.all)]
        return [int(reply.value or 0) for reply in await self._link.all(calls)]
