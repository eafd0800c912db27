"""The load of the control benchmark: many ranks, watchers and heartbeats from one process."""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import modelexpress_rl_pb2_grpc, refit_pb2_grpc
from modelexpress_rl._pb import refit_pb2 as refit

MODEL = "bench/model"
TTL_S = 3600
# Where `struct tcp_info` counts the bytes that the peer has acknowledged, and those received.
_TCP_INFO_BYTES = 120
AT_ONCE = 256


class Rank:
    """One rank's stubs; several ranks may share a connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.refit = refit_pb2_grpc.RefitServiceStub(channel)
        self.control = modelexpress_rl_pb2_grpc.RefitControlServiceStub(channel)


@asynccontextmanager
async def ranks(address: str, count: int) -> AsyncIterator[list[Rank]]:
    """`count` connections, each of its own."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20))
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(count)]
    try:
        await _each(len(channels), lambda n: channels[n].channel_ready())
        yield [Rank(channel) for channel in channels]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _each(count: int, work: Any) -> None:
    """`work(n)` for each, some at a time."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(n: int) -> None:
        async with limit:
            await work(n)

    await asyncio.gather(*(one(n) for n in range(count)))


async def register(ranks: list[Rank], count: int, prefix: str = "t") -> None:
    """Register `count` trainers."""

    async def one(n: int) -> None:
        worker = refit.WorkerRegistration(
            worker_id=f"{prefix}{n}", role=refit.WORKER_ROLE_TRAINER, model_name=MODEL
        )
        request = refit.RegisterWorkerRequest(worker=worker, ttl_seconds=TTL_S)
        await ranks[n % len(ranks)].refit.RegisterWorker(request)

    await _each(count, one)


async def create(rank: Rank, uid: str, slots: int) -> None:
    """A version that lacks `slots` publications."""
    request = refit.CreateWeightVersionRequest(
        model_name=MODEL,
        idempotency_key=uid,
        payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
        expected_source_slots=[f"slot-{n:05}" for n in range(slots)],
        state=refit.WEIGHT_VERSION_STATE_STAGING,
        uid=uid,
    )
    await rank.refit.CreateWeightVersion(request)


def shard(uid: str, n: int) -> refit.CreateWeightVersionShardRequest:
    """What rank n publishes."""
    return refit.CreateWeightVersionShardRequest(
        shard=refit.WeightVersionShard(
            version_id=uid,
            source_slot_id=f"slot-{n:05}",
            worker_id=f"t{n}",
            tensor_count=400,
            total_bytes=1 << 30,
            manifest_digest="0123456789abcdef" * 4,
            manifest_endpoint=f"10.0.{n // 256}.{n % 256}:6555",
        )
    )


@dataclass(frozen=True, slots=True)
class Burst:
    """What the publications of one version took."""

    ready_s: float
    slowest_answer_s: float
    bytes_per_rank: float


async def publish(ranks: list[Rank], uid: str, count: int, *, as_0_7: bool = False) -> Burst:
    """Everybody publishes at once; from the first request to the answer that says READY.

    A client of 0.7 is answered with all slots of the version, ours asks to leave them out.
    """
    requests = [shard(uid, n) for n in range(count)]
    before = wire_bytes()
    began_s = time.perf_counter()
    ready_s: list[float] = []

    async def one(n: int) -> None:
        call = ranks[n % len(ranks)].refit.CreateWeightVersionShard
        answer = await call(requests[n], metadata=(() if as_0_7 else (("mx-brief", "1"),)))
        if answer.version.state == refit.WEIGHT_VERSION_STATE_READY:
            ready_s.append(time.perf_counter() - began_s)

    await asyncio.gather(*(one(n) for n in range(count)))
    all_s = time.perf_counter() - began_s
    return Burst(min(ready_s), all_s, (wire_bytes() - before) / count)


class Watchers:
    """Streams that note when a message came."""

    def __init__(self, ranks: list[Rank], uid: str, count: int, heartbeat_ms: int) -> None:
        self._calls: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.revisions: list[int] = [0] * count
        self.came_s: list[float] = [0.0] * count
        self._first = asyncio.Semaphore(0)
        self._awaited, self._lack, self._all_saw = 0, 0, asyncio.Event()
        request = v1.WatchVersionRequest(version_id=uid, heartbeat_ms=heartbeat_ms)
        for n in range(count):
            call = ranks[n % len(ranks)].control.WatchVersion(request)
            self._calls.append(call)
            self._tasks.append(asyncio.create_task(self._read(n, call)))

    async def _read(self, n: int, call: Any) -> None:
        async for message in call:
            revision = message.status.revision
            if revision > self.revisions[n]:
                if self.revisions[n] == 0:
                    self._first.release()
                self.came_s[n] = time.perf_counter()
                if self.revisions[n] < self._awaited <= revision:
                    self._lack -= 1
                    if not self._lack:
                        self._all_saw.set()
                self.revisions[n] = revision

    async def opened(self) -> None:
        """Every stream has told how things stand."""
        for _ in self._calls:
            await self._first.acquire()

    async def all_saw(self, revision: int, within_s: float = 30.0) -> None:
        """Every stream has told of `revision`."""
        self._awaited = revision
        self._lack = sum(seen < revision for seen in self.revisions)
        if self._lack:
            self._all_saw.clear()
            async with asyncio.timeout(within_s):
                await self._all_saw.wait()

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def watch_latency_ms(ranks: list[Rank], watchers: int, rounds: int) -> float:
    """Median over watchers and rounds: from sending the command to the message about its commit."""
    uid = f"watched-by-{watchers}"
    await create(ranks[0], uid, rounds)
    await register(ranks, rounds)
    streams = Watchers(ranks, uid, watchers, heartbeat_ms=60_000)
    latencies_s: list[float] = []
    try:
        await streams.opened()
        revision = max(streams.revisions)
        for n in range(rounds):
            await asyncio.sleep(0.2)  # each command alone: not a burst that is gathered
            began_s = time.perf_counter()
            await ranks[0].refit.CreateWeightVersionShard(shard(uid, n))
            await streams.all_saw(revision + 1)
            revision = max(streams.revisions)
            latencies_s += [came_s - began_s for came_s in streams.came_s]
    finally:
        await streams.close()
    return statistics.median(latencies_s) * 1000


async def heartbeats(ranks: list[Rank], workers: int, interval_s: float, duration_s: float) -> int:
    """Renewals as our clients make them, evenly spread; answers how many RPCs that were."""
    requests = [
        refit.RegisterWorkerRequest(
            worker=refit.WorkerRegistration(
                worker_id=f"t{n}", role=refit.WORKER_ROLE_TRAINER, model_name=MODEL
            ),
            ttl_seconds=TTL_S,
        )
        for n in range(workers)
    ]
    began_s = time.perf_counter()
    sent = 0
    rpcs = 0
    tasks: set[asyncio.Task[None]] = set()

    async def renew(n: int) -> None:
        nonlocal rpcs
        rank = ranks[n % len(ranks)]
        await rank.refit.RegisterWorker(requests[n])
        await rank.control.GetServerInfo(v1.GetServerInfoRequest())
        rpcs += 2

    while (now_s := time.perf_counter() - began_s) < duration_s:
        due = int(now_s / interval_s * workers)
        for n in range(sent, due):
            task = asyncio.create_task(renew(n % workers))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        sent = due
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    return rpcs


def wire_bytes() -> int:
    """Bytes that this process's TCP connections have carried, both ways, headers of HTTP/2 included."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += sum(struct.unpack_from("QQ", info, _TCP_INFO_BYTES))
        except OSError:
            continue
    return total
