"""What every transport adapter keeps, run on both: the NIXL one, and the in-process one."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import AsyncIterator
from functools import partial

import anyio
import numpy as np
import pytest

from modelexpress_rl.errors import PeerError, StateError, TransferError, TransferTimeout, UsageError
from modelexpress_rl.transport.port import Agent, ReadList, Region
from tests.transport.rigs import (
    InprocessRig,
    NixlRig,
    Rig,
    need_nixl,
    noise,
    one_run,
    region,
    runs,
    soon,
    zeros,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["inprocess", "nixl"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "nixl":
        need_nixl()
    rig: Rig = NixlRig() if request.param == "nixl" else InprocessRig()
    yield rig
    await rig.aclose()


class TestReading:
    async def test_every_byte_lands_and_no_other(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(1_000_003), zeros(1_000_103)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target[50:-50], run_bytes=4099, order_seed=1))
        assert (peer, prepared.peer, prepared.total_bytes) == ("trainer", "trainer", source.nbytes)
        read = await generator.post(prepared)
        await read.wait(soon())
        assert read.settled
        assert await read.wait_settled(0.0)
        assert np.array_equal(target[50:-50], source)
        assert not target[:50].any()
        assert not target[-50:].any()

    async def test_it_is_posted_again_for_the_next_version(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(100_000), zeros(100_000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=1000))
        for seed in range(1, 4):
            source[:] = noise(100_000, seed)
            await (await generator.post(prepared)).wait(soon())
            assert np.array_equal(target, source)

    async def test_two_posts_of_one_prepared_read_at_a_time(self, rig: Rig) -> None:
        trainer, generator = await rig.silent_agent("trainer"), await rig.agent("generator")
        source, target = noise(100_000), zeros(100_000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=1000))
        first, second = await generator.post(prepared), await generator.post(prepared)
        await rig.wake(trainer, first)
        await rig.wake(trainer, second)
        await first.wait(soon())
        await second.wait(soon())
        assert np.array_equal(target, source)

    async def test_no_runs_and_runs_of_no_bytes(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(100), zeros(100)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        nothing = np.zeros(0, np.uint64)
        await (await generator.post(await generator.prepare(peer, ReadList(nothing, nothing, nothing)))).wait(
            soon()
        )
        some = ReadList(
            np.array([source.ctypes.data, 0, source.ctypes.data + 10], np.uint64),
            np.array([target.ctypes.data, 0, target.ctypes.data + 10], np.uint64),
            np.array([5, 0, 5], np.uint64),
        )
        await (await generator.post(await generator.prepare(peer, some))).wait(soon())
        assert np.array_equal(target[:5], source[:5])
        assert np.array_equal(target[10:15], source[10:15])
        assert not target[5:10].any()

    async def test_from_an_event_loop_in_another_thread(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(100_000), zeros(100_000)
        await trainer.register([region(source)])
        metadata = await trainer.metadata()

        async def elsewhere() -> None:
            await generator.register([region(target)])
            peer = await generator.add_peer(metadata)
            prepared = await generator.prepare(peer, runs(source, target, run_bytes=1000))
            await (await generator.post(prepared)).wait(soon())

        await anyio.to_thread.run_sync(partial(anyio.run, elsewhere))
        assert np.array_equal(target, source)


class TestPeers:
    async def test_the_same_metadata_again_keeps_what_is_prepared(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(1000), zeros(1000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=100))
        await generator.add_peer(await trainer.metadata())
        await (await generator.post(prepared)).wait(soon())
        assert np.array_equal(target, source)

    async def test_newer_metadata_makes_prepared_reads_stale(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, more, target = noise(1000), noise(1000, 1), zeros(1000)
        first = await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        stale = await generator.prepare(peer, runs(source, target, run_bytes=100))
        with pytest.raises(TransferError, match="trainer"):
            await generator.prepare(peer, runs(more, target, run_bytes=100))
        await trainer.register([region(more)])
        await trainer.deregister(first)
        assert await generator.add_peer(await trainer.metadata()) == peer
        with pytest.raises(TransferError, match=r"trainer.*prepare again"):
            await generator.post(stale)
        with pytest.raises(TransferError, match="trainer"):
            await generator.prepare(peer, runs(source, target, run_bytes=100))
        fresh = await generator.prepare(peer, runs(more, target, run_bytes=100))
        await (await generator.post(fresh)).wait(soon())
        assert np.array_equal(target, more)

    async def test_a_peer_that_restarted_under_its_name(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(1000), zeros(1000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        stale = await generator.prepare(peer, runs(source, target, run_bytes=100))
        await (await generator.post(stale)).wait(soon())
        await trainer.aclose()

        reborn, other = await rig.agent("trainer"), noise(1000, 1)
        await reborn.register([region(other)])
        assert await generator.add_peer(await reborn.metadata()) == peer
        with pytest.raises(TransferError, match=r"trainer.*prepare again"):
            await generator.post(stale)
        fresh = await generator.prepare(peer, runs(other, target, run_bytes=100))
        await (await generator.post(fresh)).wait(soon())
        assert np.array_equal(target, other)

    async def test_a_peer_that_is_gone(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(1000), zeros(1000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=100))
        await (await generator.post(prepared)).wait(soon())
        await trainer.aclose()
        read = await generator.post(prepared)
        with pytest.raises(TransferError, match="trainer") as caught:
            await read.wait(soon())
        assert not isinstance(caught.value, TransferTimeout)
        assert caught.value.peer == "trainer"
        assert read.settled
        with pytest.raises(TransferError, match="trainer"):
            await generator.post(prepared)

    async def test_forgotten_and_unknown_peers(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(1000), zeros(1000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=100))
        await generator.forget_peer(peer)
        await generator.forget_peer(peer)
        await generator.forget_peer("nobody")
        with pytest.raises(TransferError, match="trainer"):
            await generator.post(prepared)
        with pytest.raises(TransferError, match="trainer"):
            await generator.prepare(peer, runs(source, target, run_bytes=100))
        await generator.add_peer(await trainer.metadata())
        again = await generator.prepare(peer, runs(source, target, run_bytes=100))
        await (await generator.post(again)).wait(soon())
        assert np.array_equal(target, source)

    async def test_bytes_that_are_no_metadata(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        await trainer.register([region(noise(1000))])
        whole = await trainer.metadata()
        assert await generator.add_peer(whole) == "trainer"
        cut = [whole[:at] for at in range(0, len(whole), max(1, len(whole) // 20))]
        for hostile in (b"nonsense", noise(300).tobytes(), b"[]", b'["a"]', *cut):
            with pytest.raises(PeerError):
                await generator.add_peer(hostile)
        with pytest.raises(PeerError, match="own name"):
            await trainer.add_peer(whole)
        # Another peer's is still accepted. (NIXL may refuse "trainer" from now on: it keeps half of what
        # was cut off.)
        other = await rig.agent("other")
        assert await generator.add_peer(await other.metadata()) == "other"


class TestMemory:
    async def test_runs_outside_what_is_registered(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(8192), zeros(8192)
        # Two regions that touch: a run must lie in one of them.
        await trainer.register([region(source[:2048]), region(source[2048:4096])])
        await generator.register([region(target[:4096])])
        peer = await generator.add_peer(await trainer.metadata())
        theirs, ours = source.ctypes.data, target.ctypes.data
        for remote, local, size in (
            (theirs + 4096, ours, 1),
            (theirs + 4095, ours, 2),
            (theirs - 1, ours, 1),
            (theirs + 2000, ours, 100),
            (theirs, ours + 4096, 1),
            (theirs, ours - 1, 2),
            (2**64 - 8, ours, 16),
            (theirs, 2**64 - 8, 16),
            (theirs, ours, 2**64 - 1),
        ):
            with pytest.raises(TransferError, match="registered"):
                await generator.prepare(peer, one_run(remote, local, size))
        prepared = await generator.prepare(peer, one_run(theirs + 4095, ours + 4095, 1))
        await (await generator.post(prepared)).wait(soon())
        assert target[4095] == source[4095]

    async def test_registrations_that_share_memory(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(8192), zeros(8192)
        await generator.register([region(target)])
        whole = await trainer.register([region(source), region(source[100:200]), region(source)])
        part = await trainer.register([region(source[1000:2000])])
        again = await trainer.register([region(source)])
        await trainer.deregister(whole)
        await trainer.deregister(whole)
        await trainer.deregister(again)
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source[1000:2000], target[:1000], run_bytes=100))
        await (await generator.post(prepared)).wait(soon())
        assert np.array_equal(target[:1000], source[1000:2000])
        await trainer.deregister(part)
        await generator.add_peer(await trainer.metadata())
        with pytest.raises(TransferError, match="registered"):
            await generator.prepare(peer, runs(source[1000:2000], target[:1000], run_bytes=100))

    async def test_what_cannot_be_registered(self, rig: Rig) -> None:
        agent = await rig.agent("trainer")
        memory = zeros(8192)
        await agent.register([region(memory[:4096])])
        with pytest.raises(StateError, match="overlap"):
            await agent.register([region(memory[4000:5000])])
        with pytest.raises(StateError, match="overlap"):
            await agent.register([region(memory)])
        with pytest.raises(UsageError, match="0 bytes"):
            await agent.register([Region(memory.ctypes.data, 0)])
        with pytest.raises(UsageError, match="tpu"):
            await agent.register([Region(memory.ctypes.data, 1, "tpu")])
        await agent.register([])
        await agent.register([region(memory[4096:])])

    async def test_memory_that_was_freed_before_it_is_deregistered(self, rig: Rig) -> None:
        agent = await rig.agent("trainer")
        mapping = mmap.mmap(-1, 1 << 20)
        memory = np.frombuffer(mapping, np.uint8)
        registration = await agent.register([region(memory)])
        del memory
        gc.collect()
        mapping.close()
        await agent.deregister(registration)

    async def test_many_regions(self, rig: Rig) -> None:
        trainer, generator = await rig.agent("trainer"), await rig.agent("generator")
        source, target = noise(4_000_000), zeros(4_000_000)
        regions = [region(each) for each in np.split(source, 5000)]
        registration = await trainer.register(regions)
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=800, order_seed=3))
        await (await generator.post(prepared)).wait(soon())
        assert np.array_equal(target, source)
        await trainer.deregister(registration)


class TestDeadlines:
    async def test_a_read_that_does_not_end_is_quarantined_until_it_does(self, rig: Rig) -> None:
        trainer, generator = await rig.silent_agent("trainer"), await rig.agent("generator")
        source, target = noise(10_000), zeros(10_000)
        await trainer.register([region(source)])
        registration = await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        read = await generator.post(await generator.prepare(peer, runs(source, target, run_bytes=1000)))
        started = anyio.current_time()
        with pytest.raises(TransferTimeout, match="trainer") as caught:
            await read.wait(soon(0.05))
        assert anyio.current_time() - started < 5
        assert caught.value.peer == "trainer"
        assert not read.settled
        assert not await read.wait_settled(soon(0.02))
        with pytest.raises(StateError, match="trainer"):
            await generator.deregister(registration)
        await generator.forget_peer(peer)  # must not lose track of the read
        assert not read.settled
        await rig.wake(trainer, read)
        assert await read.wait_settled(soon())
        await read.wait(soon())
        assert np.array_equal(target, source)
        await generator.deregister(registration)

    async def test_a_wait_that_is_cancelled_leaves_the_read_alone(self, rig: Rig) -> None:
        trainer, generator = await rig.silent_agent("trainer"), await rig.agent("generator")
        source, target = noise(10_000), zeros(10_000)
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        read = await generator.post(await generator.prepare(peer, runs(source, target, run_bytes=1000)))
        with anyio.move_on_after(0.02) as scope:
            await read.wait(soon())
        assert scope.cancelled_caught
        assert not read.settled
        await rig.wake(trainer, read)
        await read.wait(soon())
        assert np.array_equal(target, source)

    async def test_closing_with_an_abandoned_read(self, rig: Rig) -> None:
        trainer, generator = await rig.silent_agent("trainer"), await rig.agent("generator")
        source, target = noise(10_000), zeros(10_000)
        await trainer.register([region(source)])
        registration = await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=1000))
        read = await generator.post(prepared)
        with pytest.raises(TransferTimeout):
            await read.wait(soon(0.02))
        started = anyio.current_time()
        await generator.aclose()
        await generator.aclose()
        assert anyio.current_time() - started < 5
        assert read.settled
        with pytest.raises(TransferError, match="closed"):
            await read.wait(soon())
        await generator.deregister(registration)
        await generator.forget_peer(peer)
        for refused in (generator.metadata(), generator.post(prepared), generator.register([region(target)])):
            with pytest.raises(StateError, match="closed"):
                await refused


async def test_agents_in_one_process_read_at_the_same_time(rig: Rig) -> None:
    """Four readers and two sources, each reader on an event loop and thread of its own."""
    sources = [noise(1 << 22, seed) for seed in range(2)]
    targets = [zeros(1 << 22) for _ in range(4)]
    trainers = [await rig.agent(f"trainer-{index}") for index in range(2)]
    generators = [await rig.agent(f"generator-{index}") for index in range(4)]
    for trainer, source in zip(trainers, sources, strict=True):
        await trainer.register([region(source)])
    everyone = [await trainer.metadata() for trainer in trainers]
    failures: list[BaseException] = []

    async def refit(generator: Agent, target: np.ndarray) -> None:
        await generator.register([region(target)])
        peers = [await generator.add_peer(each) for each in everyone]
        half = len(target) // 2
        prepared = [
            await generator.prepare(peers[0], runs(sources[0][:half], target[:half], run_bytes=65536)),
            await generator.prepare(
                peers[1], runs(sources[1][half:], target[half:], run_bytes=4096, order_seed=5)
            ),
        ]
        for _ in range(5):
            target[:] = 0
            reads = [await generator.post(each) for each in prepared]
            for read in reads:
                await read.wait(soon(30))
            assert np.array_equal(target, np.concatenate([sources[0][:half], sources[1][half:]]))

    def run(generator: Agent, target: np.ndarray) -> None:
        try:
            anyio.run(refit, generator, target)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=each) for each in zip(generators, targets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join, 60)
    assert not failures
