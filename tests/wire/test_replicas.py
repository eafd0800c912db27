"""Several servers on one store, used as one: calls and watches go on when some of them die."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import TaskGroup, TaskStatus

from modelexpress_rl import rpc
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc.clients import ControlPlane
from modelexpress_rl.rpc.watch import WatchPolicy, watch_model, watch_version
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.version import VersionStatus, WeightPayloadFormat
from tests.server.process import serve

pytestmark = pytest.mark.anyio

MODEL = "m"
FAST = WatchPolicy(heartbeat_s=0.5, redial=rpc.Backoff(0.01, 0.1))


class Fleet:
    """Servers in this process on one store, which can be ended one by one."""

    def __init__(self, store: MemoryStore, tasks: TaskGroup) -> None:
        self.store = store
        self.running: list[Running] = []
        self._tasks = tasks
        self._stop: list[anyio.Event] = []
        self._stopped: list[anyio.Event] = []

    async def start(self) -> None:
        stop, stopped = anyio.Event(), anyio.Event()

        async def run(*, task_status: TaskStatus[Running]) -> None:
            async with serving(self.store) as running:
                task_status.started(running)
                await stop.wait()
            stopped.set()

        self.running.append(await self._tasks.start(run))
        self._stop.append(stop)
        self._stopped.append(stopped)

    async def stop(self, index: int) -> None:
        self._stop[index].set()
        await self._stopped[index].wait()

    @property
    def url(self) -> str:
        return ",".join(one.address for one in self.running)


@asynccontextmanager
async def fleet(count: int) -> AsyncIterator[Fleet]:
    async with anyio.create_task_group() as tasks:
        servers = Fleet(MemoryStore(), tasks)
        for _ in range(count):
            await servers.start()
        yield servers
        for index in range(count):
            await servers.stop(index)


def current_index(plane: ControlPlane, servers: Fleet) -> int:
    assert plane._replicas is not None
    address = str(plane._replicas.current.address)
    return [one.address for one in servers.running].index(address)


async def create(plane: ControlPlane, uid: str, slots: tuple[str, ...] = ("s0", "s1")) -> None:
    await plane.create_weight_version(
        refit.CreateWeightVersionRequest(
            model_name=MODEL,
            idempotency_key=uid,
            payload_format=refit.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
            expected_source_slots=slots,
            state=refit.WEIGHT_VERSION_STATE_STAGING,
            uid=uid,
        )
    )


async def publish(plane: ControlPlane, uid: str, slot: str) -> None:
    worker = refit.WorkerRegistration(worker_id="t", role=refit.WORKER_ROLE_TRAINER, model_name=MODEL)
    await plane.register_worker(refit.RegisterWorkerRequest(worker=worker, ttl_seconds=60))
    shard = refit.WeightVersionShard(
        version_id=uid,
        source_slot_id=slot,
        worker_id="t",
        tensor_count=1,
        total_bytes=1,
        manifest_digest="d" * 64,
        manifest_endpoint="h:1",
    )
    await plane.create_weight_version_shard(refit.CreateWeightVersionShardRequest(shard=shard))


class TestCalls:
    async def test_each_call_is_answered_while_one_server_lives(self) -> None:
        async with fleet(3) as servers, ControlPlane.dial(servers.url, rpc_timeout_s=5) as plane:
            await create(plane, "v")
            for left in range(2, 0, -1):
                await servers.stop(current_index(plane, servers))
                with anyio.fail_after(2):
                    answer = await plane.get_weight_version(refit.GetWeightVersionRequest(uid="v"))
                assert (answer.version.uid, left >= 1) == ("v", True)

    async def test_without_any_server_the_error_says_where_it_was_tried_last(self) -> None:
        with free_ports(2) as ports:
            url = ",".join(f"127.0.0.1:{port}" for port in ports)
            async with ControlPlane.dial(url, rpc_timeout_s=2) as plane:
                with pytest.raises(rpc.Unavailable) as caught:
                    await plane.get_server_info(v1.GetServerInfoRequest())
            assert not caught.value.outcome_unknown
            assert caught.value.address in url.split(",")

    async def test_a_server_that_hangs_leaves_time_for_the_others(self) -> None:
        async with serve() as hanging, serve() as well:
            hanging.process.send_signal(signal.SIGSTOP)
            try:
                address = rpc.parse_addresses(f"{hanging.address},{well.address}")
                async with ControlPlane(address, rpc_timeout_s=4.0) as plane:
                    use_first(plane, hanging.address)
                    answer = await plane.get_server_info(v1.GetServerInfoRequest())
                    assert answer.store_kind == "memory"
                    assert str(plane._replicas.current.address) == well.address
            finally:
                hanging.process.send_signal(signal.SIGCONT)

    async def test_what_a_server_refuses_is_not_asked_elsewhere(self) -> None:
        async with fleet(2) as servers, ControlPlane.dial(servers.url) as plane:
            before = current_index(plane, servers)
            with pytest.raises(rpc.NotFound) as caught:
                await plane.get_weight_version(refit.GetWeightVersionRequest(uid="none"))
            assert not caught.value.outcome_unknown
            assert current_index(plane, servers) == before

    async def test_many_clients_spread(self) -> None:
        address = rpc.parse_addresses("a:1,b:1,c:1")
        first = {str(rpc_plane(address, seed)._replicas.current.address) for seed in range(40)}
        assert first == {"a:1", "b:1", "c:1"}

    async def test_after_a_failure_they_spread_over_the_others(self) -> None:
        address = rpc.parse_addresses("a:1,b:1,c:1")
        second = set()
        for seed in range(40):
            plane = rpc_plane(address, seed)
            use_first(plane, "a:1")
            plane._replicas._leave(plane._replicas.current)
            second.add(str(plane._replicas.current.address))
        assert second == {"b:1", "c:1"}


class TestWatches:
    async def test_a_watch_goes_on_at_another_server(self) -> None:
        async with fleet(3) as servers, ControlPlane.dial(servers.url, rpc_timeout_s=5) as plane:
            await create(plane, "v")
            states: list[VersionStatus] = []
            watch = watch_version(plane, "v", policy=FAST)
            with anyio.fail_after(20):
                async with contextlib.aclosing(watch):
                    states.append(await anext(watch))
                    await servers.stop(current_index(plane, servers))
                    await publish(plane, "v", "s0")
                    states.append(await anext(watch))
                    await servers.stop(current_index(plane, servers))
                    await publish(plane, "v", "s1")
                    states.append(await anext(watch))
                    await plane.release_version(v1.ReleaseVersionRequest(version_id="v"))
                    states.append(await anext(watch))
            seen = [(status.state.value, status.covered_slots) for status in states]
            assert seen == [("STAGING", 0), ("STAGING", 1), ("READY", 2), ("RELEASING", 2)]

    async def test_a_model_s_watch_neither_loses_nor_repeats(self) -> None:
        async with fleet(2) as servers, ControlPlane.dial(servers.url, rpc_timeout_s=5) as plane:
            await create(plane, "v0")
            watch = watch_model(plane, MODEL, policy=FAST)
            with anyio.fail_after(20):
                async with contextlib.aclosing(watch):
                    assert (await anext(watch)).version_id == "v0"
                    await servers.stop(current_index(plane, servers))
                    await create(plane, "v1")
                    assert (await anext(watch)).version_id == "v1"
                    await publish(plane, "v0", "s0")
                    status = await anext(watch)
                    assert (status.version_id, status.covered_slots) == ("v0", 1)

    async def test_a_change_at_one_server_is_seen_at_the_other(self) -> None:
        async with fleet(2) as servers:
            one, other = servers.running
            async with ControlPlane.dial(one.address) as here, ControlPlane.dial(other.address) as there:
                await create(here, "v")
                watch = watch_version(there, "v", policy=FAST)
                with anyio.fail_after(10):
                    async with contextlib.aclosing(watch):
                        assert (await anext(watch)).covered_slots == 0
                        await publish(here, "v", "s0")
                        assert (await anext(watch)).covered_slots == 1


class TestClients:
    async def test_the_control_client_takes_several_addresses(self) -> None:
        async with (
            fleet(2) as servers,
            AsyncModelExpressControlClient.connect(servers.url) as control,
        ):
            await control.create_weight_version(
                MODEL, "k", WeightPayloadFormat.FULL_TENSOR, expected_source_slots=["s0"], uid="v"
            )
            await servers.stop(current_index(control._plane, servers))
            assert [one.version_id for one in await control.list_weight_versions(MODEL)] == ["v"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a:1", "a:1"),
        ("a:1,b:2", "a:1,b:2"),
        (" a:1 , [::1]:2 ", "a:1,[::1]:2"),
        ("https://a:1,b:2", "a:1,b:2"),
        ("a:1,a:1", "a:1"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    address = rpc.parse_addresses(text)
    assert str(address) == shown
    assert {one.secure for one in address.others} <= {address.secure}


@pytest.mark.parametrize("text", ["a:1,", "a:1,b", ",", "http://a:1,https://b:1", "a:1;b:1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="MODEL_EXPRESS_URL"):
        rpc.parse_addresses(text, what="MODEL_EXPRESS_URL")


def rpc_plane(address: rpc.Address, seed: int) -> ControlPlane:
    plane = ControlPlane(address)
    assert plane._replicas is not None
    clients = plane._replicas._clients
    plane._replicas = type(plane._replicas)(clients, rng=random.Random(seed))
    return plane


def use_first(plane: ControlPlane, address: str) -> None:
    assert plane._replicas is not None
    plane._replicas._current = next(one for one in plane._replicas._clients if str(one.address) == address)


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports on which nobody listens, held so that nobody will."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]
