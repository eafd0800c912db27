"""What is written to logs and said in errors, with everything switched on and nothing filtered."""

from __future__ import annotations

import base64
import logging
from pathlib import Path

import pytest

from modelexpress_rl._pb import modelexpress_rl_pb2 as v1
from modelexpress_rl._pb import refit_pb2 as refit
from modelexpress_rl.errors import AccessDenied, UsageError
from modelexpress_rl.reshard import manifest as manifests
from modelexpress_rl.rpc import ControlPlane, Unauthenticated, WorkerEndpoint, parse_address
from modelexpress_rl.rpc.auth import worker_token
from modelexpress_rl.rpc.endpoint import LEASE_ID_HEADER, WORKER_ID_HEADER
from modelexpress_rl.server.security import ServerSecurity
from tests.security.authority import Authority
from tests.security.job import MODEL, SLOT, Job, opened
from tests.server.api import eventually

pytestmark = pytest.mark.anyio

CONTROL, READER = "control-token-8f3a", "reader-token-77c1"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


async def served_manifest(job: Job, endpoint: str, tokens: Path) -> bytes:
    """What a reader gets that shows all that is demanded."""
    async with ControlPlane.dial(job.url) as plane:
        worker = refit.WorkerRegistration(worker_id="g", role=refit.WORKER_ROLE_GENERATOR, model_name=MODEL)
        await plane.register_worker(refit.RegisterWorkerRequest(worker=worker, ttl_seconds=60))
        request = v1.AcquireVersionLeaseRequest(version_id="v1", worker_id="g", ttl_ms=60_000)
        lease_id = (await plane.acquire_version_lease(request)).lease.lease_id
    lease = {WORKER_ID_HEADER: b"g", LEASE_ID_HEADER: lease_id.encode()}
    async with WorkerEndpoint(parse_address(endpoint), credentials=worker_token(tokens)) as served:
        asked = refit.GetWeightVersionShardManifestRequest(version_id="v1", source_slot_id=SLOT)
        return (await served.get_weight_version_shard_manifest(asked, metadata=lease)).manifest


async def warned(job: Job, caplog: pytest.LogCaptureFixture) -> int:
    """How many files were found wanting, once they were looked at."""

    async def found() -> int:
        async with ControlPlane.dial(job.url) as plane:
            await plane.get_server_info(v1.GetServerInfoRequest())
        number = caplog.text.count("changed and can't be used")
        return number if number >= 2 else 0

    return int(await eventually(found))


async def test_a_whole_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("everyone")
    own = authority.issue("server")
    accepted, tokens = (write(tmp_path / name, f"{CONTROL}\n") for name in ("accepted", "tokens"))
    worker_tokens = write(tmp_path / "worker-tokens", f"{READER}\n")
    for name, value in {
        "MX_TLS_CA": authority.file,
        "MX_TLS_CERT": cert,
        "MX_TLS_KEY": key,
        "MX_WORKER_TLS_CERT": cert,
        "MX_WORKER_TLS_KEY": key,
        "MX_WORKER_TLS_CLIENT_CA": authority.file,
        "MX_AUTH_TOKEN_PATH": tokens,
        "MX_WORKER_AUTH_TOKEN_PATH": worker_tokens,
        "MX_MANIFEST_REQUIRE_LEASE": "1",
        "MX_WORKER_HOST": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, str(value))
    security = ServerSecurity.of(cert=own[0], key=own[1], client_ca=authority.file, token_file=accepted)
    with caplog.at_level(logging.DEBUG):
        async with opened(security, scheme="https") as job:
            trainer = await job.trainer()
            await job.publish(trainer, "v1", 1.0)
            await job.refit("v1", 1.0)
            manifest = await served_manifest(job, trainer.worker_endpoint, worker_tokens)
            # Refusals of each kind.
            wrong = write(tmp_path / "wrong", "wrong-token-5d5d")
            with monkeypatch.context() as patch:
                patch.setenv("MX_WORKER_AUTH_TOKEN_PATH", str(wrong))
                generator, _ = await job.generator()
                with pytest.raises(AccessDenied) as denied:
                    await generator.stage_weight("v1")
                patch.setenv("MX_AUTH_TOKEN_PATH", str(wrong))
                async with ControlPlane.dial(job.url) as plane:
                    with pytest.raises(Unauthenticated) as refused:
                        await plane.get_server_info(v1.GetServerInfoRequest())
            # Rotations that go wrong, on both sides.
            write(accepted, "two words-4be1")
            write(worker_tokens, "")
            write(own[1], "no key-4be1")
            assert (await warned(job, caplog)) >= 2
            await job.publish(trainer, "v2", 2.0)
    said = "\n".join([caplog.text, str(denied.value), repr(denied.value), str(refused.value)])
    for secret in (CONTROL, READER, "wrong-token-5d5d", "4be1"):
        assert secret not in said
        assert base64.b64encode(secret.encode()).decode().rstrip("=") not in said
    assert "PRIVATE KEY" not in said
    agent_meta = manifests.decode(manifest).agent_meta
    assert len(agent_meta) > 4
    assert base64.b64encode(agent_meta).decode() not in said
    assert repr(agent_meta)[2:-1] not in said
    address = job.weights.ctypes.data
    loud = "\n".join(each.getMessage() for each in caplog.records if each.levelno > logging.DEBUG)
    assert str(address) not in loud
    assert f"{address:x}" not in loud


def test_headers_stay_out_of_the_log_of_the_library_that_packs_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    import hpack

    with caplog.at_level(logging.DEBUG):
        hpack.Encoder().encode([("authorization", f"Bearer {CONTROL}")])
    assert CONTROL not in caplog.text


@pytest.mark.parametrize(
    "text", ["http://me:pass-4be1@host:1", "grpc://pass-4be1@host", "me:pass-4be1@host:1"]
)
def test_a_password_in_an_address(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text, what="MODEL_EXPRESS_URL")
    assert "pass-4be1" not in str(caught.value)
    assert "MODEL_EXPRESS_URL" in str(caught.value)


def test_lines_of_a_token_file(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", "good-4be1\nbad one-4be1\n")
    with pytest.raises(UsageError) as caught:
        ServerSecurity.of(token_file=path)
    assert "4be1" not in str(caught.value)
