"""Redis servers of the tests' own: real ones, on free ports, that end with the tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

BINARY = (
    os.environ.get("MX_TEST_REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
)
START_S = 10.0


def free_port() -> int:
    """A port that the kernel says is free, with room for a cluster's second one above it."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port + 10_000 >= 65_536:
                continue
            try:
                two.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


def until(true: Callable[[], Any], what: str, within_s: float = START_S) -> Any:
    """Wait for something that happens soon."""
    deadline = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s:g} s"
        time.sleep(0.01)
    return found


class RedisServer:
    """A redis-server process; `start` it again after it ended."""

    def __init__(self, folder: Path, *options: str) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.folder = folder
        self.options = options
        self.port = free_port()
        password = dict(pairwise(options)).get("--requirepass")
        self.client = redis.Redis(
            port=self.port,
            password=password,
            socket_timeout=5,
            socket_connect_timeout=1,
            retry=Retry(NoBackoff(), 0),
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.start_unready()
        until(self._answers, f"the start of redis-server (see {self.folder}/redis.log)")

    def start_unready(self) -> None:
        """Start without waiting until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [str(BINARY), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self.folder), "--logfile", "redis.log"]
        command += ["--repl-diskless-sync-delay", "0", *self.options]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def _answers(self) -> bool:
        import redis

        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "redis.log").read_text()
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """As a machine that loses power."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        self.client.close()


class RedisCluster:
    """Three primaries on this host, which share the slots."""

    def __init__(self, folder: Path) -> None:
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-config-file",
            "nodes",
        )
        self.nodes = [RedisServer(folder / str(number), *options) for number in range(3)]

    @property
    def address(self) -> str:
        return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        width = 16_384 // len(self.nodes) + 1
        for number, node in enumerate(self.nodes):
            slots = range(number * width, min((number + 1) * width, 16_384))
            node.client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for node in self.nodes:
            until(lambda node=node: self._knows_all(node), "the cluster's agreement")

    def _knows_all(self, node: RedisServer) -> bool:
        info = node.client.execute_command("CLUSTER", "INFO")
        text = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
        known = len(node.client.execute_command("CLUSTER", "SLOTS"))
        return text["cluster_state"] == "ok" and known == len(self.nodes)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def need_redis() -> None:
    """Skip where there is no Redis to start."""
    pytest.importorskip("redis", reason="the extra 'redis' is not installed")
    if BINARY is None:
        pytest.skip("there is no redis-server (apt-get install redis-server)")


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for tests that leave it as it is; each uses a prefix of its own."""
    need_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster for tests that leave it as it is."""
    need_redis()
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers of the test's own, which it may break."""
    need_redis()
    with ExitStack() as stack:

        def start(*options: str) -> RedisServer:
            server = RedisServer(tmp_path / f"redis{len(stack._exit_callbacks)}", *options)  # type: ignore[attr-defined]
            stack.callback(server.kill)
            server.start()
            return server

        yield start
