"""A generator that is slower than training meets no mixed bytes, whatever is done where it holds all arenas.

The trainer writes a pattern of the version into every element and goes on at once; two hundred versions. The
generator, the real one, takes the newest version each time, and its reads land late. What it has staged must
be the version that it asked for, in every element.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from modelexpress_rl.server.settings import Settings
from modelexpress_rl.train.generations import Use
from modelexpress_rl.transport.inprocess import Hub
from modelexpress_rl.transport.port import Agent
from tests.train.mixed_bytes import Read, Scene, reader_of, trainer_of
from tests.train.support import Orchestrator, control_plane

pytestmark = pytest.mark.anyio
VERSIONS = 200
LATE_S = 0.01


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")
    monkeypatch.setenv("MX_REFIT_TIMING", "0")


@contextlib.asynccontextmanager
async def orchestrated() -> AsyncIterator[Orchestrator]:
    """A control plane that releases what is older than the newest READY version."""
    async with control_plane(Settings(keep_last=1)) as address:
        orchestrator = Orchestrator(address)
        try:
            yield orchestrator
        finally:
            await orchestrator.plane.aclose()


@contextlib.asynccontextmanager
async def scene(*, late_s: float = LATE_S, **config: object) -> AsyncIterator[Scene]:
    """All of it in this process."""
    hub = Hub()

    async def agent(where: object) -> Agent:
        return hub.agent("trainer")

    async with orchestrated() as orchestrator:
        address = str(orchestrator.plane.address)
        async with (
            trainer_of(address, agent, agent_name="trainer", **config) as trainer,
            reader_of(address, hub.agent("reader")) as read,
        ):
            hub.delay("trainer", late_s)
            yield Scene(orchestrator, trainer, read)


@pytest.mark.parametrize(
    ("policy", "overlap", "mode"),
    [
        ("WAIT", "PUBLISH", "COPY_TO_HOST"),
        ("SKIP", "CAPTURE", "COPY_TO_HOST"),
        ("GROW", "CAPTURE", "COPY_TO_DEVICE"),
    ],
)
async def test_two_hundred_versions(policy: str, overlap: str, mode: str) -> None:
    async with scene(back_pressure=policy, overlap=overlap, staging_mode=mode) as at:
        with anyio.fail_after(60):
            await at.run(VERSIONS)
        assert at.seen == sorted(at.seen)
        assert at.seen[-1] == max(at.ready)
        assert sorted(at.ready + at.skipped + at.overtaken) == list(range(1, VERSIONS + 1))
        assert len(at.seen) >= 10
        assert bool(at.skipped) is (policy == "SKIP")
        if policy == "SKIP":
            assert at.most["versions_skipped"] > 0
        if policy == "GROW":
            assert at.most["generations"] in (3, 4)


async def test_the_test_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault planted: memory that is free once its version is released, read or not."""
    monkeypatch.setattr(Use, "wanted_back", Use.release)
    async with scene(staging_mode="COPY_TO_HOST", overlap="PUBLISH", late_s=0.5) as at:
        with pytest.raises(BaseExceptionGroup) as caught:
            await at.run(VERSIONS)
        assert "digest" in repr(caught.value).lower()


@pytest.mark.heavy
async def test_two_hundred_versions_between_processes_over_nixl() -> None:
    pytest.importorskip("nixl")
    async with orchestrated() as orchestrator:
        address = str(orchestrator.plane.address)
        config = {"back_pressure": "GROW", "overlap": "CAPTURE", "staging_mode": "COPY_TO_HOST"}
        async with trainer_of(address, **config) as trainer, _process(address) as read:
            at = Scene(orchestrator, trainer, read)
            with anyio.fail_after(90):
                await at.run(VERSIONS)
            assert at.seen[-1] == VERSIONS
            assert len(at.seen) >= 10


@contextlib.asynccontextmanager
async def _process(address: str) -> AsyncIterator[Read]:
    """The generator in a process of its own: numbers in, and whether they were there out."""
    command = [sys.executable, "-m", __name__, address]
    async with await anyio.open_process(command, stderr=None, env={**os.environ}) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)

        async def read(number: int) -> bool:
            await process.stdin.send(f"{number}\n".encode())  # type: ignore[union-attr]
            answer = json.loads(await lines.receive_until(b"\n", 1000))
            assert answer in (True, False)
            return bool(answer)

        with anyio.fail_after(60):
            assert await lines.receive_until(b"\n", 1000) == b"ready"
        yield read
        await process.stdin.aclose()
        with anyio.fail_after(20):
            assert await process.wait() == 0


async def _serve(address: str) -> None:
    async with reader_of(address) as read:
        print("ready", flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            print(json.dumps(await read(int(line))), flush=True)


if __name__ == "__main__":
    anyio.run(_serve, sys.argv[1])
