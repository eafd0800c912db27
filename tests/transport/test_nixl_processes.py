"""NIXL between processes, and what becomes of reads when the peer is stopped, killed or restarted.

The targets allow tcp only where a fault is to hit a read under way: between processes of one host UCX
otherwise copies straight out of the peer's memory, and a stopped peer doesn't matter.
"""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import anyio
import numpy as np
import pytest

from modelexpress_rl.errors import PeerError, TransferError, TransferTimeout
from modelexpress_rl.transport.nixl import NixlAgent
from modelexpress_rl.transport.port import ReadList
from tests.transport.rigs import Bytes, need_nixl, one_run, region, soon, zeros
from tests.transport.target import Target, pattern

pytestmark = [pytest.mark.anyio, pytest.mark.heavy]

TCP = {"UCX_TLS": "tcp"}
MIB = 2**20
MakeTarget = Callable[..., Target]


@pytest.fixture
def target() -> Iterator[MakeTarget]:
    """Starts target processes and kills them at the end."""
    need_nixl()
    started: list[Target] = []

    def start(name: str, size_bytes: int, seed: int, env: dict[str, str] | None = None) -> Target:
        started.append(made := Target(name, size_bytes, seed, env))
        return made

    yield start
    for each in started:
        each.signal(signal.SIGCONT)
        each.kill()


@pytest.fixture
async def generator() -> AsyncIterator[NixlAgent]:
    need_nixl()
    async with await NixlAgent.create("generator", readable=False) as agent:
        yield agent


def read_list(source: Target, target: Bytes, run_bytes: int, *, shuffle: bool = False) -> ReadList:
    offsets = np.arange(0, source.size_bytes, run_bytes, dtype=np.uint64)
    if shuffle:
        offsets = np.random.default_rng(1).permutation(offsets)
    sizes = np.full(len(offsets), run_bytes, np.uint64)
    return ReadList(offsets + np.uint64(source.region.addr), offsets + np.uint64(target.ctypes.data), sizes)


@pytest.mark.parametrize("env", [{}, TCP], ids=["default", "tcp"])
async def test_twenty_thousand_small_runs(
    target: MakeTarget, generator: NixlAgent, env: dict[str, str]
) -> None:
    trainer = await target("trainer", 20_000 * 4096, 1, env).ready()
    memory = zeros(trainer.size_bytes)
    await generator.register([region(memory)])
    peer = await generator.add_peer(trainer.metadata)
    prepared = await generator.prepare(peer, read_list(trainer, memory, 4096, shuffle=True))
    for seed in (1, 2):
        await trainer.fill(seed)
        await (await generator.post(prepared)).wait(soon(30))
        assert np.array_equal(memory, pattern(trainer.size_bytes, seed))


async def test_a_stopped_peer_leaves_buffers_quarantined_until_it_goes_on(
    target: MakeTarget, generator: NixlAgent
) -> None:
    trainer = await target("trainer", 64 * MIB, 1, TCP).ready()
    memory = zeros(trainer.size_bytes)
    await generator.register([region(memory)])
    peer = await generator.add_peer(trainer.metadata)
    prepared = await generator.prepare(peer, read_list(trainer, memory, MIB))
    await (await generator.post(prepared)).wait(soon())
    memory[:] = 0

    trainer.signal(signal.SIGSTOP)
    read = await generator.post(prepared)
    started = anyio.current_time()
    with pytest.raises(TransferTimeout, match="trainer"):
        await read.wait(soon(0.2))
    assert anyio.current_time() - started < 2
    # Whatever is done meanwhile, the bytes may still come.
    with pytest.raises(TransferTimeout):
        await (await generator.post(prepared)).wait(soon(0.05))
    await generator.forget_peer(peer)
    assert not await read.wait_settled(soon(0.05))
    trainer.signal(signal.SIGCONT)
    assert await read.wait_settled(soon())
    await read.wait(soon())
    assert np.array_equal(memory, pattern(trainer.size_bytes, 1))


async def test_a_killed_peer_fails_the_reads_under_way(target: MakeTarget, generator: NixlAgent) -> None:
    trainer = await target("trainer", 64 * MIB, 1, TCP).ready()
    memory = zeros(trainer.size_bytes)
    registration = await generator.register([region(memory)])
    peer = await generator.add_peer(trainer.metadata)
    prepared = await generator.prepare(peer, read_list(trainer, memory, MIB))
    await (await generator.post(prepared)).wait(soon())

    trainer.signal(signal.SIGSTOP)
    awaited, abandoned = await generator.post(prepared), await generator.post(prepared)
    with pytest.raises(TransferTimeout):
        await abandoned.wait(soon(0.1))
    trainer.kill()
    with pytest.raises(TransferError, match="trainer") as caught:
        await awaited.wait(soon())
    assert not isinstance(caught.value, TransferTimeout)
    assert await abandoned.wait_settled(soon())
    with pytest.raises(TransferError, match="trainer"):
        await generator.post(prepared)
    await generator.deregister(registration)


async def test_a_peer_that_is_killed_while_it_is_read_again_and_again(
    target: MakeTarget, generator: NixlAgent
) -> None:
    trainer = await target("trainer", 64 * MIB, 1, TCP).ready()
    memory = zeros(trainer.size_bytes)
    await generator.register([region(memory)])
    peer = await generator.add_peer(trainer.metadata)
    prepared = await generator.prepare(peer, read_list(trainer, memory, 65536, shuffle=True))
    read = await generator.post(prepared)
    with pytest.raises(TransferError, match="trainer") as caught:  # noqa: PT012 - any of the reads may meet it
        for count in range(1000):
            await read.wait(soon())
            read = await generator.post(prepared)
            if count == 2:
                trainer.kill()
    assert not isinstance(caught.value, TransferTimeout)


async def test_a_peer_that_restarts_under_its_name(target: MakeTarget, generator: NixlAgent) -> None:
    first, second = target("trainer", 8 * MIB, 1), target("trainer", 8 * MIB, 2)
    await first.ready()
    await second.ready()
    memory = zeros(8 * MIB)
    await generator.register([region(memory)])
    peer = await generator.add_peer(first.metadata)
    stale = await generator.prepare(peer, read_list(first, memory, MIB))
    await (await generator.post(stale)).wait(soon())
    assert np.array_equal(memory, pattern(8 * MIB, 1))
    first.kill()

    assert await generator.add_peer(second.metadata) == peer
    with pytest.raises(TransferError, match="trainer"):
        await generator.post(stale)
    fresh = await generator.prepare(peer, read_list(second, memory, MIB))
    await (await generator.post(fresh)).wait(soon())
    assert np.array_equal(memory, pattern(8 * MIB, 2))


async def test_a_new_life_is_refused_while_reads_of_the_old_one_may_still_land(
    target: MakeTarget, generator: NixlAgent
) -> None:
    first, second = target("trainer", 8 * MIB, 1, TCP), target("trainer", 8 * MIB, 2, TCP)
    await first.ready()
    await second.ready()
    memory = zeros(8 * MIB)
    await generator.register([region(memory)])
    peer = await generator.add_peer(first.metadata)
    prepared = await generator.prepare(peer, read_list(first, memory, MIB))
    await (await generator.post(prepared)).wait(soon())
    first.signal(signal.SIGSTOP)
    read = await generator.post(prepared)
    with pytest.raises(TransferError, match="former life"):
        await generator.add_peer(second.metadata)
    first.kill()
    assert await read.wait_settled(soon())
    await generator.add_peer(second.metadata)
    fresh = await generator.prepare(peer, read_list(second, memory, MIB))
    await (await generator.post(fresh)).wait(soon())
    assert np.array_equal(memory, pattern(8 * MIB, 2))


async def test_an_agent_is_destroyed_when_it_closes_whoever_keeps_its_errors(target: MakeTarget) -> None:
    """Alive, it would go on writing, into memory that is free by then."""
    need_nixl()
    trainer = await target("trainer", 64 * MIB, 1, TCP).ready()
    agent = await NixlAgent.create("generator", readable=False)
    memory = zeros(trainer.size_bytes)
    await agent.register([region(memory)])
    peer = await agent.add_peer(trainer.metadata)
    prepared = await agent.prepare(peer, read_list(trainer, memory, MIB))
    await (await agent.post(prepared)).wait(soon())
    kept: list[BaseException] = []
    for hopeless in (
        lambda: agent.prepare(peer, one_run(trainer.region.addr - 4096, memory.ctypes.data, 1)),
        lambda: agent.add_peer(trainer.metadata[:-20].replace(b"trainer", b"another")),
    ):
        with pytest.raises((TransferError, PeerError)) as refused:
            await hopeless()
        kept.append(refused.value)
    trainer.signal(signal.SIGSTOP)
    read = await agent.post(prepared)
    trainer.kill()
    with pytest.raises(TransferError) as failed:
        await read.wait(soon())
    kept.append(failed.value)
    native = weakref.ref(agent._core._agent)
    await agent.aclose()
    assert native() is None
    assert all(error.__cause__ is not None for error in kept)


async def test_closing_after_a_peer_was_killed_in_the_middle_does_not_abort(target: MakeTarget) -> None:
    """UCX does, if it is destroyed while parts of a read are queued: often, not always; so many agents."""
    trainer = await target("trainer", 8 * MIB, 1).ready()
    code = [sys.executable, "-m", "tests.transport.dying_peer", str(trainer.process.pid)]
    facts = f"{trainer.region.addr} {trainer.size_bytes} {trainer.metadata.hex()}"
    done = await anyio.run_process(code, input=facts.encode(), check=False, stderr=None)
    assert (done.returncode, done.stdout) == (0, b"closed\n")
