"""One Redis node: a few connections, over which whatever waits together is sent together.

A command that finds a connection free is sent at once; while all are busy, commands wait, and the next
connection to be free takes all of them as one pipeline. So a thousand renewals cost tens of exchanges, and
an idle store has the latency of one. An exchange is a task of its own, a few seconds long at most: a caller
that goes away takes nothing from those whose commands were sent with its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from modelexpress_rl.server.stores.redis import trouble
from modelexpress_rl.server.stores.redis.address import Endpoint, RedisAddress
from modelexpress_rl.server.stores.redis.trouble import Trouble

Words: TypeAlias = tuple[str | bytes | int, ...]
"""A command."""
Outcome: TypeAlias = Any | Trouble

CONNECTIONS = 4
TOGETHER = 256
CONNECT_S = 3.0
ANSWER_S = 3.0


@dataclass(slots=True, eq=False)
class _Parcel:
    """Some commands of one caller, and their outcomes once there are any."""

    commands: Sequence[Words]
    confirmed: bool
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    done: anyio.Event = field(default_factory=anyio.Event)
    abandoned: bool = False


class Node:
    """The node at an endpoint."""

    def __init__(self, address: RedisAddress, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._address = address
        self._idle: list[Connection] = []
        self._waiting: deque[_Parcel] = deque()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._era = 0

    async def exchange(self, commands: Sequence[Words], *, confirmed: bool = False) -> list[Outcome]:
        """Send commands and answer the outcome of each.

        `confirmed`: as many replicas as the address asks for must have it, too.
        """
        parcel = _Parcel(commands, confirmed)
        self._waiting.append(parcel)
        if len(self._exchanges) < CONNECTIONS:
            task = asyncio.create_task(self._work(), name=f"exchange with {self.endpoint}")
            self._exchanges.add(task)
            task.add_done_callback(self._exchanges.discard)
        try:
            await parcel.done.wait()
        finally:
            parcel.abandoned = True
        return parcel.outcomes

    async def close(self) -> None:
        """End what is in progress, and close every connection."""
        tasks = list(self._exchanges)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.drop()

    async def drop(self) -> None:
        """Close the idle connections, and those in use once they are free: the node may be another now."""
        self._era += 1
        idle, self._idle = self._idle, []
        for connection in idle:
            await _close(connection)

    def connection(self) -> Connection:
        """A connection of one's own, not yet connected."""
        host, port = self.endpoint
        kind = SSLConnection if self._address.tls else Connection
        return kind(
            host=host,
            port=port,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 0),
            client_name="mx-rl",
            protocol=2,
            **self._address.connection_options(),
        )

    async def _work(self) -> None:
        """Exchange what waits over one connection, until nothing does."""
        while parcels := self._next_parcels():
            commands = [words for one in parcels for words in one.commands]
            outcomes: list[Outcome] = [trouble.lost(ConnectionError("the store was closed"))] * len(commands)
            try:
                outcomes = await self._talk(commands, confirmed=any(one.confirmed for one in parcels))
            finally:
                at = 0
                for one in parcels:
                    one.outcomes = outcomes[at : at + len(one.commands)]
                    at += len(one.commands)
                    one.done.set()

    def _next_parcels(self) -> list[_Parcel]:
        """What waits and is still wanted, as much as goes together."""
        parcels: list[_Parcel] = []
        count = 0
        while self._waiting and (not parcels or count + len(self._waiting[0].commands) <= TOGETHER):
            parcel = self._waiting.popleft()
            if not parcel.abandoned:
                parcels.append(parcel)
                count += len(parcel.commands)
        return parcels

    async def _talk(self, commands: Sequence[Words], *, confirmed: bool) -> list[Outcome]:
        era = self._era
        try:
            connection = self._idle.pop() if self._idle else await self._connected()
        except (RedisError, OSError, TimeoutError) as error:
            return [trouble.unreachable(error)] * len(commands)
        outcomes: list[Outcome] = []
        healthy = False
        try:
            with anyio.fail_after(ANSWER_S):
                wanted = self._address.replicas if confirmed else 0
                wait: list[Words] = [("WAIT", wanted, round(ANSWER_S * 500))] if wanted else []
                await connection.send_packed_command(
                    connection.pack_commands([*commands, *wait]), check_health=False
                )
                for _ in commands:
                    outcomes.append(await _reply(connection))  # noqa: PERF401 - those that came count
                if wanted and (got := await _confirmations(connection)) < wanted:
                    uncertain = trouble.unconfirmed(got, wanted)
                    outcomes = [one if isinstance(one, Trouble) else uncertain for one in outcomes]
            healthy = True
        except TimeoutError:
            outcomes += [trouble.silent(ANSWER_S)] * (len(commands) - len(outcomes))
        except (RedisError, OSError) as error:
            outcomes += [trouble.lost(error)] * (len(commands) - len(outcomes))
        finally:
            if healthy and era == self._era:
                self._idle.append(connection)
            else:
                with anyio.CancelScope(shield=True):
                    await _close(connection)
        return outcomes

    async def _connected(self) -> Connection:
        connection = self.connection()
        try:
            with anyio.fail_after(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _close(connection)
            raise
        return connection


async def _reply(connection: Connection) -> Outcome:
    try:
        return await connection.read_response()
    except ResponseError as error:  # the answer to one command; the connection is sound
        return trouble.of_error(error)


async def _confirmations(connection: Connection) -> int:
    outcome = await _reply(connection)
    return 0 if isinstance(outcome, Trouble) else int(outcome)


async def _close(connection: Connection) -> None:
    await connection.disconnect(nowait=True)
