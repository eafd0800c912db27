"""The faults that the in-process transport plays on order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest

from modelexpress_rl.errors import TransferError, TransferTimeout
from modelexpress_rl.transport.inprocess import Hub, InprocessAgent
from modelexpress_rl.transport.port import PreparedRead
from modelexpress_rl.transport.reads import Completion, PostedRead
from tests.transport.rigs import Bytes, noise, region, runs, soon, zeros

pytestmark = pytest.mark.anyio

Setting = tuple[Hub, InprocessAgent, PreparedRead, Bytes, Bytes]


@pytest.fixture
async def setting() -> Setting:
    hub = Hub()
    trainer, generator = hub.agent("trainer"), hub.agent("generator")
    source, target = noise(10_000), zeros(10_000)
    await trainer.register([region(source)])
    await generator.register([region(target)])
    peer = await generator.add_peer(await trainer.metadata())
    return hub, generator, await generator.prepare(peer, runs(source, target, run_bytes=100)), source, target


async def test_a_read_that_fails_half_way(setting: Setting) -> None:
    hub, generator, prepared, source, target = setting
    hub.fail_next("trainer")
    read = await generator.post(prepared)
    with pytest.raises(TransferError, match="trainer"):
        await read.wait(soon())
    assert read.settled
    assert np.array_equal(target[:5000], source[:5000])
    assert not target[5000:].any()
    await (await generator.post(prepared)).wait(soon())
    assert np.array_equal(target, source)


async def test_a_bit_that_flips_on_the_way(setting: Setting) -> None:
    hub, generator, prepared, source, target = setting
    hub.corrupt_next("trainer")
    await (await generator.post(prepared)).wait(soon())
    assert np.flatnonzero(target != source).tolist() == [len(source) - 1]
    await (await generator.post(prepared)).wait(soon())
    assert np.array_equal(target, source)


async def test_a_read_that_is_late(setting: Setting) -> None:
    hub, generator, prepared, source, target = setting
    hub.delay("trainer", 0.05)
    read = await generator.post(prepared)
    with pytest.raises(TransferTimeout):
        await read.wait(soon(0.001))
    assert not target.any()
    assert await read.wait_settled(soon())
    assert np.array_equal(target, source)


@pytest.mark.parametrize("end", ["kill", "restart"])
async def test_a_peer_that_dies_with_reads_under_way(setting: Setting, end: str) -> None:
    hub, generator, prepared, _, target = setting
    hub.hold("trainer")
    read = await generator.post(prepared)
    assert not read.settled
    if end == "kill":
        hub.kill("trainer")
    else:
        hub.agent("trainer")
    with pytest.raises(TransferError, match=r"trainer.*gone"):
        await read.wait(soon())
    with pytest.raises(TransferError, match="prepare again"):
        await generator.post(prepared)
    assert not target.any()


async def test_memory_that_the_peer_took_back(setting: Setting) -> None:
    hub, generator, _, _, target = setting
    trainer, other = hub.agent("other"), noise(100)
    registration = await trainer.register([region(other)])
    peer = await generator.add_peer(await trainer.metadata())
    prepared = await generator.prepare(peer, runs(other, target[:100], run_bytes=10))
    await trainer.deregister(registration)
    with pytest.raises(TransferError, match="deregistered"):
        await (await generator.post(prepared)).wait(soon())
    assert not target.any()


def _ending_loop(body: Callable[[], Awaitable[object]]) -> None:
    """Run `body` to a cancelled end, in a loop that is closed afterwards."""

    async def briefly() -> None:
        with anyio.move_on_after(0.01):
            await body()

    asyncio.run(briefly())


def test_a_waiter_whose_loop_is_gone_harms_nobody() -> None:
    ended = Completion()
    _ending_loop(lambda: ended.wait(float("inf")))
    ended.set()
    ended.set()
    assert asyncio.run(ended.wait(0.0))


async def test_the_first_end_of_a_read_counts() -> None:
    read = PostedRead("trainer", 10)
    read.finish("first")
    read.finish()
    with pytest.raises(TransferError, match="10 bytes from 'trainer' failed: first"):
        await read.wait(soon())
