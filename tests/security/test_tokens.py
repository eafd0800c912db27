"""Bearer tokens: what lets a caller in, what is answered without, and how they rotate in the middle."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.control import AsyncModelExpressControlClient
from modelexpress_rl.errors import AccessDenied, UsageError
from modelexpress_rl.rpc import ControlPlane, TokenFile, Unauthenticated, parse_address
from modelexpress_rl.rpc.auth import AcceptedTokens
from modelexpress_rl.rpc.files import NamedFile
from modelexpress_rl.server.app import Running, serving
from modelexpress_rl.server.security import ServerSecurity
from modelexpress_rl.server.stores.memory import MemoryStore
from tests.security.authority import Authority
from tests.server.api import Api, eventually, refused

pytestmark = pytest.mark.anyio

INFO = v1.GetServerInfoRequest()
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    write(path, "# the trainers\nfirst-secret\n\nsecond-secret\n")
    return path


@pytest.fixture
async def server(tokens: Path) -> AsyncIterator[Running]:
    async with serving(MemoryStore(), security=ServerSecurity.of(token_file=tokens)) as running:
        yield running


@contextlib.asynccontextmanager
async def plane_with(running: Running, path: Path, **named: object) -> AsyncIterator[ControlPlane]:
    credentials = TokenFile(path, **named)  # type: ignore[arg-type]
    address = parse_address(running.address)
    async with ControlPlane(address, rpc_timeout_s=5.0, credentials=credentials) as plane:
        yield plane


def client_token(tmp_path: Path, token: str, name: str = "client-token") -> Path:
    path = tmp_path / name
    write(path, token + "\n")
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


class TestWhoIsLetIn:
    @pytest.mark.parametrize("token", ["first-secret", "second-secret"])
    async def test_any_of_the_tokens(
        self, server: Running, tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_AUTH_TOKEN_PATH", str(client_token(tmp_path, token)))
        async with AsyncModelExpressControlClient.connect(server.address) as client:
            version = await client.create_weight_version("m", "k", "FULL_TENSOR", ["s"], uid="v")
            async with contextlib.aclosing(client.watch("v")) as statuses:
                assert (await anext(statuses)).version_id == version.version_id

    @pytest.mark.parametrize(
        ("header", "words"),
        [
            (None, "none came"),
            ("Bearer wrong", "not one that is accepted"),
            ("Bearer first-secre", "not one that is accepted"),
            ("Bearer first-secret2", "not one that is accepted"),
            ("Bearer ", "not one that is accepted"),
            ("Bearer # the trainers", "not one that is accepted"),
            ("Basic first-secret", "holds something else"),
            ("first-secret", "holds something else"),
        ],
    )
    async def test_nobody_else(self, server: Running, header: str | None, words: str) -> None:
        metadata = () if header is None else (("authorization", header),)
        async with grpc.aio.insecure_channel(server.address) as channel:
            api = Api(channel)
            call = api.refit.GetWeightVersion(refit.GetWeightVersionRequest(uid="v"), metadata=metadata)
            await refused(call, UNAUTHENTICATED, words)
            stream = api.control.WatchVersion(v1.WatchVersionRequest(version_id="v"), metadata=metadata)
            await refused(anext(aiter(stream)), UNAUTHENTICATED, words)

    async def test_the_scheme_in_any_case(self, server: Running) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            metadata = (("authorization", "bearer first-secret"),)
            await Api(channel).control.GetServerInfo(INFO, metadata=metadata)

    async def test_health_is_open_and_reflection_is_not(self, server: Running) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            await refused(anext(aiter(stub.ServerReflectionInfo(requests))), UNAUTHENTICATED)

    async def test_our_client_says_what_is_wrong_and_does_not_try_again(
        self, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MX_AUTH_TOKEN_PATH", str(client_token(tmp_path, "wrong")))
        async with AsyncModelExpressControlClient.connect(server.address, 600.0) as client:
            with anyio.fail_after(10), pytest.raises(Unauthenticated, match="not one that is accepted"):
                await client.get_weight_version("v")
        assert issubclass(Unauthenticated, AccessDenied)

    async def test_a_large_request_is_refused_unread(self, server: Running) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            request = refit.GetWeightVersionRequest(uid="x" * (32 << 20))
            await refused(Api(channel).refit.GetWeightVersion(request), UNAUTHENTICATED)

    async def test_with_tls(self, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("server")
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        security = ServerSecurity.of(cert=cert, key=key, token_file=tokens)
        async with serving(MemoryStore(), security=security) as running:
            async with ControlPlane.dial(f"https://{running.address}") as plane:
                with pytest.raises(Unauthenticated):
                    await plane.get_server_info(INFO)
            monkeypatch.setenv("MX_AUTH_TOKEN_PATH", str(client_token(tmp_path, "first-secret")))
            async with ControlPlane.dial(f"https://{running.address}") as plane:
                assert (await plane.get_server_info(INFO)).store_kind == "memory"


class TestRotation:
    async def test_the_servers_file_in_the_middle(
        self, server: Running, tokens: Path, tmp_path: Path
    ) -> None:
        path = client_token(tmp_path, "first-secret")
        async with plane_with(server, path) as plane:
            await plane.get_server_info(INFO)
            write(tokens, "second-secret\nthird-secret\n")

            async def out() -> bool:
                try:
                    await plane.get_server_info(INFO)
                except Unauthenticated:
                    return True
                return False

            await eventually(out)
            write(tokens, "")  # a mishap: those of before stay
            write(path, "third-secret")
            await eventually(lambda: works(plane))

    async def test_the_clients_file_is_read_again_when_it_is_refused(
        self, server: Running, tokens: Path, tmp_path: Path
    ) -> None:
        """Whoever rotates without an overlap loses no call, once the client's file is replaced."""
        now_s = 0.0
        path = client_token(tmp_path, "first-secret")
        async with plane_with(server, path, clock=lambda: now_s) as plane:
            await plane.get_server_info(INFO)
            write(path, "third-secret")
            write(tokens, "third-secret")

            async def refuses_the_old_one() -> bool:
                async with plane_with(server, client_token(tmp_path, "first-secret", "old")) as other:
                    return not await works(other)

            await eventually(refuses_the_old_one)
            with pytest.raises(Unauthenticated):  # read less than a second ago, by its clock
                await plane.get_server_info(INFO)
            now_s = 1.5
            await plane.get_server_info(INFO)

    async def test_a_stream_that_is_opened_anew(self, server: Running, tokens: Path, tmp_path: Path) -> None:
        now_s = 0.0
        path = client_token(tmp_path, "wrong")
        request = v1.WatchVersionRequest(version_id="v", wait_for_creation=True, heartbeat_ms=100)
        async with plane_with(server, path, clock=lambda: now_s) as plane:
            async with plane.watch_version(request) as messages:
                with pytest.raises(Unauthenticated):
                    await anext(aiter(messages))
            write(path, "first-secret")
            now_s = 1.5
            async with plane.watch_version(request) as messages:
                await anext(aiter(messages))


async def works(plane: ControlPlane) -> bool:
    try:
        await plane.get_server_info(INFO)
    except Unauthenticated:
        return False
    return True


class TestFiles:
    @pytest.mark.parametrize(
        "content", ["", "# only a comment\n", "two words\n", "schlüssel\n", "good\nbad one\n", "\x00\n"]
    )
    def test_one_that_holds_no_tokens(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "tokens"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match=r"--auth-token-file=.*tokens must hold") as caught:
            ServerSecurity.of(token_file=path)
        for word in ("two words", "schlüssel", "good", "bad one"):
            assert word not in str(caught.value)

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--auth-token-file=.*nowhere: No such file"):
            ServerSecurity.of(token_file=tmp_path / "nowhere")

    def test_it_is_looked_at_once_a_second(self, tmp_path: Path) -> None:
        now_s = 0.0
        path = tmp_path / "tokens"
        write(path, "a")
        accepted = AcceptedTokens(NamedFile("X", path), clock=lambda: now_s)
        write(path, "b")
        now_s = 0.9
        assert accepted.accept("Bearer a") is None
        now_s = 1.1
        assert accepted.accept("Bearer a") is not None
        assert accepted.accept("Bearer b") is None
        path.unlink()
        now_s = 2.2
        assert accepted.accept("Bearer b") is None


class TestAddresses:
    @pytest.mark.parametrize("name", ["MX_TLS_CA", "MX_TLS_CERT", "MX_TLS_SERVER_NAME"])
    def test_tls_that_is_asked_for_and_not_dialled(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "something")
        with pytest.raises(UsageError, match=rf"{name} is set, .* write https://plane:1"):
            ControlPlane.dial("plane:1")
        ControlPlane.dial("http://plane:1")  # meant so
