"""`mx-rl doctor`: what it finds, and what it advises."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from modelexpress_rl.cli.doctor_server import look
from modelexpress_rl.cli.findings import Verdict
from modelexpress_rl.server.app import serving
from modelexpress_rl.server.clock import SystemClock
from modelexpress_rl.server.stores.memory import MemoryStore
from modelexpress_rl.server.stores.port import StoreUnavailable
from tests.cli.conftest import Plane
from tests.cli.running import mx_rl

pytestmark = pytest.mark.anyio


class Fast(SystemClock):
    """A clock that is ahead of everybody's."""

    def now_ms(self) -> int:
        return super().now_ms() + 120_000


def by_subject(findings: list[Any]) -> dict[str, Any]:
    return {one["subject"]: one for one in findings}


async def test_all_is_well(plane: Plane) -> None:
    done = await mx_rl("doctor", "--server", plane.address, "--no-nixl", "--json")
    found = by_subject(done.body["findings"])
    assert (done.status, done.body["ok"]) == (0, True)
    for subject in (f"connection to {plane.address}", f"server {plane.address}", f"clock of {plane.address}"):
        assert found[subject]["verdict"] == "ok"
    assert found[f"store of {plane.address}"]["verdict"] == "warn"  # in memory only
    assert found["MX_METADATA_PORT"]["verdict"] == "ok"
    assert "the kernel chooses" in found["MX_WORKER_GRPC_PORT"]["found"]
    assert "there is no NIXL metadata listener" in found["MX_METADATA_PORT"]["found"]


async def test_text(plane: Plane) -> None:
    done = await mx_rl("doctor", "--server", plane.address, "--no-nixl")
    assert f"ok   connection to {plane.address}: " in done.out
    assert "       -> a restart forgets every version" in done.out
    assert "0 failed, " in done.out


async def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{held.getsockname()[1]}"
        done = await mx_rl("doctor", "--server", server, "--no-nixl", "--json")
    found = by_subject(done.body["findings"])[f"connection to {server}"]
    assert (done.status, found["verdict"]) == (1, "fail")
    assert "start `mx-rl serve --port" in found["advice"]


async def test_a_port_of_this_host_is_taken(plane: Plane) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"MX_METADATA_PORT": port, "MX_WORKER_HOST": "127.0.0.1"}
        done = await mx_rl("doctor", "--server", plane.address, "--no-nixl", "--json", env=env)
    found = by_subject(done.body["findings"])
    assert done.status == 1
    assert found["MX_METADATA_PORT"]["found"] == f"port {port} is taken by another process"
    assert found["worker host"]["verdict"] == "warn"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"MX_SERVER_ADDRESS": "nonsense"}, "MX_SERVER_ADDRESS: 'nonsense' is not an address"),
        ({"MX_AUTH_TOKEN_PATH": "/nowhere"}, "MX_AUTH_TOKEN_PATH: no token in /nowhere"),
        ({"MX_METADATA_PORT": "many"}, "MX_METADATA_PORT is 'many'"),
    ],
)
async def test_a_configuration_that_cannot_be_read(env: dict[str, str], said: str) -> None:
    done = await mx_rl("doctor", "--no-nixl", "--json", "--timeout", "1", env=env)
    assert done.status == 1
    assert any(said in one["found"] for one in done.body["findings"])


async def test_tls_where_there_is_none(plane: Plane) -> None:
    findings = await look(f"https://{plane.address}", 5.0)
    assert [one.verdict for one in findings if one.subject.startswith(("TLS", "server"))] == [
        Verdict.FAIL,
        Verdict.FAIL,
    ]


async def test_something_else_than_a_control_plane() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        findings = await look(address, 0.5)
    (found,) = [one for one in findings if one.subject == f"server {address}"]
    assert (found.verdict, "does not answer" in found.advice) == (Verdict.FAIL, True)


async def test_clocks_that_differ() -> None:
    async with serving(MemoryStore(Fast())) as running:
        findings = await look(running.address, 5.0)
    (found,) = [one for one in findings if one.subject.startswith("clock")]
    assert (found.verdict, found.found) == (Verdict.FAIL, "120.00 s ahead of this host's")


async def test_a_store_that_is_away(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away() -> None:
        raise StoreUnavailable("the store failed: disk is full")

    monkeypatch.setattr(plane.running.registry.store, "next_wake_ms", away)
    await plane.running.readiness.look()
    findings = await look(plane.address, 5.0)
    (found,) = [one for one in findings if one.subject.startswith("store")]
    assert found.verdict is Verdict.FAIL


async def test_servers_that_share_no_store(plane: Plane) -> None:
    async with serving(MemoryStore()) as other:
        findings = await look(f"{plane.address},{other.address}", 5.0)
    (found,) = [one for one in findings if one.subject == "replicas"]
    assert found.verdict is Verdict.FAIL


async def test_servers_that_share_one() -> None:
    store = MemoryStore()
    async with serving(store) as one, serving(store) as other:
        findings = await look(f"{one.address},{other.address}", 5.0)
    assert [found.verdict for found in findings if found.subject == "replicas"] == [Verdict.OK]


@pytest.mark.heavy
async def test_nixl_starts(plane: Plane) -> None:
    pytest.importorskip("nixl")
    done = await mx_rl("doctor", "--server", plane.address, "--json")
    assert by_subject(done.body["findings"])["NIXL"]["verdict"] == "ok"
