"""A real job on Redis with three replicas of the control plane, which are killed at random all the while."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import sys
from collections.abc import Callable
from itertools import pairwise

import anyio
import pytest
from anyio.abc import TaskStatus

from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.monitor import ReadinessMonitor, VersionEvent
from modelexpress_rl.version import VersionState, WeightPayloadFormat
from tests.e2e.job_trainer import MODEL
from tests.e2e.processes import Running, running
from tests.server.process import serve
from tests.store.redis_server import RedisServer, start_redis

pytest.importorskip("torch")
pytest.importorskip("nixl")

__all__ = ["start_redis"]
pytestmark = pytest.mark.anyio

STEPS = 50
SEED = 7
STEP_S = 90.0
LEAST_ENDS = 5


class Replicas:
    """Three servers, each on a port of its own, which come back after they ended."""

    def __init__(self, store: str, ports: list[int], rng: random.Random) -> None:
        self._store = store
        self._ports = ports
        self._rng = rng
        self.ends: list[str] = []

    async def run(self, index: int, turn: anyio.Lock, *, task_status: TaskStatus[None]) -> None:
        """Serve, end by a random way, and serve again; one at a time is away."""
        options = ("--store", self._store, "--log-level", "error")
        first = True
        while True:
            async with contextlib.AsyncExitStack() as away:
                if not first:
                    await away.enter_async_context(turn)
                async with serve(*options, port=self._ports[index]) as server:
                    if first:
                        task_status.started()
                        first = False
                    await away.aclose()  # it is back: another one may end
                    await anyio.sleep(self._rng.uniform(0.2, 1.5))
                    await turn.acquire()
                    try:
                        number = self._rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
                        if self._rng.random() < 0.3:
                            server.process.send_signal(signal.SIGSTOP)  # it hangs for a while first
                            await anyio.sleep(self._rng.uniform(0.1, 1.0))
                            server.process.send_signal(signal.SIGCONT)
                        self.ends.append(f"{index} {number.name}")
                        await server.end(number)
                    finally:
                        turn.release()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.mark.heavy
@pytest.mark.timeout(600)
async def test_nothing_is_lost_stuck_or_wrong(start_redis: Callable[..., RedisServer]) -> None:
    redis = start_redis()
    ports = free_ports(3)
    url = ",".join(f"127.0.0.1:{port}" for port in ports)
    replicas = Replicas(redis.address, ports, random.Random(SEED))
    events: list[VersionEvent] = []
    async with anyio.create_task_group() as tasks:
        turn = anyio.Lock()
        for index in range(3):
            await tasks.start(replicas.run, index, turn)
        environment = {"MODEL_EXPRESS_URL": url}
        with (
            running([sys.executable, "-m", "tests.e2e.job_trainer", str(STEPS)], environment) as trainer,
            running([sys.executable, "-m", "tests.e2e.job_generator", str(STEPS)], environment) as generator,
        ):
            async with (
                AsyncModelExpressControlClient.connect(url) as control,
                ReadinessMonitor.connect(url) as monitor,
            ):
                monitor.subscribe(events.append, model_name=MODEL)
                await _orchestrate(control, generator)
            for process in (trainer, generator):
                assert await anyio.to_thread.run_sync(process.wait, STEP_S) == 0, process.text
        tasks.cancel_scope.cancel()
    print(f"ends: {replicas.ends}")
    assert len(replicas.ends) >= LEAST_ENDS
    names = [f"step-{step}" for step in range(1, STEPS + 1)]
    served = [line.split()[1:] for line in generator.output if line.startswith("serving")]
    assert served == [[name, "wrong", "0"] for name in names]
    reusable = [line.split()[1] for line in trainer.output if line.startswith("reusable")]
    assert reusable == names
    _require_true_histories(events, names)


async def _orchestrate(control: AsyncModelExpressControlClient, generator: Running) -> None:
    for step in range(1, STEPS + 1):
        with anyio.fail_after(STEP_S):
            version = await control.create_weight_version(
                MODEL, f"step-{step}", WeightPayloadFormat.FULL_TENSOR, ["trainer:0"], uid=f"step-{step}"
            )
            await control.wait_for_state(version.version_id, "READY", timeout=STEP_S)
            line = f"serving step-{step} "
            await anyio.to_thread.run_sync(generator.wait_for_line, line, STEP_S)
            await control.delete_weight_version(version.version_id)


def _require_true_histories(events: list[VersionEvent], names: list[str]) -> None:
    """A watcher was told of every version, each state at most once, and never back."""
    order = list(VersionState)
    seen: dict[str, list[VersionState]] = {name: [] for name in names}
    for event in events:
        if event.entered is not None:
            seen[event.status.version_id].append(event.entered)
    for name, states in seen.items():
        assert states, f"{name} was never told of"
        assert VersionState.DEGRADED not in states, (name, states)
        assert all(order.index(one) < order.index(two) for one, two in pairwise(states)), (name, states)
