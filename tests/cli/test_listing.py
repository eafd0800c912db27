"""`mx-rl versions`, `workers`, `watch` and `top`, as text and as JSON, and how they fail."""

from __future__ import annotations

import signal
import socket
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from typing import Any

import anyio
import pytest

from modelexpress_rl.cli import show
from modelexpress_rl.cli.top_snapshot import Rates, Snapshot
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import UsageError
from modelexpress_rl.version import VersionState, VersionStatus
from tests.cli.conftest import Plane
from tests.cli.running import BOUND_S, mx_rl, mx_rl_process
from tests.server.api import GENERATOR

pytestmark = pytest.mark.anyio


class TestVersions:
    async def test_a_table(self, busy: Plane) -> None:
        done = await mx_rl("versions", "--server", busy.address)
        assert (done.status, done.err) == (0, "")
        rows = {line.split()[0]: line for line in done.out.splitlines() if line.split()}
        assert "READY" in rows["v2"]
        assert "2/2" in rows["v2"]
        assert "missing s4, s5, s6 and 1 more" in rows["v3"]

    async def test_json(self, busy: Plane) -> None:
        done = await mx_rl("versions", "--server", busy.address, "--json")
        assert [one["version_id"] for one in done.body] == ["v1", "v2", "v3"]
        assert done.body[1]["live_leases"] == 1
        assert done.body[2]["state"] == "STAGING"

    async def test_only_some(self, busy: Plane) -> None:
        done = await mx_rl("versions", "--server", busy.address, "--state", "staging", "--json")
        assert [one["version_id"] for one in done.body] == ["v3"]
        done = await mx_rl("versions", "--server", busy.address, "--model", "another")
        assert (done.status, done.out) == (0, "no versions\n")

    async def test_the_environment_names_the_server(self, busy: Plane) -> None:
        done = await mx_rl_process("versions", "--json", env={"MX_SERVER_ADDRESS": busy.address})
        assert (len(done.body), done.status, done.err) == (3, 0, "")


class TestWorkers:
    async def test_a_table(self, busy: Plane) -> None:
        done = await mx_rl("workers", "--server", busy.address)
        rows = {line.split()[0]: line for line in done.out.splitlines() if line.split()}
        assert "UNCERTAIN" in rows["g3"]
        assert rows["g0"].split()[-1] == "v2"
        assert "TRAINER" in rows["t0"]

    async def test_json_of_a_role(self, busy: Plane) -> None:
        done = await mx_rl("workers", "--server", busy.address, "--role", "generator", "--json")
        assert [(one["worker_id"], one["serving_version_id"]) for one in done.body] == [
            ("g0", "v2"),
            ("g1", "v2"),
            ("g2", "v1"),
            ("g3", None),
        ]
        assert done.body[3]["serving_uncertain"]


class TestWatch:
    async def test_until_a_state(self, busy: Plane) -> None:
        async with anyio.create_task_group() as tasks:

            async def complete() -> None:
                for n in range(4, 8):
                    await busy.api.publish(f"s{n}", "t1", uid="v3")

            tasks.start_soon(complete)
            words = ("watch", "v3", "--until", "READY", "--json", "--server", busy.address)
            done = await mx_rl(*words)
        assert done.status == 0
        assert done.lines[-1]["state"] == "READY"
        covered = [line["covered_slots"] for line in done.lines]
        assert covered == sorted(covered)

    async def test_a_version_that_never_gets_there(self, busy: Plane) -> None:
        await busy.api.create("gone")
        await busy.api.delete("gone")
        done = await mx_rl("watch", "gone", "--until", "READY", "--server", busy.address)
        assert done.status == 1
        assert "RETIRED" in done.out

    @pytest.mark.parametrize("words", [[], ["--model", "org/model"]])
    async def test_all_until_interrupted(self, busy: Plane, words: list[str]) -> None:
        command = [sys.executable, "-m", "modelexpress_rl.cli.main", "watch", *words]
        process = await create_subprocess_exec(
            *command, "--server", busy.address, stdout=PIPE, stderr=PIPE, env={"PYTHONUNBUFFERED": "1"}
        )
        try:
            with anyio.fail_after(BOUND_S):
                seen = [(await process.stdout.readline()).decode().split()[1] for _ in range(3)]
                await busy.api.create("v4")
                seen.append((await process.stdout.readline()).decode().split()[1])
                process.send_signal(signal.SIGINT)
                _, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        assert (sorted(seen), process.returncode, err) == (["v1", "v2", "v3", "v4"], 130, b"")

    async def test_a_version_or_a_model(self, busy: Plane) -> None:
        done = await mx_rl("watch", "v1", "--model", "m", "--server", busy.address)
        assert (done.status, "not both" in done.err) == (2, True)


class TestTop:
    async def test_once(self, busy: Plane) -> None:
        done = await mx_rl("top", "--once", "--server", busy.address)
        assert (done.status, done.err) == (0, "")
        assert "1 STAGING, 2 READY   1 leases   2 trainers   4 generators" in done.out
        assert "████████░░░░░░░░ 4/8" in done.out
        fleet = [line.split() for line in done.out.splitlines() if line.strip().startswith("org/model")]
        assert fleet == [
            ["org/model", "v2", "newest", "2", "g0,", "g1"],
            ["org/model", "v1", "READY,", "behind", "v2", "1", "g2"],
            ["org/model", "UNCERTAIN", "1", "g3"],
        ]

    async def test_json(self, busy: Plane) -> None:
        done = await mx_rl("top", "--once", "--json", "--server", busy.address)
        assert done.body["server"]["store"] == "memory"
        assert [one["version_id"] for one in done.body["versions"]] == ["v3", "v2", "v1"]
        assert len(done.body["workers"]) == 6

    async def test_an_empty_control_plane(self, plane: Plane) -> None:
        done = await mx_rl("top", "--once", "--server", plane.address)
        assert "no versions" in done.out
        assert "no generators" in done.out

    def test_rates(self) -> None:
        def look(now_ms: int, *versions: VersionStatus) -> Snapshot:
            return Snapshot("a:1", "0", "memory", now_ms, versions, (), 1.0)

        before = look(1_000, version("v1", revision=1, covered=1))
        after = look(
            3_000,
            version("v2", revision=3, covered=4, ready_at=2_500),
            version("v1", revision=2, covered=2),
        )
        assert Rates.between(before, after) == Rates(changes=1.0, ready=0.5, slots=2.5)
        assert Rates.between(None, after) is None
        assert Rates.between(after, after) is None


class TestOddNames:
    """An id may hold any character: rich's marks, what a terminal obeys, and line breaks."""

    NAMES = ("[/b]", ":smile:", "\x1b[31mred", "a\nb", "\x9bm", "\u202egnp.exe")
    SHOWN = ("[/b]", ":smile:", r"\x1b[31mred", r"a\nb", r"\x9bm", r"\u202egnp.exe")

    @pytest.fixture
    async def odd(self, plane: Plane) -> Plane:
        for name in self.NAMES:
            await plane.api.create(name, model=name, slots=[name])
            await plane.api.register(name, GENERATOR, model=name, ttl_s=600)
        return plane

    @pytest.mark.parametrize("words", [("versions",), ("workers",), ("top", "--once")])
    async def test_they_are_shown_and_not_obeyed(self, odd: Plane, words: tuple[str, ...]) -> None:
        done = await mx_rl(*words, "--server", odd.address)
        assert (done.status, done.err) == (0, "")
        rows = [line.split() for line in done.out.splitlines() if line.split()]
        for shown in self.SHOWN:
            assert any(row[0] == shown for row in rows), shown
        assert all(line.isprintable() for line in done.out.splitlines())

    async def test_where_the_terminal_knows_ascii_only(self, odd: Plane) -> None:
        await odd.api.create("größe", model="größe", slots=["a"])
        for words in (["versions"], ["versions", "--json"]):
            command = [sys.executable, "-m", "modelexpress_rl.cli.main", *words, "--server", odd.address]
            done = await anyio.run_process(command, check=False, env={"PYTHONIOENCODING": "ascii"})
            assert (done.returncode, done.stderr) == (0, b"")

    async def test_nor_when_watched_evicted_or_refused(self, odd: Plane) -> None:
        for name, shown in zip(self.NAMES, self.SHOWN, strict=True):
            done = await mx_rl("watch", name, "--until", "STAGING", "--server", odd.address)
            assert f" {shown} STAGING " in done.out
            assert done.out.count("\n") == 1
            done = await mx_rl("evict", name, "--server", odd.address)
            assert done.out.startswith(f"{shown} RETIRED")
            assert done.out.count("\n") == 1
        done = await mx_rl("evict", "\x1b[31mnone", "--server", odd.address)
        assert "version \\x1b[31mnone is not known" in done.err


class TestFailures:
    @pytest.mark.parametrize(
        "words",
        [("--timeout", "nan"), ("--timeout", "-1"), ("--wait", "nan"), ("--wait", "inf"), ("--wait", "-1")],
    )
    async def test_an_eviction_waits_for_no_nonsense(self, plane: Plane, words: tuple[str, str]) -> None:
        with anyio.fail_after(BOUND_S):
            done = await mx_rl("evict", "v", "--server", plane.address, *words)
        assert done.status == 2
        assert f"{words[0]} must be" in done.err

    @pytest.mark.parametrize("timeout_s", [float("nan"), 0, -1, "5"])
    def test_nor_does_a_client(self, timeout_s: Any) -> None:
        with pytest.raises(UsageError, match="rpc_timeout_s: expected a positive"):
            AsyncModelExpressControlClient.connect("localhost:1", timeout_s)

    @pytest.mark.parametrize("command", ["versions", "workers", "top"])
    async def test_nobody_there(self, command: str) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            server = f"127.0.0.1:{held.getsockname()[1]}"
            done = await mx_rl(command, "--server", server, "--timeout", "2")
        assert done.status == 1
        assert server in done.err
        assert "mx-rl doctor" in done.err

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("versions", "--server", "nonsense"), "server_url: 'nonsense' is not an address"),
            (("versions", "--state", "blue"), "'blue' is no state"),
            (("versions", "--timeout", "0"), "--timeout must be"),
            (("top", "--interval", "0"), "--interval must be"),
            (("watch", "--until", "blue"), "'blue' is no state"),
        ],
    )
    async def test_called_wrongly(self, words: tuple[str, ...], said: str) -> None:
        done = await mx_rl(*words)
        assert done.status == 2
        assert said in done.err

    async def test_a_reader_that_has_seen_enough(self, busy: Plane) -> None:
        command = f"{sys.executable} -m modelexpress_rl.cli.main watch --server {busy.address} | head -n 1"
        with anyio.fail_after(BOUND_S):
            async with anyio.create_task_group() as tasks:

                async def keep_talking() -> None:
                    n = 0
                    while True:
                        n += 1
                        await busy.api.create(f"more{n}")
                        await anyio.sleep(0.05)

                tasks.start_soon(keep_talking)
                done = await anyio.run_process(["bash", "-o", "pipefail", "-c", command], check=False)
                tasks.cancel_scope.cancel()
        assert (done.returncode, done.stderr) == (0, b"")


def version(uid: str, *, revision: int, covered: int, ready_at: int | None = None) -> VersionStatus:
    return VersionStatus(
        uid,
        "m",
        VersionState.READY,
        revision=revision,
        expected_slots=4,
        covered_slots=covered,
        ready_at_unix_ms=ready_at,
    )


@pytest.mark.parametrize(
    ("value_ms", "shown"),
    [(0, "0s"), (59_999, "59s"), (61_000, "1m01s"), (3_660_000, "1h01m"), (90_000_000, "1d01h"), (-5, "0s")],
)
def test_spans(value_ms: int, shown: str) -> None:
    assert show.span(value_ms) == shown


def test_a_bar_is_full_only_when_everything_is_covered() -> None:
    almost: Any = VersionStatus("v", "m", VersionState.STAGING, expected_slots=1000, covered_slots=999)
    assert "░" in show.coverage(almost, bar=True).plain
