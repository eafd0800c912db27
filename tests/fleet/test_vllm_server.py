"""vLLM servers as a fleet's generators, over HTTP; the real one is in tests/vllm."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from modelexpress_rl.errors import (
    DeadlineExceeded,
    PeerError,
    StateError,
    TryAgainError,
    Unavailable,
    UsageError,
    VersionGone,
)
from modelexpress_rl.fleet import Fleet, FleetAborted, FleetPolicy, Holding, VllmServer
from statemachines.fleet_records import Held
from tests.fleet.vllm_double import VllmDouble, serving

pytestmark = pytest.mark.anyio

POLICY = FleetPolicy(stage_timeout_s=5, commit_timeout_s=5, undo_timeout_s=5, attempts=1)


@pytest.fixture
def double() -> VllmDouble:
    return VllmDouble()


@pytest.fixture
def url(double: VllmDouble) -> Iterator[str]:
    with serving(double) as url:
        yield url


async def test_two_servers_go_together(double: VllmDouble, url: str) -> None:
    other = VllmDouble()
    with serving(other) as other_url:
        servers = {"a": VllmServer(url), "b": VllmServer(f"{other_url}/")}
        for server in servers.values():
            await server.initialize({"model_name": "m"})
        async with Fleet(current_version_id="v1", policy=POLICY) as fleet:
            for name, server in servers.items():
                await fleet.admit(name, server)
            assert (await fleet.update("v2")).committed
            for each in (double, other):
                assert (each.version, each.label, each.paused) == ("v2", "v2", False)
            other.fails_half_way = True
            with pytest.raises(FleetAborted, match="half of it") as caught:
                await fleet.update("v3")
            assert caught.value.report.members == ("a",)
            assert caught.value.report.holds["b"] == Held("v2", certain=False)
            assert (double.version, double.paused) == ("v2", False)
            assert (other.label, other.paused) == ("mx-uncertain v2", True)  # read by whoever comes next
            other.fails_half_way = False
            assert await fleet.catch_up() == {}
            assert (other.version, other.label, other.paused) == ("v2", "v2", False)


async def test_an_update_that_wrote_nothing_is_told_from_one_that_did(double: VllmDouble, url: str) -> None:
    server = VllmServer(url)
    await server.install("v1", hold_s=0)
    await server.resume("v1")
    with pytest.raises(StateError, match=r"version v9 was not installed: .* 500 .*VersionGone"):
        await server.install("v9", hold_s=0)
    assert await server.holds() == Holding("v1", held=True)
    await server.abort("v9", back_to="v1")
    assert await server.holds() == Holding("v1")
    double.fails_half_way = True
    with pytest.raises(StateError, match="half of it"):
        await server.install("v2", hold_s=0)
    assert await server.holds() == Holding("v1", certain=False, held=True)
    with pytest.raises(StateError, match="no version to go back to"):
        await server.abort("v2", back_to=None)
    with pytest.raises(StateError, match="can't be served"):
        await server.resume("v1")
    double.fails_half_way = False
    await server.abort("v2", back_to="v1")
    assert await server.holds() == Holding("v1")


async def test_what_a_dead_orchestrator_left_is_gone_on_with(double: VllmDouble, url: str) -> None:
    double.session = double.paused = True
    double.label = "mx-uncertain default"
    server = VllmServer(url)
    assert await server.holds() == Holding(None, certain=False, held=True)
    async with Fleet(current_version_id="v1", policy=POLICY) as fleet:
        await fleet.admit("a", server)
    assert (double.version, double.label, double.paused) == ("v1", "v1", False)
    double.calls.clear()
    await server.install("v1", hold_s=0)
    assert "update_weights" not in double.calls


async def test_a_server_with_the_extension_stages_while_it_generates(double: VllmDouble, url: str) -> None:
    server = VllmServer(url, stages_ahead=True)
    double.standing = [["staging", "staging"], ["staged", "staging"], ["staged", "staged"]]
    await server.stage("v1", keep_s=1)
    assert double.standing == []
    assert "pause" not in double.calls
    failures = {
        "VersionGone: v1 was released": VersionGone,
        "LeaseLost: lapsed": TryAgainError,
        "GeometryError: no such tensor": StateError,
        "none": StateError,
    }
    for words, kind in failures.items():
        double.standing = [["staged", words]]
        with pytest.raises(kind, match=f"version v1 is not staged on rank 1 of {url}: {words}"):
            await server.stage("v1", keep_s=1)
    double.standing = [[]]
    with pytest.raises(PeerError, match="expected an answer of each rank, got"):
        await server.stage("v1", keep_s=1)
    double.label = "v1"
    double.calls.clear()
    await server.stage("v1", keep_s=1)
    assert "collective_rpc" not in double.calls


async def test_errors_say_what_came(double: VllmDouble, url: str) -> None:
    server = VllmServer(url)
    double.raw = b"<html>"
    with pytest.raises(PeerError, match="no JSON: b'<html>'"):
        await server.holds()
    double.raw = b"[]"
    with pytest.raises(PeerError, match="expected a JSON object, got list"):
        await server.holds()
    double.raw = b"{}"
    with pytest.raises(PeerError, match="expected a weight_version and is_paused, got None, None"):
        await server.stage("v1", keep_s=1)
    double.raw = b" " * (2 << 20)
    with pytest.raises(PeerError, match="more than 1048576 bytes"):
        await server.holds()
    double.raw, double.answers_with = None, 503
    with pytest.raises(Unavailable, match="503"):
        await server.holds()
    double.answers_with = 404
    with pytest.raises(StateError, match="404"):
        await server.holds()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(Unavailable, match="refused"):
            await VllmServer(f"http://127.0.0.1:{port}").holds()
        silent.listen()
        with pytest.raises(DeadlineExceeded, match=r"nothing came for 0\.05 s"):
            await VllmServer(f"http://127.0.0.1:{port}", timeout_s=0.05).holds()


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(UsageError, match="url: expected http"):
        VllmServer("localhost:8000")
    with pytest.raises(UsageError, match="pause_mode: expected one of keep, wait, abort, got 'soon'"):
        VllmServer("http://localhost", pause_mode="soon")
