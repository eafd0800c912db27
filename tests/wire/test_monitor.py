"""The readiness monitor, on a modern server and on an old one."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator

import anyio
import pytest

from modelexpress_rl import rpc
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import DeadlineExceeded, StateError, UsageError, VersionGone
from modelexpress_rl.monitor import ReadinessMonitor, VersionEvent
from modelexpress_rl.version import VersionState
from tests.wire.fake_server import READY, RELEASING, STAGING, FakeControlPlane, Store

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["modern", "old"])
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeControlPlane]:
    async with FakeControlPlane(modern=request.param) as server:
        yield server


def staging(uid: str) -> refit.WeightVersion:
    return refit.WeightVersion(
        uid=uid,
        model_name="m",
        state=STAGING,  # type: ignore[arg-type]
        expected_source_slots=["s0"],
    )


class Heard:
    """A callback that keeps the events and can be awaited for a number of them."""

    def __init__(self) -> None:
        self.events: list[VersionEvent] = []
        self._more = anyio.Event()

    async def __call__(self, event: VersionEvent) -> None:
        self.events.append(event)
        self._more.set()

    async def at_least(self, count: int) -> list[str]:
        with anyio.fail_after(10):
            while len(self.events) < count:
                await self._more.wait()
                self._more = anyio.Event()
        return [f"{event.status.version_id} {event.entered}" for event in self.events]


async def test_waiting_until_ready(fake: FakeControlPlane) -> None:
    async with ReadinessMonitor.connect(fake.url) as monitor, anyio.create_task_group() as tasks:

        async def publish() -> None:
            await fake.store.put(staging("v"))
            await fake.store.set_state("v", READY)

        tasks.start_soon(publish)
        assert (await monitor.wait_until_ready("v", 10.0)).covered_slots == 1


async def test_waits_are_bounded_and_know_when_it_is_in_vain(fake: FakeControlPlane) -> None:
    async with ReadinessMonitor.connect(fake.url) as monitor:
        with pytest.raises(DeadlineExceeded, match="not known"):
            await monitor.wait_until_ready("v", 0.1)
        with pytest.raises(rpc.NotFound):
            await monitor.wait_until_ready("v", 10.0, wait_for_creation=False)
        await fake.store.put(staging("v"))
        await fake.store.set_state("v", RELEASING)
        with pytest.raises(VersionGone):
            await monitor.wait_until_ready("v", 10.0)


async def test_events_of_a_version(fake: FakeControlPlane) -> None:
    await fake.store.put(staging("v"))
    seen = []
    async with ReadinessMonitor.connect(fake.url) as monitor:
        async for event in monitor.version_events("v"):
            seen.append(str(event))
            if event.entered is VersionState.STAGING:
                await fake.store.set_state("v", READY)
            elif event.entered is VersionState.READY:
                await fake.store.forget("v")
    assert seen[:2] == ["v STAGING, 0/1 slots, missing s0", "STAGING -> v READY, 1/1 slots"]
    assert seen[2].startswith("READY -> v FORGOTTEN")


async def test_callbacks_of_a_version(fake: FakeControlPlane) -> None:
    heard = Heard()
    async with ReadinessMonitor.connect(fake.url) as monitor:
        subscription = monitor.subscribe(heard, version_id="v", states=[VersionState.READY])
        await fake.store.put(staging("v"))
        await fake.store.set_state("v", READY)
        assert await heard.at_least(1) == ["v READY"]
        with pytest.raises(DeadlineExceeded):
            await subscription.wait(0.05)
        await fake.store.forget("v")
        await subscription.wait(10.0)
    assert len(heard.events) == 1


async def test_a_callback_that_raises_or_hangs_is_logged(
    fake: FakeControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    threads = []
    heard = Heard()

    def plain(event: VersionEvent) -> None:
        threads.append(threading.current_thread())
        raise RuntimeError(f"at {event.status.state}")

    async def hangs(_: VersionEvent) -> None:
        await anyio.sleep_forever()

    await fake.store.put(staging("v"))
    plane = rpc.ControlPlane.dial(fake.url)
    with caplog.at_level(logging.ERROR, "modelexpress_rl.monitor"):
        async with ReadinessMonitor(plane, callback_timeout_s=0.05) as monitor:
            subscriptions = [monitor.subscribe(each, version_id="v") for each in (plain, hangs, heard)]
            await heard.at_least(1)
            await fake.store.set_state("v", READY)
            await heard.at_least(2)
            await fake.store.forget("v")
            for subscription in subscriptions:
                await subscription.wait(10.0)
    assert all(thread is not threading.main_thread() for thread in threads)
    messages = [record.exc_text or "" for record in caplog.records if record.name.endswith("monitor")]
    assert sum("RuntimeError: at " in message for message in messages) >= 2
    assert sum("TimeoutError" in message for message in messages) >= 2


async def test_callbacks_of_a_model_over_a_restart() -> None:
    heard = Heard()
    store = Store()
    async with FakeControlPlane(store=store) as first:
        await store.put(staging("v0"))
        plane = rpc.ControlPlane.dial(first.url, rpc_timeout_s=0.2)
        monitor = ReadinessMonitor(plane)
        await monitor.__aenter__()
        subscription = monitor.subscribe(heard, model_name="m")
        await heard.at_least(1)
    await store.put(staging("v1"))
    async with FakeControlPlane(store=store, port=first.port):
        await heard.at_least(2)
        await store.set_state("v1", READY)
        assert await heard.at_least(3) == ["v0 STAGING", "v1 STAGING", "v1 READY"]
        subscription.cancel()
        await subscription.wait(10.0)
        await monitor.__aexit__(None, None, None)


async def test_a_subscription_waits_for_a_server_that_is_not_there_yet() -> None:
    async with FakeControlPlane() as fake:
        pass
    heard = Heard()
    plane = rpc.ControlPlane.dial(fake.url, rpc_timeout_s=0.05)
    async with ReadinessMonitor(plane) as monitor:
        monitor.subscribe(heard, model_name="m")
        with pytest.raises(rpc.Unavailable):
            await anext(monitor.model_events("m"))
        async with FakeControlPlane(port=fake.port, store=fake.store):
            await fake.store.put(staging("v"))
            assert await heard.at_least(1) == ["v STAGING"]


async def test_the_next_ready_version_of_a_model() -> None:
    async with FakeControlPlane() as fake, ReadinessMonitor.connect(fake.url) as monitor:
        for uid in ("v0", "v1"):
            await fake.store.put(staging(uid))
            await fake.store.set_state(uid, READY)
        assert (await monitor.wait_for_ready_version("m", 10.0)).version_id == "v0"
        assert (await monitor.wait_for_ready_version("m", 10.0, after_sequence=1)).version_id == "v1"
        with pytest.raises(DeadlineExceeded, match="no READY version after sequence 2"):
            await monitor.wait_for_ready_version("m", 0.1, after_sequence=2)


async def test_an_old_server_ends_a_models_subscription() -> None:
    async with FakeControlPlane(modern=False) as old, ReadinessMonitor.connect(old.url) as monitor:
        subscription = monitor.subscribe(Heard(), model_name="m")
        await subscription.wait(10.0)
        assert isinstance(subscription.error, rpc.Unimplemented)


async def test_misuse_is_named() -> None:
    async with FakeControlPlane() as fake:
        monitor = ReadinessMonitor.connect(fake.url)
        with pytest.raises(StateError, match="async with"):
            monitor.subscribe(Heard(), model_name="m")
        with pytest.raises(UsageError, match="either"):
            monitor.subscribe(Heard())
