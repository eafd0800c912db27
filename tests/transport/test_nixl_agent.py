"""Starting and ending NIXL agents: ports, environment, forks, and programs that just exit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time

import anyio
import anyio.to_thread
import numpy as np
import pytest

from modelexpress_rl.errors import DeadlineExceeded, UsageError
from modelexpress_rl.transport.nixl import NixlAgent, listener
from tests.transport.rigs import need_nixl, noise, region, runs, soon, zeros

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    need_nixl()
    monkeypatch.delenv("MX_METADATA_PORT", raising=False)
    monkeypatch.setenv("MX_WORKER_HOST", "127.0.0.1")


class TestListener:
    async def test_a_free_port_is_chosen_and_serves_metadata(self) -> None:
        async with await NixlAgent.create("trainer") as trainer, await NixlAgent.create("other") as other:
            memory = noise(1000)
            await trainer.register([region(memory)])
            host, _, port = trainer.metadata_endpoint.rpartition(":")
            assert host == "127.0.0.1"
            assert trainer.metadata_endpoint != other.metadata_endpoint
            # As a client of another make fetches it: from NIXL's listener to NIXL's listener.
            raw = other._core._agent
            raw.fetchRemoteMD("trainer", host, int(port), "")
            nothing = other._core._binding.nixlXferDList(other._core._binding.DRAM_SEG)
            deadline = soon()
            while raw.checkRemoteMD("trainer", nothing) != other._core._binding.NIXL_SUCCESS:
                assert anyio.current_time() < deadline
                await anyio.sleep(0.01)
            with socket.create_connection((host, int(port)), timeout=5):
                pass
        assert int(port) not in listener._own_listening_ports()

    async def test_a_configured_port_that_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UsageError, match=rf"port {port} .*MX_METADATA_PORT"):
                await NixlAgent.create("trainer", metadata_port=port)
            monkeypatch.setenv("MX_METADATA_PORT", str(port - 3))
            with pytest.raises(UsageError, match=rf"port {port} .*MX_METADATA_PORT"):
                await NixlAgent.create("trainer", device_index=3)
        async with await NixlAgent.create("trainer", metadata_port=port, host="::1") as agent:
            assert agent.metadata_endpoint == f"[::1]:{port}"
            with pytest.raises(UsageError, match=f"port {port} "):
                await NixlAgent.create("second", metadata_port=port)

    async def test_a_chosen_port_that_another_process_takes_first(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            candidates = iter([taken.getsockname()[1]] * 3)
            choose = listener._free_port
            monkeypatch.setattr(listener, "_free_port", lambda: next(candidates, None) or choose())
            async with await NixlAgent.create("trainer") as agent:
                assert agent.metadata_endpoint != f"127.0.0.1:{taken.getsockname()[1]}"
            assert next(candidates, None) is None

    async def test_many_at_once_get_ports_of_their_own(self) -> None:
        agents: list[NixlAgent] = []

        async def start(index: int) -> None:
            agents.append(await NixlAgent.create(f"trainer-{index}"))

        async with anyio.create_task_group() as starting:
            for index in range(6):
                starting.start_soon(start, index)
        assert len({agent.metadata_endpoint for agent in agents}) == 6
        for agent in agents:
            await agent.aclose()

    async def test_none_for_an_agent_that_only_reads(self) -> None:
        async with await NixlAgent.create("generator", readable=False) as agent:
            assert agent.metadata_endpoint == ""


class TestStarting:
    async def test_names_are_unique_by_default(self) -> None:
        async with (
            await NixlAgent.create(readable=False) as one,
            await NixlAgent.create(readable=False) as two,
        ):
            assert one.name != two.name

    async def test_transports_that_cannot_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "shm")
        with pytest.raises(UsageError, match=r"UCX_TLS=shm .*tcp"):
            await NixlAgent.create("trainer")

    async def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nixl._bindings", None)
        with pytest.raises(UsageError, match=r"modelexpress-rl\[nixl\]"):
            await NixlAgent.create("trainer")

    async def test_within_its_time_or_not_at_all(self) -> None:
        with pytest.raises(DeadlineExceeded, match="trainer"):
            await NixlAgent.create("trainer", start_timeout_s=0.0)
        async with await NixlAgent.create("trainer") as agent:
            assert agent.name == "trainer"

    async def test_importing_the_adapter_loads_no_nixl(self) -> None:
        code = "import sys, modelexpress_rl.transport.nixl; print({'nixl', 'torch'} & set(sys.modules))"
        done = await anyio.run_process([sys.executable, "-c", code])
        assert done.stdout == b"set()\n"


async def test_an_idle_agent_burns_no_core() -> None:
    """NIXL's progress thread spins by default. The window is what is measured, not waited for."""
    async with await NixlAgent.create("trainer") as trainer, await NixlAgent.create("other", readable=False):
        await trainer.register([region(noise(1000))])
        used = time.process_time()
        await anyio.sleep(0.3)
        assert time.process_time() - used < 0.15


async def test_a_forked_child_neither_uses_nor_ends_its_parents_agent() -> None:
    source, target = noise(100_000), zeros(100_000)
    async with (
        await NixlAgent.create("trainer") as trainer,
        await NixlAgent.create("generator", readable=False) as generator,
    ):
        await trainer.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await trainer.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=1000))
        await (await generator.post(prepared)).wait(soon())
        child = os.fork()
        if not child:
            # As near to a normal exit as a test may come: exit handlers run, the agents lose their owners.
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        deadline = soon()
        while os.waitpid(child, os.WNOHANG) == (0, 0):  # noqa: ASYNC222 - WNOHANG doesn't block
            assert anyio.current_time() < deadline
            await anyio.sleep(0.01)
        target[:] = 0
        await (await generator.post(prepared)).wait(soon())
        assert np.array_equal(target, source)


async def test_one_peer_is_loaded_from_many_threads_at_once() -> None:
    """UCX has crashed when it was; so all of NIXL is entered by the agent's one thread."""
    source = noise(100_000)
    async with (
        await NixlAgent.create("trainer") as trainer,
        await NixlAgent.create("generator", readable=False) as generator,
    ):
        await trainer.register([region(source)])
        metadata = await trainer.metadata()
        target = zeros(100_000)
        await generator.register([region(target)])

        async def load() -> None:
            for _ in range(10):
                await generator.forget_peer("trainer")
                assert await generator.add_peer(metadata) == "trainer"

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(anyio.to_thread.run_sync, anyio.run, load)
        await generator.add_peer(metadata)
        prepared = await generator.prepare("trainer", runs(source, target, run_bytes=1000))
        await (await generator.post(prepared)).wait(soon())
        assert np.array_equal(target, source)


async def test_waiting_for_a_read_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that does not end is asked for a thousand times a second; the window is what is measured."""
    source, target = noise(1000), zeros(1000)
    async with (
        await NixlAgent.create("silent", readable=False) as silent,  # it makes no progress by itself
        await NixlAgent.create("generator", readable=False) as generator,
    ):
        await silent.register([region(source)])
        await generator.register([region(target)])
        peer = await generator.add_peer(await silent.metadata())
        prepared = await generator.prepare(peer, runs(source, target, run_bytes=100))
        read = await generator.post(prepared)
        polls, poll = 0, generator._core.poll

        def count() -> float | None:
            nonlocal polls
            polls += 1
            return poll()

        monkeypatch.setattr(generator._driver, "_poll", count)
        assert not await read.wait_settled(soon(0.3))
        assert 10 < polls < 600
        while not read.settled:
            silent._driver.submit(silent._core.progress).result(5)
            await anyio.sleep(0.001)
        await read.wait(soon())
    assert np.array_equal(target, source)


@pytest.mark.heavy
@pytest.mark.parametrize("end", ["", "del agent; sys.exit()"])
async def test_a_program_that_never_closes_its_agent_ends_normally(end: str) -> None:
    code = f"""
        import sys
        sys.modules["torch"] = None
        import anyio, numpy as np
        from modelexpress_rl.transport.nixl import NixlAgent
        from modelexpress_rl.transport.port import Region
        memory = np.zeros(1000, np.uint8)
        agent = anyio.run(NixlAgent.create, "trainer")
        anyio.run(agent.register, [Region(memory.ctypes.data, 1000)])
        {end}
    """
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=60, check=False
        )
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
