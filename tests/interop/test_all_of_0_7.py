"""An orchestrator, a trainer and a generator of 0.7.0, with nothing of ours but `mx-rl serve`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.e2e.processes import serve
from tests.interop.peers import Peer, Pool, Raised
from tests.interop.test_generator import engine_holds

pytestmark = pytest.mark.heavy


class Job:
    """One client of each kind."""

    def __init__(self, pool: Pool, address: str) -> None:
        [self.control] = pool.take("peer_control.py")
        [self.trainer] = pool.take("peer_trainer.py")
        [self.generator] = pool.take("peer_generator.py")
        self.control.call("connect", address=address)
        self.slot = self.trainer.call("start", address=address, model="m")["slot"]
        self.generator.call("start", address=address, model="m", lease_ttl_seconds=30)

    def create(self, version: str) -> None:
        self.control.call(
            "control",
            method="create_weight_version",
            model_name="m",
            idempotency_key=f"key {version}",
            uid=version,
            payload_format="FULL_TENSOR",
            expected_source_slots=[self.slot],
        )

    def state(self, version: str) -> str:
        return self.control.call("control", method="get_weight_version", version_id=version)["state"]

    def end(self, version: str) -> None:
        self.control.call("control", method="delete_weight_version", version_id=version)

    def close(self) -> None:
        self.generator.call("close")
        self.trainer.call("close")


def refused(peer: Peer, do: str, **arguments: Any) -> None:
    with pytest.raises(Raised) as caught:
        peer.call(do, **arguments)
    assert caught.value.code == "FAILED_PRECONDITION"


def once_dialled_again(call: Callable[[], Any]) -> Any:
    """What `call` returns: after a failure gRPC waits a second or so before it dials again."""
    end = time.monotonic() + 20
    while True:
        try:
            return call()
        except Raised as error:
            if error.code != "UNAVAILABLE" or time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_steps_with_a_control_plane_that_is_killed_between_and_during_them(
    pool: Pool, tmp_path: Path
) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    with serve(store) as (server, address):
        port = int(address.rpartition(":")[2])
        job = Job(pool, address)
        job.create("v1")
        assert job.state("v1") == "STAGING"
        job.trainer.call("publish", version="v1", step=1)
        assert job.state("v1") == "READY"
        refused(job.trainer, "release", version="v1")  # nobody has released the version
        job.generator.call("stage", version="v1")
        server.process.send_signal(signal.SIGKILL)
        server.wait(10)
    with serve(store, port):
        assert once_dialled_again(lambda: job.state("v1")) == "READY"
        job.end("v1")
        with pytest.raises(Raised, match="FAILED_PRECONDITION"):  # somebody reads it
            once_dialled_again(lambda: job.trainer.call("release", version="v1"))
        assert job.generator.call("apply")
        assert job.generator.call("holds") == engine_holds(1)
        job.generator.call("release")
        job.trainer.call("release", version="v1")
        job.create("v2")
        job.trainer.call("publish", version="v2", step=2)
        job.generator.call("stage", version="v2")
        assert job.generator.call("apply")
        assert job.generator.call("holds") == engine_holds(2)
        job.generator.call("release")
        job.close()
