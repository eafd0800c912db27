"""`mx-rl serve --workers N`: several real processes on one port, on a real Redis."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.cli.supervise import require_shared_store, reserve
from modelexpress_rl.errors import UsageError
from tests.server.api import Api, eventually
from tests.server.process import BOUND_S, Serve, failed, serve
from tests.server.test_ops import http_get
from tests.store.redis_server import RedisServer, shared_redis

__all__ = ["shared_redis"]
pytestmark = pytest.mark.anyio


def children(pid: int) -> set[int]:
    """The processes that a process has started and that still run."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def two_processes(redis: RedisServer, *options: str) -> AsyncIterator[tuple[Serve, int]]:
    """The supervisor, and the first of the two metrics ports."""
    store = f"redis://127.0.0.1:{redis.port}/5"
    metrics_port = free_pair()
    words = ("--workers", "2", "--store", store, "--metrics-port", str(metrics_port), *options)
    async with serve(*words) as running:
        yield running, metrics_port


def free_pair() -> int:
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            with suppress(OSError, OverflowError):
                two.bind(("127.0.0.1", port + 1))
                return port


async def ask(address: str, times: int) -> None:
    """So many calls, each on a connection of its own."""
    for _ in range(times):
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await Api(channel).control.GetServerInfo(v1.GetServerInfoRequest())


async def answered(metrics_port: int) -> float:
    _, text = await http_get(metrics_port, "/metrics")
    name = 'mx_rl_rpcs_total{code="OK",method="RefitControlService/GetServerInfo"}'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


class TestRefusals:
    @pytest.mark.parametrize("store", ["memory", "sqlite:x.db"])
    async def test_a_store_that_belongs_to_one_process(self, store: str) -> None:
        status, out, err = await failed("--port", "0", "--workers", "2", "--store", store)
        assert (status, out) == (2, "")
        assert "needs a store that several processes can share, such as --store redis://" in err
        assert f"{store} belongs to one process" in err

    @pytest.mark.parametrize("workers", [0, -1, 1000])
    def test_numbers_that_make_no_sense(self, workers: int) -> None:
        with pytest.raises(UsageError, match="--workers must be between 1 and"):
            require_shared_store(workers, "redis://h:1/0")

    def test_a_password_is_not_shown(self) -> None:
        with pytest.raises(UsageError) as caught:
            require_shared_store(2, "postgres://me:hunter2@h/0")
        assert "hunter2" not in str(caught.value)

    def test_a_port_that_somebody_has(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=f"can't listen on 127.0.0.1:{port}: the port is taken"):
                reserve("127.0.0.1", port)

    def test_a_port_that_another_supervisor_has(self) -> None:
        with reserve("127.0.0.1", 0) as held, pytest.raises(UsageError, match="the port is taken"):
            reserve("127.0.0.1", held.getsockname()[1])


class TestTogether:
    async def test_both_answer_and_one_that_dies_comes_back(self, shared_redis: RedisServer) -> None:
        async with two_processes(shared_redis) as (running, metrics_port):
            workers = children(running.process.pid)
            assert len(workers) == 2
            await ask(running.address, 40)
            assert await answered(metrics_port) > 0
            assert await answered(metrics_port + 1) > 0

            port = running.address.rpartition(":")[2]
            status, _, err = await failed("--port", port)
            assert (status, "the port is taken" in err) == (2, True)

            os.kill(min(workers), signal.SIGKILL)

            async def back() -> bool:
                return len(children(running.process.pid) - {min(workers)}) == 2

            await eventually(back, within_s=BOUND_S)
            with suppress(grpc.aio.AioRpcError):  # a connection that was about to be taken goes with it
                await ask(running.address, 1)
            await ask(running.address, 10)
            assert await running.end() == 0
            assert not [pid for pid in workers if alive(pid)]
            last = (await running.process.stderr.read()).decode()
            assert "starting it again" in last

    async def test_without_the_supervisor_they_end(self, shared_redis: RedisServer) -> None:
        async with two_processes(shared_redis) as (running, _):
            workers = children(running.process.pid)
            await running.end(signal.SIGKILL)

            async def gone() -> bool:
                return not [pid for pid in workers if alive(pid)]

            await eventually(gone, within_s=BOUND_S)

    async def test_a_change_at_one_is_told_by_the_other(self, shared_redis: RedisServer) -> None:
        async with two_processes(shared_redis) as (running, _):
            channels = [
                grpc.aio.insecure_channel(running.address, options=(("grpc.use_local_subchannel_pool", 1),))
                for _ in range(12)
            ]
            try:
                apis = [Api(channel) for channel in channels]
                await apis[0].create("both", slots=("s0",), model="many")
                await apis[1].register("t0", model="many")
                watches = [
                    aiter(api.control.WatchVersion(v1.WatchVersionRequest(version_id="both"))) for api in apis
                ]
                for watch in watches:
                    assert (await anext(watch)).status.covered_slots == 0
                await apis[2].publish("s0", "t0", uid="both")
                with anyio.fail_after(BOUND_S):
                    for watch in watches:
                        assert (await anext(watch)).status.covered_slots == 1
            finally:
                for channel in channels:
                    await channel.close()
