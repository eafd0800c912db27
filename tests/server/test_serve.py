"""`mx-rl serve` as users run it: real processes, signals, ports, and a kill in the middle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.cli.main import main
from modelexpress_rl.cli.serve import span_ms
from statemachines.ids import lease_id_of
from tests.server.api import GENERATOR, READY, RELEASING, STAGING, Api, eventually
from tests.server.process import BOUND_S, failed, serve

pytestmark = pytest.mark.anyio


class TestStartAndEnd:
    async def test_it_says_where_it_listens_and_ends_when_told(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            async with serve() as running:
                async with grpc.aio.insecure_channel(running.address) as channel:
                    await Api(channel).create()
                assert await running.end(number) == 0
                assert await running.process.stdout.read() == b""

    async def test_it_starts_in_about_a_second(self) -> None:
        started = time.monotonic()
        async with serve():
            took_s = time.monotonic() - started
        assert took_s < 5  # 0.6 s on an idle machine

    async def test_open_watches_do_not_hold_up_its_end(self) -> None:
        async with serve() as running, grpc.aio.insecure_channel(running.address) as channel:
            api = Api(channel)
            await api.create()
            call = aiter(api.control.WatchVersion(v1.WatchVersionRequest(version_id="v")))
            await anext(call)
            started = time.monotonic()
            assert await running.end() == 0
            assert time.monotonic() - started < 10
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(call)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    async def test_it_loads_no_engine(self) -> None:
        heavy = ("torch", "nixl", "numpy", "redis", "megatron")
        code = (
            "import sys, modelexpress_rl.cli.serve; "
            f"loaded = [name for name in {heavy} if name in sys.modules]; assert not loaded, loaded"
        )
        done = await anyio.run_process([sys.executable, "-c", code], check=False)
        assert done.returncode == 0, done.stderr.decode()


class TestRefusals:
    async def test_a_port_that_is_taken(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            status, out, err = await failed("--port", str(port))
        assert (status, out) == (2, "")
        assert f"can't listen on 127.0.0.1:{port}: the port is taken" in err
        assert "Traceback" not in err

    async def test_two_servers_never_share_a_port(self) -> None:
        async with serve() as running:
            status, _, err = await failed("--port", running.address.rpartition(":")[2])
            assert (status, "the port is taken" in err) == (2, True)

    async def test_a_store_that_another_server_has(self, tmp_path: Path) -> None:
        store = f"sqlite:{tmp_path / 'store.db'}"
        async with serve("--store", store):
            status, _, err = await failed("--port", "0", "--store", store)
            assert (status, "in use by another server" in err) == (2, True)

    async def test_what_is_no_store_is_left_alone(self, tmp_path: Path) -> None:
        text, folder = tmp_path / "passwd", tmp_path / "folder"
        text.write_text("root:x:0:0\n")
        folder.mkdir()
        for path, words in ((text, "not a database"), (folder, "not a regular file")):
            status, _, err = await failed("--port", "0", "--store", f"sqlite:{path}")
            assert (status, words in err) == (2, True)
        assert sorted(os.listdir(tmp_path)) == ["folder", "passwd"]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--store", "postgres:x"], "memory, sqlite:PATH or redis"),
            (["--store", "sqlite:/nowhere/at/all/store.db"], "No such file or directory"),
            (["--port", "70000"], "--port must be between"),
            (["--keep-last", "-1"], "--keep-last must be"),
            (["--keep-last-for", "m=1", "--keep-last=-1"], "--keep-last must be"),
            (["--max-lease-ttl", "0s"], "--max-lease-ttl must be"),
            (
                ["--drain-deadline=-5"],
                "--drain-deadline must be between 0 and 2592000000 (30 days), not -5000",
            ),
            (["--retention", "soon"], "'soon' is not a span"),
            (["--keep-last-for", "model"], "'model' is not MODEL=K"),
            (["--keep-last-for", "=3"], "'=3' is not MODEL=K"),
            (["--max-workers-per-model", "0"], "--max-workers-per-model must be"),
        ],
    )
    async def test_options(self, options: list[str], words: str) -> None:
        status, out, err = await failed("--port", "0", *options)
        assert (status, out) == (2, "")
        assert words in err
        assert "Traceback" not in err

    def test_no_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 2
        assert "COMMAND" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "span"), [("500ms", 500), ("30s", 30_000), ("5m", 300_000), ("1h", 3_600_000), ("2", 2_000)]
    )
    def test_spans(self, text: str, span: int) -> None:
        assert span_ms(text) == span


class TestKill:
    async def test_everything_that_was_acknowledged_is_there(self, tmp_path: Path) -> None:
        store = f"sqlite:{tmp_path / 'store.db'}"
        async with serve("--store", store) as running:
            async with grpc.aio.insecure_channel(running.address) as channel:
                api = Api(channel)
                await api.make_ready("ready", ttl_s=600)
                await api.register("g", GENERATOR, ttl_s=600)
                lease = await api.lease("g", uid="ready", ttl_s=200)
                await api.create("staging")
                await api.publish("s0", "t0", uid="staging")
                await api.make_ready("released", ttl_s=600)
                await api.delete("released")
                before = {uid: await api.status(uid) for uid in ("ready", "staging", "released")}
                info = await api.control.GetServerInfo(v1.GetServerInfoRequest())
            await running.end(signal.SIGKILL)

        async with (
            serve("--store", store) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            api = Api(channel)
            for uid, status in before.items():
                now = await api.status(uid)
                assert now.now_unix_ms >= status.now_unix_ms
                now.now_unix_ms = status.now_unix_ms
                assert now == status
            again = await api.control.GetServerInfo(v1.GetServerInfoRequest())
            assert again.store_id == info.store_id
            assert (await api.create("ready")).state == READY
            assert (await api.publish("s0", "t0", uid="staging")).version.state == STAGING
            assert (await api.publish("s1", "t0", uid="staging")).version.state == READY
            assert await api.give_back(lease.lease_id, "g", uid="ready")
            assert await api.withdraw("s0", "t0", uid="released")
            assert (await api.get("released")).state == RELEASING

    async def test_leases_and_registrations_run_out_while_it_is_down(self, tmp_path: Path) -> None:
        store = f"sqlite:{tmp_path / 'store.db'}"
        async with serve("--store", store) as running:
            async with grpc.aio.insecure_channel(running.address) as channel:
                api = Api(channel)
                await api.make_ready(ttl_s=60)
                await api.register("g", GENERATOR, ttl_s=60)
                lease = await api.lease("g", ttl_s=2)
            await running.end(signal.SIGKILL)
        async with (
            serve("--store", store) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            api = Api(channel)

            async def lapsed() -> v1.VersionStatus | None:
                status = await api.status()
                return None if status.live_leases else status

            status = await eventually(lapsed)
            assert lease.expires_at_unix_ms <= status.now_unix_ms < lease.expires_at_unix_ms + 5_000
            assert not await api.give_back(lease_id_of("v", "g"), "g")

    async def test_killed_in_the_middle_of_a_burst(self, tmp_path: Path) -> None:
        """Whatever was answered is there; whatever was not can be repeated (P8)."""
        store = f"sqlite:{tmp_path / 'store.db'}"
        acknowledged: set[str] = set()
        async with serve("--store", store) as running:  # noqa: SIM117 - the channel goes first
            async with grpc.aio.insecure_channel(running.address) as channel:
                api = Api(channel)
                await api.register("t0", ttl_s=600)

                async def one(uid: str) -> None:
                    with suppress(grpc.aio.AioRpcError):
                        await api.create(uid)
                        await api.publish("s0", "t0", uid=uid)
                        acknowledged.add(uid)

                async def kill_soon() -> None:
                    async def begun() -> bool:
                        return len(acknowledged) >= 20

                    await eventually(begun)
                    running.process.kill()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(kill_soon)
                    for n in range(400):
                        tasks.start_soon(one, f"v{n}")
        unknown = {f"v{n}" for n in range(400)} - acknowledged
        assert len(acknowledged) >= 20
        assert unknown
        async with (
            serve("--store", store) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            api = Api(channel)
            for uid in acknowledged:
                assert await api.shards(uid) == [("s0", "t0")]
            for uid in unknown:
                await api.create(uid)
                await api.publish("s0", "t0", uid=uid)

    async def test_a_watch_resumes_without_missing_or_inventing(self, tmp_path: Path) -> None:
        store = f"sqlite:{tmp_path / 'store.db'}"
        async with serve("--store", store) as running:
            async with grpc.aio.insecure_channel(running.address) as channel:
                api = Api(channel)
                await api.register("t0", ttl_s=600)
                await api.create()
                seen = await api.status()
            port = int(running.address.rpartition(":")[2])
            await running.end(signal.SIGKILL)
        async with (
            serve("--store", store, port=port) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            api = Api(channel)
            request = v1.WatchVersionRequest(version_id="v", from_revision=seen.revision, heartbeat_ms=60_000)
            call = api.control.WatchVersion(request)
            await api.publish("s0", "t0")
            with anyio.fail_after(BOUND_S):
                status = (await anext(aiter(call))).status
            call.cancel()
            assert (status.covered_slots, status.revision > seen.revision) == (1, True)


def test_the_installed_command_is_this_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "modelexpress_rl.cli.main", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND_S,
    )
    for option in ("--host", "--port", "--store", "--drain-deadline", "--retention", "--max-lease-ttl"):
        assert option in done.stdout
