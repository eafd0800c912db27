"""A server behind TLS and mutual TLS, with the clients of both stacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc import ControlPlane, TlsError, Unavailable, parse_address
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.security import ServerSecurity
from modelexpress_rl.server.stores.memory import MemoryStore
from tests.security.authority import Authority
from tests.server.api import Api, eventually

pytestmark = pytest.mark.anyio
INFO = v1.GetServerInfoRequest()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def secure(
    authority: Authority, *, client_ca: Path | None = None, **issued: object
) -> AsyncIterator[Running]:
    cert, key = authority.issue("server", **issued)  # type: ignore[arg-type]
    security = ServerSecurity.of(cert=cert, key=key, client_ca=client_ca)
    async with serving(MemoryStore(), security=security) as running:
        yield running


def port_of(running: Running) -> str:
    return running.address.rpartition(":")[2]


def dialled(address: str) -> ControlPlane:
    return ControlPlane(parse_address(address), rpc_timeout_s=5.0)


def read(path: Path) -> bytes:
    return path.read_bytes()


@contextlib.asynccontextmanager
async def grpc_channel(
    address: str, ca: Path, pair: tuple[Path, Path] | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    cert, key = (read(path) for path in pair) if pair else (None, None)
    credentials = grpc.ssl_channel_credentials(read(ca), key, cert)
    async with grpc.aio.secure_channel(address, credentials) as channel:
        yield channel


async def tls_refusal(address: str, *words: str) -> None:
    async with dialled(address) as plane:
        with pytest.raises(TlsError) as caught:
            await plane.get_server_info(INFO)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class TestTls:
    async def test_both_stacks(self, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority) as running:
            async with AsyncModelExpressControlClient.connect(f"https://{running.address}") as client:
                await client.create_weight_version("m", "k", "FULL_TENSOR", ["s"], uid="v")
            async with grpc_channel(running.address, authority.file) as channel:
                assert (await Api(channel).get("v")).uid == "v"

    async def test_a_stream(self, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority) as running, dialled(f"grpcs://{running.address}") as plane:
            request = v1.WatchVersionRequest(version_id="v", wait_for_creation=True)
            async with plane.watch_version(request) as messages:
                async with AsyncModelExpressControlClient.connect(f"https://{running.address}") as client:
                    await client.create_weight_version("m", "k", "FULL_TENSOR", ["s"], uid="v")
                with anyio.fail_after(10):
                    assert (await anext(aiter(messages))).status.version_id == "v"

    async def test_without_the_ca(self, authority: Authority, tmp_path: Path) -> None:
        async with secure(authority) as running:
            await tls_refusal(f"https://{running.address}", "not trusted", "MX_TLS_CA")

    async def test_with_another_ca(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(Authority(tmp_path, "other").file))
        async with secure(authority) as running:
            await tls_refusal(f"https://{running.address}", "not trusted", "MX_TLS_CA")

    async def test_a_name_that_it_does_not_hold(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority, identities=["plane.example"]) as running:
            by_number, by_name = f"https://{running.address}", f"https://localhost:{port_of(running)}"
            await tls_refusal(by_number, "is not for '127.0.0.1'", "MX_TLS_SERVER_NAME")
            await tls_refusal(by_name, "is not for 'localhost'", "MX_TLS_SERVER_NAME")
            monkeypatch.setenv("MX_TLS_SERVER_NAME", "plane.example")
            async with dialled(by_number) as plane:
                assert (await plane.get_server_info(INFO)).store_kind == "memory"
            monkeypatch.setenv("MX_TLS_SERVER_NAME", "elsewhere.example")
            await tls_refusal(by_number, "is not for 'elsewhere.example'")

    async def test_an_expired_certificate(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority, age_days=10) as running:
            await tls_refusal(f"https://{running.address}", "its certificate has expired")
            authority.issue("server")  # the operator mends it; nothing is restarted

            async with dialled(f"https://{running.address}") as plane:
                assert (await plane.get_server_info(INFO)).store_kind == "memory"

    async def test_it_is_not_tried_again_and_again(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with secure(authority) as running:
            client = AsyncModelExpressControlClient.connect(f"https://{running.address}", 600.0)
            async with client:
                with anyio.fail_after(10), pytest.raises(TlsError):
                    await client.get_weight_version("v")

    async def test_plain_where_tls_is_spoken_and_the_reverse(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority) as running, dialled(f"http://{running.address}") as plane:
            with pytest.raises(Unavailable, match="must begin with https://"):
                await plane.get_server_info(INFO)
        async with serving(MemoryStore()) as running:
            await tls_refusal(f"https://{running.address}", "does not speak TLS")


class TestRotation:
    async def test_many_connect_at_once(self) -> None:
        """gRPC replaces its TLS context while others begin a handshake by it; see `hammer`."""
        done = await anyio.run_process([sys.executable, "-m", "tests.security.hammer"], check=False, cwd=ROOT)
        assert (done.returncode, done.stdout) == (0, b"survived\n"), done.stderr.decode()

    def test_grpc_is_told_of_a_certificate_once(
        self, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda *args, **_: told.extend(args))
        cert, key = authority.issue("server")

        class Port:
            def add_secure_port(self, address: str, credentials: object) -> int:
                return 1

        ServerSecurity.of(cert=cert, key=key).add_port(Port(), "")  # type: ignore[arg-type]
        _, ask = told
        assert [ask(), ask()] == [None, None]
        authority.issue("server")
        assert isinstance(ask(), grpc.ServerCertificateConfiguration)
        assert ask() is None

    async def test_the_servers_certificate(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """New connections meet the new certificate, one that stands goes on."""
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority) as running, dialled(f"https://{running.address}") as standing:
            await standing.get_server_info(INFO)
            authority.issue("server", ["elsewhere.example"])
            await tls_refusal(f"https://{running.address}", "is not for '127.0.0.1'")
            await standing.get_server_info(INFO)

    async def test_half_a_rotation_changes_nothing(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority) as running:
            whole = (tmp_path / "server.crt").read_bytes()
            _, other_key = authority.issue("other", ["elsewhere.example"])
            for broken in (b"", b"no PEM", whole[:200], (tmp_path / "other.crt").read_bytes()):
                (tmp_path / "server.crt").write_bytes(broken)
                async with dialled(f"https://{running.address}") as plane:
                    assert (await plane.get_server_info(INFO)).store_kind == "memory"
            (tmp_path / "server.key").write_bytes(other_key.read_bytes())
            await tls_refusal(f"https://{running.address}", "is not for '127.0.0.1'")

    async def test_a_clients_ca_and_certificate(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that lives on: what it trusts and what it presents are read at each connection."""
        other = Authority(tmp_path, "other")
        trusted = tmp_path / "trusted.pem"
        trusted.write_bytes(other.file.read_bytes())
        cert, key = other.issue("client")
        for name, path in (("MX_TLS_CA", trusted), ("MX_TLS_CERT", cert), ("MX_TLS_KEY", key)):
            monkeypatch.setenv(name, str(path))
        async with (
            secure(authority, client_ca=authority.file) as running,
            dialled(f"https://{running.address}") as plane,
        ):
            with pytest.raises(TlsError, match="not trusted"):
                await plane.get_server_info(INFO)
            trusted.write_bytes(authority.file.read_bytes())
            with pytest.raises(Unavailable, match="certificate"):
                await plane.get_server_info(INFO)
            authority.issue("client")

            assert (await plane.get_server_info(INFO)).store_kind == "memory"

    async def test_the_clients_cas_of_a_server(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A CA that is taken out of the file lets nobody in any more."""
        other = Authority(tmp_path, "other")
        accepted = tmp_path / "accepted.pem"
        accepted.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
        theirs, ours = other.issue("theirs"), authority.issue("ours")
        async with secure(authority, client_ca=accepted) as running:
            for pair in (theirs, ours):
                async with grpc_channel(running.address, authority.file, pair) as channel:
                    await Api(channel).control.GetServerInfo(INFO)
            accepted.write_bytes(authority.file.read_bytes())

            async def refused() -> bool:
                async with grpc_channel(running.address, authority.file, theirs) as channel:
                    try:
                        await Api(channel).control.GetServerInfo(INFO)
                    except grpc.aio.AioRpcError as error:
                        return error.code() is grpc.StatusCode.UNAVAILABLE
                return False

            await eventually(refused)
            async with grpc_channel(running.address, authority.file, ours) as channel:
                await Api(channel).control.GetServerInfo(INFO)


class TestMutualTls:
    async def test_both_stacks(self, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = authority.issue("client")
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        monkeypatch.setenv("MX_TLS_CERT", str(pair[0]))
        monkeypatch.setenv("MX_TLS_KEY", str(pair[1]))
        async with secure(authority, client_ca=authority.file) as running:
            async with dialled(f"https://{running.address}") as plane:
                assert (await plane.get_server_info(INFO)).store_kind == "memory"
            async with grpc_channel(running.address, authority.file, pair) as channel:
                await Api(channel).control.GetServerInfo(INFO)

    async def test_without_a_certificate(self, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with secure(authority, client_ca=authority.file) as running:
            async with dialled(f"https://{running.address}") as plane:
                with pytest.raises(Unavailable, match=r"demands? a client certificate"):
                    await plane.get_server_info(INFO)
            async with grpc_channel(running.address, authority.file) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await Api(channel).control.GetServerInfo(INFO)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    async def test_with_a_certificate_of_a_stranger_or_an_expired_one(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        stranger = Authority(tmp_path, "other").issue("stranger")
        expired = authority.issue("expired", age_days=10)
        async with secure(authority, client_ca=authority.file) as running:
            for cert, key in (stranger, expired):
                monkeypatch.setenv("MX_TLS_CERT", str(cert))
                monkeypatch.setenv("MX_TLS_KEY", str(key))
                async with dialled(f"https://{running.address}") as plane:
                    with pytest.raises(Unavailable) as caught:
                        await plane.get_server_info(INFO)
                assert "certificate" in str(caught.value), caught.value


class TestFiles:
    @pytest.mark.parametrize(
        ("missing", "words"),
        [
            ("key", "--tls-cert=.*: needs --tls-key"),
            ("cert", "--tls-key=.*: needs --tls-cert"),
            ("both", "--tls-client-ca=.*: needs --tls-cert and --tls-key"),
        ],
    )
    def test_what_belongs_together(self, authority: Authority, missing: str, words: str) -> None:
        cert, key = authority.issue("server")
        with pytest.raises(UsageError, match=words):
            ServerSecurity.of(
                cert=None if missing in ("cert", "both") else cert,
                key=None if missing in ("key", "both") else key,
                client_ca=authority.file,
            )

    def test_files_that_hold_something_else(self, authority: Authority, tmp_path: Path) -> None:
        cert, key = authority.issue("server")
        empty, nowhere = tmp_path / "empty", tmp_path / "nowhere"
        empty.touch()
        with pytest.raises(UsageError, match=r"--tls-cert=.*empty and --tls-key"):
            ServerSecurity.of(cert=empty, key=key)
        with pytest.raises(UsageError, match=r"--tls-key=.*nowhere: No such file"):
            ServerSecurity.of(cert=cert, key=nowhere)
        with pytest.raises(UsageError, match=r"--tls-cert=.*KEY_VALUES_MISMATCH"):
            ServerSecurity.of(cert=cert, key=authority.issue("other")[1])
        with pytest.raises(UsageError, match=r"--tls-client-ca=.*holds no CA"):
            ServerSecurity.of(cert=cert, key=key, client_ca=empty)

    async def test_the_variables(
        self, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_TLS_CA", str(tmp_path / "nowhere"))
        with pytest.raises(UsageError, match=r"MX_TLS_CA=.*nowhere: No such file"):
            dialled("https://localhost:1")
        monkeypatch.delenv("MX_TLS_CA")
        monkeypatch.setenv("MX_TLS_CERT", str(authority.issue("client")[0]))
        with pytest.raises(UsageError, match=r"MX_TLS_CERT=.*: needs MX_TLS_KEY"):
            dialled("https://localhost:1")
