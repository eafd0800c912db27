"""The control client and the monitor against the real control plane, which is killed under them."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from modelexpress_rl import rpc
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.control import AsyncModelExpressControlClient, ModelExpressControlClient
from modelexpress_rl.errors import VersionGone
from modelexpress_rl.monitor import ReadinessMonitor, VersionEvent
from modelexpress_rl.rpc.watch import WatchPolicy
from modelexpress_rl.version import VersionState

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def serving(store: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The real server in a process of its own, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "modelexpress_rl.cli.main", "serve", "--port", str(port), "--store", store],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+) ", process.stdout.readline())
        assert found, f"mx-rl serve ended with {process.poll()}"
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


class Trainer:
    """What a trainer rank does, as bare calls."""

    def __init__(self, plane: rpc.ControlPlane, worker_id: str) -> None:
        self.plane = plane
        self.worker_id = worker_id

    async def register(self, ttl_s: int = 60) -> None:
        worker = refit.WorkerRegistration(
            worker_id=self.worker_id, role=refit.WORKER_ROLE_TRAINER, model_name="m"
        )
        await self.plane.register_worker(refit.RegisterWorkerRequest(worker=worker, ttl_seconds=ttl_s))

    async def publish(self, version_id: str, slot: str) -> None:
        shard = refit.WeightVersionShard(
            version_id=version_id,
            source_slot_id=slot,
            worker_id=self.worker_id,
            tensor_count=1,
            total_bytes=1,
            manifest_digest="d" * 64,
            manifest_endpoint="127.0.0.1:1",
        )
        await self.plane.create_weight_version_shard(refit.CreateWeightVersionShardRequest(shard=shard))

    async def retract(self, version_id: str, slot: str) -> None:
        await self.plane.retract_shard(
            v1.RetractShardRequest(version_id=version_id, source_slot_id=slot, worker_id=self.worker_id)
        )


async def test_a_versions_life_is_seen_step_by_step() -> None:
    with serving("memory") as (_, port):
        url = f"127.0.0.1:{port}"
        plane = rpc.ControlPlane.dial(url)
        trainer, replacement = Trainer(plane, "w0"), Trainer(plane, "w1")
        seen = []
        async with plane, AsyncModelExpressControlClient.connect(url) as client:
            await trainer.register()
            await replacement.register()
            await client.create_weight_version("m", "k", "FULL_TENSOR", ["a", "b"], uid="run:7")
            async for status in client.watch("run:7"):
                seen.append((status.state, status.covered_slots))
                match seen[-1]:
                    case (VersionState.STAGING, 0):
                        await trainer.publish("run:7", "a")
                    case (VersionState.STAGING, 1):
                        assert status.missing_slots == ("b",)
                        await trainer.publish("run:7", "b")
                    case (VersionState.READY, 2) if len(seen) == 3:
                        await trainer.retract("run:7", "a")
                    case (VersionState.DEGRADED, 1):
                        await replacement.publish("run:7", "a")
                    case (VersionState.READY, 2):
                        await client.release_weight_version("run:7", drain_deadline_s=0.0)
                        await replacement.retract("run:7", "a")
                        await trainer.retract("run:7", "b")
            with pytest.raises(VersionGone):
                await client.wait_for_state("run:7", "READY", 10.0)
    assert seen[:5] == [
        (VersionState.STAGING, 0),
        (VersionState.STAGING, 1),
        (VersionState.READY, 2),
        (VersionState.DEGRADED, 1),
        (VersionState.READY, 2),
    ]
    assert seen[-1][0] is VersionState.RETIRED


async def test_a_killed_and_restarted_server_is_followed(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    events: list[VersionEvent] = []
    policy = WatchPolicy(heartbeat_s=1.0)
    with serving(store) as (first, port):
        url = f"127.0.0.1:{port}"
        async with (
            AsyncModelExpressControlClient(rpc.ControlPlane.dial(url), policy=policy) as client,
            ReadinessMonitor(rpc.ControlPlane.dial(url), policy=policy) as monitor,
        ):
            await client.create_weight_version("m", "k", "FULL_TENSOR", ["a"], uid="v")
            monitor.subscribe(events.append, model_name="m")
            watch = client.watch("v")
            assert (await anext(watch)).state is VersionState.STAGING
            with anyio.fail_after(20):
                while not events:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            first.kill()
            first.wait(10)
            with serving(store, port):
                # Not renewed since the restart, by a client that has to dial anew.
                assert (await client.get_weight_version("v")).expected_source_slots == ("a",)
                trainer = Trainer(client._plane, "w0")
                await trainer.register()
                await trainer.publish("v", "a")
                with anyio.fail_after(20):
                    while (status := await anext(watch)).state is not VersionState.READY:
                        pass
                assert (await monitor.wait_until_ready("v", 20.0)).sequence == status.sequence
                with anyio.fail_after(20):
                    while not [each for each in events if each.entered is VersionState.READY]:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                await watch.aclose()
    states = [event.entered for event in events if event.entered]
    assert states == [VersionState.STAGING, VersionState.READY]


async def test_a_restarted_memory_server_has_forgotten() -> None:
    with serving("memory") as (first, port):
        plane = rpc.ControlPlane.dial(f"127.0.0.1:{port}")
        async with AsyncModelExpressControlClient(plane) as client:
            await client.create_weight_version("m", "k", "FULL_TENSOR", ["a"], uid="v")
            watch = client.watch("v")
            await anext(watch)
            first.kill()
            first.wait(10)
            with serving("memory", port):
                with anyio.fail_after(20):
                    assert [status.state async for status in watch] == [VersionState.FORGOTTEN]


def test_the_blocking_client_lists_what_there_is() -> None:
    with serving("memory") as (_, port), ModelExpressControlClient.connect(f"127.0.0.1:{port}") as client:
        for number in range(250):
            client.create_weight_version("m", f"k{number}", "FULL_TENSOR", ["a"], uid=f"v{number}")
        listed = client.list_weight_versions("m")
        assert [version.version_id for version in listed] == [f"v{number}" for number in range(250)]
        sequences = [status.sequence for status in client.list_version_statuses("m", ["STAGING"])]
        assert sequences == sorted(set(sequences), key=lambda sequence: sequence or 0)
        assert client.list_weight_versions("m", ["READY"]) == []


FORKED = """
import gc, os, sys, time
from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.blocking import Portal
from modelexpress_rl.rpc import ControlPlane, parse_address
portal = Portal("forked")
plane = ControlPlane(parse_address(sys.argv[1]), rpc_timeout_s=5.0)
def ask():
    portal.call(plane.get_server_info, v1.GetServerInfoRequest())
ask()
child = os.fork()
if child == 0:
    del plane
    gc.collect()
    sys.exit(0)  # an ordinary end: whatever is left is destroyed
assert os.waitpid(child, 0)[1] == 0
ask()
portal.call(plane.aclose)
portal.close()
"""


def test_a_forked_child_that_ends_leaves_its_parents_connection_alone() -> None:
    with serving("memory") as (_, port):
        done = subprocess.run(
            [sys.executable, "-c", FORKED, f"127.0.0.1:{port}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
