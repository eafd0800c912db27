"""`mx-rl serve` and `mx-rl evict` with the options of security, as processes."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl.cli.main import main
from modelexpress_rl.errors import UsageError
from modelexpress_rl.rpc import ControlPlane, Unauthenticated
from modelexpress_rl.server.security import ServerSecurity, is_loopback
from tests.security.authority import Authority
from tests.server.process import failed, serve

pytestmark = pytest.mark.anyio
INFO = v1.GetServerInfoRequest()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("secret\n")
    return path


class TestWhereItListens:
    async def test_beyond_this_host_it_wants_to_know_who_calls(self, tmp_path: Path, tokens: Path) -> None:
        status, out, err = await failed("--host", "0.0.0.0", "--port", "0")
        assert (status, out) == (2, "")
        for words in ("--host 0.0.0.0", "--auth-token-file", "--tls-client-ca", "--insecure"):
            assert words in err
        cert, key = Authority(tmp_path).issue("server")
        alone = ("--tls-cert", str(cert), "--tls-key", str(key))
        status, _, err = await failed("--host", "::", "--port", "0", *alone)
        assert (status, "--insecure" in err) == (2, True)

    async def test_a_token_or_being_told_is_enough(self, tokens: Path) -> None:
        for options in (("--auth-token-file", str(tokens)), ("--insecure",)):
            async with serve("--host", "0.0.0.0", *options) as running:
                address = running.address.replace("0.0.0.0", "127.0.0.1")
                async with ControlPlane.dial(address) as plane:
                    if options == ("--insecure",):
                        assert (await plane.get_server_info(INFO)).store_kind == "memory"
                        continue
                    with pytest.raises(Unauthenticated):
                        await plane.get_server_info(INFO)

    @pytest.mark.parametrize(
        ("host", "loopback"),
        [
            ("127.0.0.1", True),
            ("127.8.8.8", True),
            ("::1", True),
            ("localhost", True),
            ("0.0.0.0", False),
            ("::", False),
            ("10.0.0.7", False),
            ("fe80::1%lo", False),
            ("no.such.host.invalid", False),
            ("", False),
            ("x" * 300, False),
        ],
    )
    def test_what_is_this_host(self, host: str, loopback: bool) -> None:
        assert is_loopback(host) is loopback

    def test_all_of_it(self, tmp_path: Path, tokens: Path) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("server")
        with_token = ServerSecurity.of(token_file=tokens)
        mutual = ServerSecurity.of(cert=cert, key=key, client_ca=authority.file)
        for fine in (with_token, mutual, ServerSecurity(insecure=True)):
            fine.require_safe("10.0.0.7")
        for open_one in (ServerSecurity(), ServerSecurity.of(cert=cert, key=key)):
            open_one.require_safe("localhost")
            with pytest.raises(UsageError, match=r"--host 10\.0\.0\.7"):
                open_one.require_safe("10.0.0.7")


class TestProcesses:
    async def test_mutual_tls_tokens_and_an_operator(
        self,
        tmp_path: Path,
        tokens: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("server", ["plane.example"])
        ours = authority.issue("operator")
        options = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.file))
        async with serve(*options, "--auth-token-file", str(tokens)) as running:
            for name, value in {
                "MODEL_EXPRESS_URL": f"https://{running.address}",
                "MX_TLS_CA": authority.file,
                "MX_TLS_CERT": ours[0],
                "MX_TLS_KEY": ours[1],
                "MX_TLS_SERVER_NAME": "plane.example",
                "MX_AUTH_TOKEN_PATH": tokens,
            }.items():
                monkeypatch.setenv(name, str(value))
            assert await anyio.to_thread.run_sync(main, ["evict", "nobody"]) == 1
            assert "version nobody is not known" in capsys.readouterr().err
            monkeypatch.delenv("MX_AUTH_TOKEN_PATH")
            assert await anyio.to_thread.run_sync(main, ["evict", "nobody"]) == 1
            assert "a bearer token is required" in capsys.readouterr().err
            monkeypatch.setenv("MX_TLS_SERVER_NAME", "other.example")
            assert await anyio.to_thread.run_sync(main, ["evict", "nobody"]) == 1
            assert "its certificate is not for 'other.example'" in capsys.readouterr().err

    async def test_files_that_can_not_be_used(self, tmp_path: Path, tokens: Path) -> None:
        cert, _ = Authority(tmp_path).issue("server")
        for options, words in (
            (("--tls-cert", str(cert)), "needs --tls-key"),
            (("--auth-token-file", str(tmp_path / "nowhere")), "No such file"),
            (("--tls-cert", str(cert), "--tls-key", str(tokens)), "no certificate in PEM"),
        ):
            status, out, err = await failed("--port", "0", *options)
            assert (status, out, "Traceback" in err) == (2, "", False)
            assert words in err

    async def test_one_who_never_shakes_hands_holds_up_nobody(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        authority = Authority(tmp_path)
        cert, key = authority.issue("server")
        monkeypatch.setenv("MX_TLS_CA", str(authority.file))
        async with serve("--tls-cert", str(cert), "--tls-key", str(key)) as running:
            host, _, port = running.address.rpartition(":")
            silent = [socket.create_connection((host, int(port))) for _ in range(50)]
            async with ControlPlane.dial(f"https://{running.address}") as plane:
                assert (await plane.get_server_info(INFO)).store_kind == "memory"
            for each in silent:
                each.close()
            assert await running.end() == 0
